"""What `dflash-precompile` says after a build."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.bin.bucket_table import Deployment, describe_memory, print_memory
from dflash_aot.bin.command_line import format_bytes, format_table
from dflash_aot.bin.reproducibility import Comparison
from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.remote.shared_store import StoreReport
from dflash_aot.compile.analysis.executable_checks import find_problems
from dflash_aot.compile.analysis.memory_plan import read_compiler_figures
from dflash_aot.compile.pipeline.compilation_manager import Report

HEADER = ("program", "bucket", "seconds", "size", "temporaries", "GB", "its GB", "GFLOP", "its GFLOP")
NOTE = """GB, GFLOP: what one call must move and compute, from the models' facts
its GB, its GFLOP: the compiler's own count, which takes the body of the loop over layers once"""


def report_build(
    deployment: Deployment,
    report: Report,
    bundle: Path,
    tau: float | None,
    as_json: bool,
    comparison: Comparison | None = None,
    store: StoreReport | None = None,
) -> None:
    """Executable by executable, then bucket by bucket, or the same as JSON.

    With a second build, how alike they are; with a shared store, what came of that.
    """
    entries, compiled = report.entries, report.compiled
    size = sum(entry.bytes for entry in entries)
    measured = read_compiler_figures(entries)
    if as_json:
        summary = {
            "bundle": str(bundle),
            "dialect": deployment.draft.dialect,
            "sampling": deployment.programs.pair.sampling,
            "executables": len(entries),
            "compiled": len(compiled),
            "reused": len(entries) - len(compiled),
            "seconds": report.seconds,
            "bytes": size,
            "canaries": sum(entry.self_test is not None for entry in entries),
            "reproducible": comparison and msgspec.to_builtins(comparison),
            "store": store and msgspec.to_builtins(store),
            "findings": list_findings(deployment, entries),
            "entries": [describe_entry(deployment, entry, entry.key in compiled) for entry in entries],
        }
        print(json.dumps({**summary, **describe_memory(deployment, tau, measured)}))
        return
    rows = [_format_entry(deployment, entry, entry.key in compiled) for entry in entries]
    print(format_table(HEADER, rows), NOTE, sep="\n", file=sys.stderr)
    print_memory(deployment, tau, measured)
    for finding in list_findings(deployment, entries):
        print(f"WARNING: {finding}", file=sys.stderr)
    kept = f", {len(entries) - len(compiled)} were there already" if len(compiled) < len(entries) else ""
    done = (
        f"{len(compiled)} compiled{kept}" if compiled else f"nothing to compile: all {len(entries)} were there already"
    )
    if comparison:
        print(f"built twice: {comparison.words}", file=sys.stderr)
    if store:
        print(*_format_store(store), sep="\n", file=sys.stderr)
    print(f"{done}, in {report.seconds:.1f} s; {format_bytes(size)} in {bundle}", file=sys.stderr)


def _format_store(store: StoreReport) -> list[str]:
    counts = f"{store.hits} executables found, {store.misses} not found, {store.written} written"
    return [*(f"WARNING: {failure}" for failure in store.failures), f"store {store.url}: {counts}"]


def list_findings(deployment: Deployment, entries: Sequence[Entry]) -> list[str]:
    """What a TPU executable should not do, and does; nothing on other platforms, see `find_flaws`."""
    if deployment.platform != "tpu":
        return []
    programs, known = deployment.programs, deployment.programs.arrays_by_name(deployment.grid)
    return [
        flaw
        for entry in entries
        for flaw in find_problems(entry, known, deployment.devices, programs.collectives(entry.signature))
    ]


def describe_entry(deployment: Deployment, entry: Entry, compiled: bool) -> dict[str, Any]:
    """One executable as JSON: what it is and took, its work from the facts and as the compiler counts it."""
    work, chip = deployment.roofline.cost(entry.signature), deployment.chip
    return {
        "program": entry.signature.program,
        "bucket": entry.signature.bucket,
        "seconds": entry.seconds,
        "bytes": entry.bytes,
        "temporaries": entry.memory.temporaries,
        "code": entry.memory.code,
        "work": {"bytes": work.bytes, "flops": work.flops},
        "compiler": {"bytes": entry.cost.bytes_accessed, "flops": entry.cost.flops},
        "bound_seconds": chip and work.bound_seconds(chip),
        "compiled": compiled,
    }


def _format_entry(deployment: Deployment, entry: Entry, compiled: bool) -> tuple[str, ...]:
    work, cost = deployment.roofline.cost(entry.signature), entry.cost
    return (
        entry.signature.program,
        " ".join(f"{axis}={extent}" for axis, extent in entry.signature.bucket.items()),
        f"{entry.seconds:.1f}" if compiled else "kept",
        format_bytes(entry.bytes),
        format_bytes(entry.memory.temporaries),
        *(f"{figure / 1e9:.3f}" for figure in (work.bytes, cost.bytes_accessed, work.flops, cost.flops)),
    )
