"""Grid change: how the grid that a user asks for combines with that of the bundle where the build writes."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.errors import BadInput, CorruptBundle, MissingBundle
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.sampling_state import SAMPLING_KINDS, SamplingKind
from dflash_aot.cache.topology import Topology
from dflash_aot.compile.pipeline.build_target import BuildTarget
from dflash_aot.compile.pipeline.deployment import Deployment


class GridChange(msgspec.Struct, frozen=True):
    """What is built in place of the requested grid and sampling.

    Attributes:
        grid: the grid to build.
        sampling: the modes of verification to build, and whether prompts can be scored.
        message: what is kept of the bundle's grid besides the requested one, or why nothing is; "" if nothing differs.
    """

    grid: Grid
    sampling: tuple[SamplingKind, ...]
    message: str = ""


def add_to_bundle(bundle: Path, requested: Deployment, build_target: BuildTarget) -> GridChange:
    """The requested grid and sampling with those of the bundle added, if it is of the same pair and devices.

    Raises BadInput where no grid can have the sizes of both.
    """
    grid, sampling = requested.grid, requested.programs.pair.sampling
    try:
        manifest = read_manifest(bundle)
    except MissingBundle:
        return GridChange(grid, sampling)
    except CorruptBundle as error:
        return GridChange(grid, sampling, f"the grid of the bundle is not kept: {error}")
    if other := _find_difference(manifest, requested, build_target):
        return GridChange(grid, sampling, _describe_replacement(manifest, other))
    try:
        both = grid.united(manifest.grid)
    except BadInput as error:
        raise BadInput(
            f"{bundle} has the grid '{manifest.grid}': {error}. Name another bundle, or build only what is asked for "
            "with --exact"
        ) from error
    modes = tuple(mode for mode in SAMPLING_KINDS if mode in (*sampling, *manifest.sampling))
    if both.k[-1] + 1 > both.length[0]:
        raise BadInput(
            f"{bundle} has the grid '{manifest.grid}': with '{grid}' added, length={both.length[0]} is too short to "
            f"verify k={both.k[-1]} tokens. Name another bundle, or build only what is asked for with --exact"
        )
    if (both, modes) == (grid, sampling):
        return GridChange(both, modes)
    kept = f"what the bundle has is kept: the grid is '{both}', sampling {','.join(modes)}; --exact drops the rest"
    return GridChange(both, modes, kept)


def describe_loss(bundle: Path, requested: Deployment, build_target: BuildTarget) -> str:
    """What leaves the bundle where exactly the requested grid is built; "" if nothing does."""
    try:
        manifest = read_manifest(bundle)
    except CorruptBundle:  # nothing can be read, so nothing is lost; MissingBundle is one
        return ""
    if other := _find_difference(manifest, requested, build_target):
        return _describe_replacement(manifest, other)
    labels = {signature.label for signature in requested.programs.list_signatures(requested.grid)}
    dropped = [entry.signature for entry in manifest.entries if entry.signature.label not in labels]
    if not dropped:
        return ""
    return (
        f"{len(dropped)} of {len(manifest.entries)} executables leave the bundle "
        f"({_count_programs([signature.program for signature in dropped])}); its grid was '{manifest.grid}', sampling "
        f"{','.join(manifest.sampling)}. dflash-bundle gc removes their files"
    )


def _describe_replacement(manifest: Manifest, other: str) -> str:
    return f"the bundle's {len(manifest.entries)} executables are replaced: they are for {other}"


def _count_programs(names: Collection[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def _find_difference(manifest: Manifest, requested: Deployment, build_target: BuildTarget) -> str | None:
    """What a bundle is for, where that is not what is requested."""
    built = manifest.environment
    if (manifest.target.facts, manifest.draft.facts) != (requested.target, requested.draft):
        return "another pair"
    if manifest.dtype != requested.dtype:
        return f"another dtype, {manifest.dtype}"
    if (formats := manifest.formats) != requested.programs.formats:
        return f"other weights: {formats.target} in the target, {formats.draft} in the draft"
    topology = build_target.name if isinstance(build_target, Topology) else build_target.environment.topology
    if (built.platform, built.topology, built.device_count) != (requested.platform, topology, requested.devices):
        return f"other devices, {built.device_count} of {built.topology or built.device_kind}"
    return None
