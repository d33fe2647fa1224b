"""Manifest checks: consistency of entries, state and weights with the facts of the models and the grid."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from dflash_aot.cache.bundle.manifest import Manifest, generic_build_command
from dflash_aot.cache.bundle.weight_recipe import WeightRecipe, find_pairing_flaw, find_recipe_flaw
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.grid import AXES, MAX_SIZE
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
    """Checks that every bucket of the grid has its executables, with the right signatures. Raises CorruptBundle."""
    if flaw := find_contradiction(manifest):
        # An invalid grid would be useless in the command, and may be long.
        again = generic_build_command(path) if _find_flaw_of_grid(manifest) else manifest.build_command(path)
        raise CorruptBundle(f"{path}/manifest.json: {flaw}. Build it again: {again}")


def find_contradiction(manifest: Manifest) -> str | None:
    """Returns the first inconsistency of a manifest as text, None if there is none."""
    try:
        return next(_find_flaws(manifest), None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"impossible facts or grid: {type(error).__name__}: {error}"  # forged numbers may cause any of them


def _find_flaw_of_grid(manifest: Manifest) -> str | None:
    """Checks the grid before any bucket is created: a few sizes on each axis make billions of buckets."""
    for axis in AXES:
        sizes = getattr(manifest.grid, axis)
        if not sizes or any(size >= after for size, after in pairwise(sizes)):
            return f"grid: {axis} is empty or not ascending"
    grid = manifest.grid
    if grid.rounds < 1:
        return f"grid: rounds is {grid.rounds}, expected at least 1"
    if not 1 <= grid.page <= MAX_SIZE:
        return f"grid: page is {grid.page}, expected 1 to {MAX_SIZE}"
    if grid.kv_positions is not None and not grid.capacity <= grid.kv_positions <= MAX_SIZE:
        return f"grid: kv_positions is {grid.kv_positions}, expected {grid.capacity} to {MAX_SIZE}"
    if (count := manifest.grid.count()) > len(manifest.entries):
        return f"the grid has {count} buckets and chunks, but there are {len(manifest.entries)} entries"
    return None


def _find_flaws(manifest: Manifest) -> Iterator[str]:
    if flaw := _find_flaw_of_grid(manifest):
        yield flaw
    facts = manifest.target.facts, manifest.draft.facts
    pair = derive_pair_shapes(*facts, manifest.dtype, manifest.sampling)
    expected = {one.label: one for one in list_signatures(pair, manifest.grid, ProgramWeights((), (), ()))}
    found = [entry.signature.label for entry in manifest.entries]
    if missing := sorted(expected.keys() - set(found)):
        yield f"has no entry for {', '.join(missing)}, which the grid {manifest.grid} needs"
    if unknown := sorted(set(found) - expected.keys()):
        yield f"has entries for {', '.join(unknown)}, which the grid {manifest.grid} does not need"
    if len(set(found)) < len(found):
        yield f"has two entries for {Counter(found).most_common(1)[0][0]}"
    if manifest.state != (state := state_arrays(pair, manifest.grid)):
        yield f"state is {_list_names(manifest.state)}, but models and grid need {_list_names(state)}"
    weights = {recipe.name for recipe in manifest.weights}
    for recipe in manifest.weights:
        if flaw := find_recipe_flaw(recipe):
            yield f"weights: {recipe.name}: {flaw}"
        if recipe.otherwise is not None and recipe.otherwise not in weights:
            yield f"weights: {recipe.name} may be replaced by {recipe.otherwise}, which weights does not have"
        if not _can_split(recipe, manifest.environment.device_count):
            yield f"weights: {recipe.name} {list(recipe.shape)} cannot be split as {recipe.sharding}"
    for model, name in (("target", "target.model.layers."), ("draft", "draft.fc.")):
        encoded = any(recipe.encoding for recipe in manifest.weights if recipe.name.startswith(name))
        if encoded != (getattr(manifest.formats, model) == "int8"):
            yield f"weights: those of the {model} contradict weight_formats"
    if flaw := find_pairing_flaw(manifest.weights):
        yield f"weights: {flaw}"
    for entry in manifest.entries:
        yield from _compare_signatures(entry.signature, expected[entry.signature.label])
        if lost := sorted(set(entry.signature.weights) - weights):
            yield f"{entry.signature.label} takes {', '.join(lost)}, which weights does not have"


def _can_split(recipe: WeightRecipe, devices: int) -> bool:
    if len(recipe.sharding) not in (0, len(recipe.shape)) or set(recipe.sharding) - {None, MESH_AXIS}:
        return False
    return not any(axis and size % devices for axis, size in zip(recipe.sharding, recipe.shape, strict=False))


def _compare_signatures(found: Signature, expected: Signature) -> Iterator[str]:
    for field in Signature.__struct_fields__:
        one, other = getattr(found, field), getattr(expected, field)
        if field != "weights" and one != other:
            yield f"{found.label}: {field} is {_list_names(one)}, but models and grid need {_list_names(other)}"


def _list_names(values: object) -> str:
    """Returns arrays for people: name, dtype and shape of each."""
    if not isinstance(values, tuple):
        return str(values)
    return ", ".join(one if isinstance(one, str) else _format_array(one) for one in values) or "nothing"


def _format_array(array: ArraySpec) -> str:
    split = f" split {array.sharding}" if any(array.sharding) else ""
    return f"{array.name} {array.dtype}{list(array.shape)}{split}"
