"""Whether a manifest is consistent with itself: from facts and grid follows what must be there, but for the weights."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from dflash_aot.cache.bundle.manifest import Manifest, generic_build_command
from dflash_aot.cache.bundle.weight_recipe import WeightRecipe, find_recipe_flaw
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.grid import AXES
from dflash_aot.cache.signature import (
    MESH_AXIS,
    ArraySpec,
    ProgramWeights,
    Signature,
    derive_pair_shapes,
    list_signatures,
    state_arrays,
)


def check_consistent(path: Path, manifest: Manifest) -> None:
    """Every bucket of the grid has its executables, which take and return what they must. Raises CorruptBundle."""
    if flaw := find_contradiction(manifest):
        # A grid that cannot be is no use in a command, and may be long.
        again = generic_build_command(path) if _find_flaw_of_grid(manifest) else manifest.build_command(path)
        raise CorruptBundle(f"{path}/manifest.json: {flaw}. Build it again: {again}")


def find_contradiction(manifest: Manifest) -> str | None:
    """The first, in words."""
    try:
        return next(_find_flaws(manifest), None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"facts or grid cannot be: {type(error).__name__}: {error}"  # whatever forged numbers lead to


def _find_flaw_of_grid(manifest: Manifest) -> str | None:
    """Before anything is made of it: a few numbers on each axis are buckets by the billion."""
    for axis in AXES:
        sizes = getattr(manifest.grid, axis)
        if not sizes or any(size >= after for size, after in pairwise(sizes)):
            return f"grid: {axis} holds nothing, or is not ascending"
    if manifest.grid.rounds < 1:
        return f"grid: rounds is {manifest.grid.rounds}, and at least one runs at a time"
    if (count := manifest.grid.count()) > len(manifest.entries):
        return f"promises a grid of {count} buckets and chunks, but has {len(manifest.entries)} entries"
    return None


def _find_flaws(manifest: Manifest) -> Iterator[str]:
    if flaw := _find_flaw_of_grid(manifest):
        yield flaw
    facts = manifest.target.facts, manifest.draft.facts
    pair = derive_pair_shapes(*facts, manifest.dtype, manifest.sampling)
    expected = {one.label: one for one in list_signatures(pair, manifest.grid, ProgramWeights((), (), ()))}
    found = [entry.signature.label for entry in manifest.entries]
    if missing := sorted(expected.keys() - set(found)):
        yield f"promises the grid {manifest.grid}, but has no entry for {', '.join(missing)}"
    if unknown := sorted(set(found) - expected.keys()):
        yield f"has entries for {', '.join(unknown)}, which the grid {manifest.grid} does not need"
    if len(set(found)) < len(found):
        yield f"has two entries for {next(label for label in found if found.count(label) > 1)}"
    if manifest.state != (state := state_arrays(pair, manifest.grid)):
        yield f"state is {_names(manifest.state)}, models and grid make it {_names(state)}"
    weights = {recipe.name for recipe in manifest.weights}
    for recipe in manifest.weights:
        if flaw := find_recipe_flaw(recipe):
            yield f"weights: {recipe.name}: {flaw}"
        if recipe.otherwise is not None and recipe.otherwise not in weights:
            yield f"weights: {recipe.name} may be replaced by {recipe.otherwise}, of which weights says nothing"
        if not _can_split(recipe, manifest.environment.device_count):
            yield f"weights: {recipe.name} is split {recipe.sharding}, which {list(recipe.shape)} cannot be"
    for entry in manifest.entries:
        yield from _compare(entry.signature, expected[entry.signature.label])
        if lost := sorted(set(entry.signature.weights) - weights):
            yield f"{entry.signature.label} takes {', '.join(lost)}, of which weights says nothing"


def _can_split(recipe: WeightRecipe, devices: int) -> bool:
    if len(recipe.sharding) not in (0, len(recipe.shape)) or set(recipe.sharding) - {None, MESH_AXIS}:
        return False
    return not any(axis and size % devices for axis, size in zip(recipe.sharding, recipe.shape, strict=False))


def _compare(found: Signature, expected: Signature) -> Iterator[str]:
    for field in Signature.__struct_fields__:
        one, other = getattr(found, field), getattr(expected, field)
        if field != "weights" and one != other:
            yield f"{found.label}: {field} is {_names(one)}, models and grid make it {_names(other)}"


def _names(values: object) -> str:
    """Arrays as they are written in the documents: name, dtype and shape."""
    if not isinstance(values, tuple):
        return str(values)
    return ", ".join(one if isinstance(one, str) else _describe(one) for one in values) or "nothing"


def _describe(array: ArraySpec) -> str:
    split = f" split {array.sharding}" if any(array.sharding) else ""
    return f"{array.name} {array.dtype}{list(array.shape)}{split}"
