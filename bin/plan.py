"""`dflash-precompile --plan`: what a build would make and take, without compiling."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dflash_aot.bin.bucket_table import Deployment, describe_memory, print_memory
from dflash_aot.bin.command_line import format_bytes, format_table
from dflash_aot.cache.signature import state_arrays
from dflash_aot.compile.analysis.build_estimate import BuildEstimate, estimate_build
from dflash_aot.compile.analysis.memory_plan import CompilerFigures


def report_plan(deployment: Deployment, bundle: Path, jobs: int, tau: float | None, as_json: bool) -> None:
    """Counts, the expected effort, memory and bounds bucket by bucket, and what padding wastes."""
    programs, grid, draft = deployment.programs, deployment.grid, deployment.draft
    signatures = programs.list_signatures(grid)
    counts = Counter(signature.program for signature in signatures)
    weights = sum(recipe.bytes for recipe in programs.recipes())
    state = sum(array.bytes for array in state_arrays(programs.pair, grid))
    effort = estimate_build(signatures, programs.pair, deployment.platform)
    waste = {axis: worst_waste(getattr(grid, axis)) for axis in ("batch", "length", "prefill")}
    if as_json:
        plan = {
            "bundle": str(bundle),
            "dialect": draft.dialect,
            "grid": str(grid),
            "sampling": programs.pair.sampling,
            "executables": len(signatures),
            "programs": counts,
            "weight_bytes": weights,
            "state_bytes": state,
            "expected_seconds": effort and effort.seconds / jobs,
            "expected_bytes": effort and round(effort.bytes),
            "padding_waste": waste,
        }
        print(json.dumps({**plan, **describe_memory(deployment, tau, CompilerFigures())}))
        return
    counted = [(name, str(count)) for name, count in counts.items()]
    lines = [
        format_table(("program", "executables"), counted),
        f"{len(signatures)} executables for {grid}",
        describe_effort(effort, jobs),
        describe_waste(waste),
        f"{'on all devices' if deployment.devices > 1 else 'on the device'}: weights {format_bytes(weights)}, "
        f"kv and other state {format_bytes(state)}, and temporaries",
    ]
    print(*lines, sep="\n", file=sys.stderr)
    print_memory(deployment, tau, CompilerFigures())


def describe_effort(effort: BuildEstimate | None, jobs: int) -> str:
    """For people."""
    if effort is None:
        return "how long this takes is not known for this platform"
    minutes = effort.seconds / jobs / 60
    return f"an estimate: {minutes:.1f} min to build with --jobs {jobs}, {format_bytes(effort.bytes)} on disk"


def worst_waste(sizes: Sequence[int]) -> float:
    """The share of a size that is padding where a request is one more than the size below; 0 of a single size."""
    return max((1 - (small + 1) / large for small, large in zip(sizes[:-1], sizes[1:], strict=True)), default=0.0)


def describe_waste(waste: dict[str, float]) -> str:
    """For people."""
    shares = ", ".join(f"{axis} {share:.0%}" for axis, share in waste.items())
    return f"padding of a request that is one more than a size, at worst: {shares}"
