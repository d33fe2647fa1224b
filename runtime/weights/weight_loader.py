"""From safetensors to device arrays, by the manifest's recipe. No model code.

Of an argument that the devices split, each device's slice is read by itself.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  teaches NumPy bfloat16, in which safetensors hands such tensors out
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_aot.cache.bundle.weight_recipe import Checkpoint, MaskedMap, Placement, WeightRecipe
from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.mesh import place
from dflash_aot.runtime.weights.tensor_slices import (
    TensorSlice,
    cover_tensor,
    find_stored_slice,
    intersect_placement,
    shift_slice,
    slice_shape,
    split_slice,
    to_numpy_slices,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
READ_NUMBERS = 1 << 18  # numbers that are read at a time
ALIGNMENT = 64  # bytes, which XLA asks for on CPU
FLOATS, INTEGERS = ("BF16", "F16", "F32"), ("I32", "I64")
# What may be there beside what is used. A tied model's head is its embedding once more; speculators stores what its
# training took from the target.
IGNORED_TENSORS: dict[Checkpoint, tuple[str, ...]] = {"target": ("lm_head.weight",), "draft": ("verifier_*",)}


class CheckpointTensors:
    """The tensors of one checkpoint directory, memory-mapped, in one file or in shards with an index."""

    def __init__(self, directory: Path):
        self._files: dict[str, Path] = {}
        self._open = {}
        for path, promised in _list_files(directory):
            try:
                file = safe_open(path, framework="numpy")
            except FileNotFoundError as error:
                raise BadCheckpoint(f"{path} does not exist, but {INDEX} names it") from error
            except (SafetensorError, OSError, ValueError) as error:  # a ValueError for a name that no file can have
                raise BadCheckpoint(
                    f"{path} is not a whole safetensors file: {error}. Download or copy it again"
                ) from error
            found = set(file.keys())
            if twice := found & self._files.keys():
                raise BadCheckpoint(f"{path} holds {_some(twice)}, and so does another shard: which one is meant?")
            if promised is not None and (missing := promised - found):
                raise BadCheckpoint(f"{path} lacks {_some(missing)}, which {INDEX} places there")
            self._open[path] = file
            self._files |= dict.fromkeys(found, path)
        self.directory = directory

    def names(self) -> set[str]:
        return set(self._files)

    def read(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str], region: TensorSlice | None = None
    ) -> np.ndarray:
        """One tensor, or only a region of it. Raises BadCheckpoint for a shape, dtype or value that cannot be right."""
        path = self._files[name]
        tensor = self._open[path].get_slice(name)
        if (found := tuple(tensor.get_shape())) != shape:
            raise BadCheckpoint(f"{path}: {name} is {list(found)}, its config.json makes it {list(shape)}")
        if tensor.get_dtype() not in dtypes:
            raise BadCheckpoint(f"{path}: {name} is {tensor.get_dtype()}, expected one of {', '.join(dtypes)}")
        values = tensor[to_numpy_slices(cover_tensor(shape) if region is None else region)]
        if dtypes is FLOATS and not _is_finite(values):
            raise BadCheckpoint(f"{path}: {name} holds NaN or infinity: the file is damaged or the training diverged")
        return values

    def read_map(self, placement: Placement, mapped: MaskedMap) -> np.ndarray:
        """Offsets [n] that lead to n different tokens, which are those that the mask names. Raises BadCheckpoint."""
        offsets = self.read(placement.tensor, placement.stored, INTEGERS).astype(np.int64)
        mask = self.read(mapped.mask, (mapped.size,), ("BOOL",))
        if wrong := _find_wrong_offsets(offsets, mask, mapped.mask):
            hint = ": it holds tokens, expected is each one's distance from its row" * _are_tokens(offsets, mask)
            raise BadCheckpoint(f"{self._files[placement.tensor]}: {placement.tensor} {wrong}{hint}")
        return offsets


def _find_wrong_offsets(offsets: np.ndarray, mask: np.ndarray, name: str) -> str | None:
    """What is wrong with offsets [n] into a vocabulary of which the mask `name` [size] says what they meet."""
    size, rows = mask.size, np.arange(offsets.size)
    if outside := int(((offsets < -rows) | (offsets >= size - rows)).sum()):
        return f"leads {outside} of {offsets.size} rows outside the vocabulary of {size}"
    met = np.zeros(size, bool)
    met[rows + offsets] = True
    if met.sum() != offsets.size:
        return f"leads {offsets.size} rows to only {met.sum()} different tokens"
    if differing := int((met != mask).sum()):
        return f"and {name} disagree on {differing} tokens: they were put together from two trainings"
    return None


def _are_tokens(offsets: np.ndarray, mask: np.ndarray) -> bool:
    """They would be what the mask names if they were taken as they stand."""
    return np.array_equal(np.sort(offsets), np.flatnonzero(mask))


def load_weights(
    recipes: Sequence[WeightRecipe], directories: Mapping[Checkpoint, Path], devices: Sequence[jax.Device]
) -> dict[str, jax.Array]:
    """Every weight argument by name, on the devices. Every tensor of both checkpoints is used exactly once.

    The host holds one device's slice of one argument at a time, and one tensor's part of it.

    Raises BadCheckpoint naming tensors that are missing, left over, misshapen or not finite.
    """
    checkpoints = {role: CheckpointTensors(directory) for role, directory in directories.items()}
    borrowed = [recipe for recipe in recipes if _is_borrowed(recipe, checkpoints[recipe.checkpoint])]
    own = [recipe for recipe in recipes if recipe not in borrowed]
    for role, tensors in checkpoints.items():
        _check_names(tensors, [recipe for recipe in own if recipe.checkpoint == role], IGNORED_TENSORS[role])
    arrays = {recipe.name: _load(recipe, checkpoints[recipe.checkpoint], devices) for recipe in own}
    return arrays | {recipe.name: _borrow(recipe, arrays, checkpoints) for recipe in borrowed}


def _list_files(directory: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """The files and, where an index says so, the tensors that each holds."""
    if (directory / INDEX).exists():
        places = _read_index(directory / INDEX)
        for file in sorted(set(places.values())):
            yield directory / file, {name for name, place in places.items() if place == file}
    elif (directory / SINGLE).exists():
        yield directory / SINGLE, None
    else:
        raise BadCheckpoint(f"{directory} holds no weights: neither {SINGLE} nor {INDEX}")


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        sound = all(isinstance(file, str) and Path(file).name == file for file in places.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not an index of shards: {type(error).__name__}: {error}") from error
    if not sound:
        raise BadCheckpoint(f"{path}: weight_map names something that is not a file beside it")
    return places


def _is_borrowed(recipe: WeightRecipe, tensors: CheckpointTensors) -> bool:
    """It may take another argument's place, and has nothing of its own."""
    own = {placement.tensor for placement in recipe.placements}
    return recipe.otherwise is not None and not own & tensors.names()


