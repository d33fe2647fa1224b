"""Grid refusals: errors for requests outside the grid of a bundle, each with the command that builds what is missing.

A build adds to the bundle, so every command names the bundle and its pair, and can be pasted as it stands.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.errors import GridMiss
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.sampling_state import SamplingKind, check_sampling_kinds

EXECUTABLES: Mapping[SamplingKind, str] = {
    "greedy": "greedy",
    "sample": "sampled",
    "constrain": "constrained",
    "prompt_logprobs": "scoring",
}


def refuse_length(manifest: Manifest, bundle: Path, length: int) -> GridMiss:
    """The error for too many positions; it names a wider grid where the models allow it."""
    positions = min(facts.decoder.positions for facts in (manifest.target.facts, manifest.draft.facts))
    if length <= positions:
        return manifest.grid.miss(1, length, 0, lambda grid: _build_command(manifest, bundle, grid))
    return GridMiss(
        f"prompt and answer take {length} positions; the models were made for {positions} "
        f"(max_position_embeddings), and the grid ends at {manifest.grid.capacity}"
    )


def refuse_ks(manifest: Manifest, bundle: Path, ks: Sequence[int]) -> GridMiss:
    """The error for Ks that were not built; it names a wider grid where draft and grid allow them."""
    grid = manifest.grid
    most = min(manifest.draft.facts.block, grid.length[0]) - 1
    asked, there = (",".join(map(str, one)) for one in (ks, grid.k))
    missing = f"no executable verifies k={asked} tokens: the grid has k={there}"
    if max(ks) > most:
        return GridMiss(
            f"{missing}. More than k={most} cannot be added: a block has {manifest.draft.facts.block} tokens, the "
            f"shortest length of the grid is {grid.length[0]}"
        )
    wider = msgspec.structs.replace(grid, k=tuple(sorted({*grid.k, *ks})))
    return GridMiss(f"{missing}. Precompile it: {_build_command(manifest, bundle, wider)}")


def refuse_sampling(manifest: Manifest, bundle: Path, kind: SamplingKind, fields: Sequence[str]) -> GridMiss:
    """The error for parameters that need executables of a kind that the bundle has not."""
    wider = check_sampling_kinds((*manifest.sampling, kind), "sampling")
    command = msgspec.structs.replace(manifest, sampling=wider).build_command(bundle)
    there = " and ".join(EXECUTABLES[one] for one in manifest.sampling)
    return GridMiss(
        f"the bundle has only {there} executables, and this request needs {EXECUTABLES[kind]} executables: "
        f"{', '.join(fields)}. Precompile them: {command}"
    )


def _build_command(manifest: Manifest, bundle: Path, grid: Grid) -> str:
    return msgspec.structs.replace(manifest, grid=grid).build_command(bundle)