def _borrow(
    recipe: WeightRecipe, arrays: Mapping[str, jax.Array], checkpoints: Mapping[Checkpoint, CheckpointTensors]
) -> jax.Array:
    """The other argument, if it fits; it is on the device once."""
    assert recipe.otherwise is not None
    other = arrays[recipe.otherwise]
    if other.shape != recipe.shape:
        raise BadCheckpoint(
            f"{checkpoints[recipe.checkpoint].directory}: {recipe.placements[0].tensor} is missing, and the target's "
            f"{recipe.otherwise.removeprefix('target.')} is {list(other.shape)}, not {list(recipe.shape)}"
        )
    return other


def _check_names(tensors: CheckpointTensors, recipes: Iterable[WeightRecipe], spare: Sequence[str]) -> None:
    """Every tensor is expected, but for the `spare` ones, and every expected one is there."""
    expected = {placement.tensor for recipe in recipes for placement in recipe.placements}
    expected |= {recipe.mapped.mask for recipe in recipes if recipe.mapped}
    found = {name for name in tensors.names() if name in expected or not any(fnmatch(name, one) for one in spare)}
    if fused := [name for name in found - expected if "qkv_proj" in name]:
        raise BadCheckpoint(f"{tensors.directory}: {_some(fused)}: fused q, k and v projections are not supported")
    missing, extra = expected - found, found - expected
    strange = f"{len(extra)} tensors that this architecture has no place for: {_some(extra)}"
    if missing:
        renamed = f"; there are {strange}" if extra else ""
        raise BadCheckpoint(f"{tensors.directory}: {len(missing)} tensors are missing: {_some(missing)}{renamed}")
    if extra:
        raise BadCheckpoint(f"{tensors.directory}: {strange}")


def _load(recipe: WeightRecipe, tensors: CheckpointTensors, devices: Sequence[jax.Device]) -> jax.Array:
    """One argument. What is whole on every device is read once; a slice has arrived before the next one is read."""
    sharding = place(recipe.sharding, devices)
    if sharding.is_fully_replicated:
        whole = _assemble(recipe, tensors, cover_tensor(recipe.shape))
        return jax.block_until_ready(jax.make_array_from_callback(recipe.shape, sharding, lambda _: whole))
    shards = [
        jax.block_until_ready(jax.device_put(_assemble(recipe, tensors, _find_box(index, recipe.shape)), device))
        for device, index in sharding.addressable_devices_indices_map(recipe.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(recipe.shape, sharding, shards)


def _find_box(index: tuple[slice, ...] | None, shape: Sequence[int]) -> TensorSlice:
    """As JAX says where a device's slice lies."""
    assert index is not None
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _assemble(recipe: WeightRecipe, tensors: CheckpointTensors, region: TensorSlice) -> np.ndarray:
    """A region of the argument in host memory, in the device's dtype.

    Part by part, each small enough to stay in a processor's cache from its reading on.
    """
    array = _allocate(slice_shape(region), np.dtype(recipe.dtype))
    corner = [start for start, _ in region]
    for placement in recipe.placements:
        if common := intersect_placement(region, placement):
            for piece in [common] if recipe.mapped else split_slice(common, READ_NUMBERS):
                part = shift_slice(piece, placement.offset)
                values = _read(recipe, tensors, placement, find_stored_slice(placement, part))
                array[to_numpy_slices(shift_slice(piece, corner))] = values.reshape(slice_shape(part))
    return array


def _allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialized. Aligned so that a CPU device uses it as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _read(recipe: WeightRecipe, tensors: CheckpointTensors, placement: Placement, region: TensorSlice) -> np.ndarray:
    """A region of one tensor; a map is checked as a whole, whatever is wanted of it."""
    if recipe.mapped:
        return tensors.read_map(placement, recipe.mapped)[to_numpy_slices(region)]
    return tensors.read(placement.tensor, placement.stored, FLOATS, region)


def _is_finite(tensor: np.ndarray) -> bool:
    """A sum is finite only if every term is, and takes one pass without a mask; overflow falls back to looking."""
    with np.errstate(all="ignore"):
        total = np.sum(tensor, dtype=np.float32)
    return bool(np.isfinite(total)) or bool(np.isfinite(tensor).all())


def _some(names: Iterable[str], most: int = 4) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
