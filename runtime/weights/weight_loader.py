"""Weight loading: safetensors checkpoints to device arrays, by the manifest's weight recipes. No model code.

If the devices split an argument (tensor parallelism), only each device's own slice is read for that device. Weights of
an int8 bundle are quantized while they are read.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import msgspec
import numpy as np

from dflash_aot.cache.devices import make_sharding
from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.tensor_names import is_ignored, nest_name
from dflash_aot.cache.weight_recipe import SCALE_SUFFIX, CheckpointRole, Placement, WeightRecipe
from dflash_aot.runtime.weights.quantized_tensors import Int8Weight, open_checkpoint
from dflash_aot.runtime.weights.safetensors_reader import (
    FLOATS,
    CheckpointTensors,
    TensorSlice,
    cover_tensor,
    find_stored_slice,
    intersect_placement,
    list_some,
    shift_slice,
    slice_shape,
    split_slice,
    to_numpy_slices,
)

logger = logging.getLogger(__name__)

# Numbers that are read and converted at a time: with smaller pieces threads wait for Python's lock.
MOST_READ_NUMBERS = 1 << 20
# Of interleaved experts: a file may hold them transposed, and then each piece of an expert reads all of it.
MOST_EXPERT_NUMBERS = 1 << 23
READERS = 4  # threads that read and convert
ALIGNMENT_BYTES = 64  # XLA uses a host array on CPU without a copy if the array is aligned so
TIED_HEAD = "lm_head.weight"  # which a target with tied embeddings may store
EMBEDDING = (
    "target.model.embed_tokens.weight"  # the argument that serves as the head of such a target
)


def load_weights(
    recipes: Sequence[WeightRecipe],
    directories: Mapping[CheckpointRole, Path],
    devices: Sequence[jax.Device],
) -> dict[str, jax.Array]:
    """Returns every weight argument by name, on the devices. Every tensor of both checkpoints is used.

    The host makes one device's slice of one argument at a time, part by part, while the slice before is copied to its
    device: at most two slices are in host memory.

    Raises BadCheckpoint naming tensors that are missing, unexpected, of a wrong shape or dtype, or not finite.
    """
    interleaved = {recipe.checkpoint for recipe in recipes if recipe.interleaved}
    checkpoints = {
        role: open_checkpoint(directory, role, role in interleaved)
        for role, directory in directories.items()
    }
    names = {role: tensors.names() for role, tensors in checkpoints.items()}
    recipes = [_adopt_spelling(recipe, names[recipe.checkpoint]) for recipe in recipes]
    shared = [recipe for recipe in recipes if _is_shared(recipe, checkpoints[recipe.checkpoint])]
    own = [recipe for recipe in recipes if recipe not in shared]
    for role, tensors in checkpoints.items():
        _check_names(tensors, [recipe for recipe in own if recipe.checkpoint == role], role)
    if "target" in checkpoints and (warning := _find_unused_head(own, checkpoints["target"])):
        logger.warning(warning)
    copies = _DeviceCopies(devices)
    arrays = dict[str, jax.Array]()
    by_name = {recipe.name: recipe for recipe in own}
    for recipe in own:
        if recipe.encoding == "int8_values":
            scales = by_name[recipe.name + SCALE_SUFFIX]
            arrays |= _load_int8(recipe, scales, checkpoints[recipe.checkpoint], copies)
        elif recipe.encoding != "int8_scales":
            arrays[recipe.name] = _load(recipe, checkpoints[recipe.checkpoint], copies)
    copies.wait()
    for tensors in checkpoints.values():
        tensors.check_unchanged()
    arrays = {recipe.name: arrays[recipe.name] for recipe in own}  # in the order of the recipes
    return arrays | {recipe.name: _share(recipe, arrays, checkpoints) for recipe in shared}


def fingerprint_weights(directories: Mapping[CheckpointRole, Path]) -> str:
    """Returns 12 hexadecimal digits that tell the weights of a pair from those of another training.

    Computed from samples of the tensors as stored, see `CheckpointTensors.digest`: in far less time than loading them,
    and not made to find a change of a few numbers. Raises BadCheckpoint.
    """
    found = hashlib.sha256()
    for role in sorted(directories):
        found.update(CheckpointTensors(directories[role]).digest())
    return found.hexdigest()[:12]


def _adopt_spelling(recipe: WeightRecipe, names: set[str]) -> WeightRecipe:
    """Returns a recipe with tensors as the checkpoint names them.

    Some name a bare parameter x "x.weight": the reference, where it saves DFlash2's codebooks as modules. Multimodal
    checkpoints have another prefix.
    """

    def spell(tensor: str) -> str:
        return next(
            (name for name in (tensor, f"{tensor}.weight", nest_name(tensor)) if name in names),
            tensor,
        )

    placements = tuple(
        msgspec.structs.replace(one, tensor=spell(one.tensor)) for one in recipe.placements
    )
    return msgspec.structs.replace(recipe, placements=placements)


def _is_shared(recipe: WeightRecipe, tensors: CheckpointTensors) -> bool:
    """Whether another argument is used instead: the checkpoint has none of its tensors, and the recipe allows it.

    A draft without an embedding uses the target's.
    """
    own = {placement.tensor for placement in recipe.placements}
    return recipe.otherwise is not None and not own & tensors.names()


def _share(
    recipe: WeightRecipe,
    arrays: Mapping[str, jax.Array],
    checkpoints: Mapping[CheckpointRole, CheckpointTensors],
) -> jax.Array:
    """Returns the other argument, which is on the device once. Raises BadCheckpoint if its shape differs."""
    assert recipe.otherwise is not None
    other = arrays[recipe.otherwise]
    if other.shape != recipe.shape:
        raise BadCheckpoint(
            f"{checkpoints[recipe.checkpoint].directory}: {recipe.placements[0].tensor} is missing, and the target's "
            f"{recipe.otherwise.removeprefix('target.')} is {list(other.shape)}, not {list(recipe.shape)}"
        )
    return other


def _check_names(
    tensors: CheckpointTensors, recipes: Iterable[WeightRecipe], role: CheckpointRole
) -> None:
    """Raises BadCheckpoint for missing tensors, and for unexpected tensors of modules that are not ignored."""
    expected = {placement.tensor for recipe in recipes for placement in recipe.placements}
    expected |= {recipe.mapped.mask for recipe in recipes if recipe.mapped}
    found = {name for name in tensors.names() if name in expected or not _may_be_unused(name, role)}
    if fused := [name for name in found - expected if "qkv_proj" in name]:
        raise BadCheckpoint(
            f"{tensors.directory}: {list_some(fused)}: fused q, k and v projections are not supported"
        )
    missing = expected - found
    extra = found - expected
    unexpected = f"{len(extra)} tensors that this architecture has no place for: {list_some(extra)}"
    if missing:
        renamed = f"; there are {unexpected}" if extra else ""
        raise BadCheckpoint(
            f"{tensors.directory}: {len(missing)} tensors are missing: {list_some(missing)}{renamed}"
        )
    if extra:
        raise BadCheckpoint(f"{tensors.directory}: {unexpected}")


def _find_unused_head(recipes: Iterable[WeightRecipe], tensors: CheckpointTensors) -> str | None:
    """A warning about a target whose config says that the embedding is the head, and whose file has another head."""
    used = {recipe.name: recipe.placements[0].tensor for recipe in recipes}
    embedding = used.get(EMBEDDING)
    if TIED_HEAD in used.values() or TIED_HEAD not in tensors.names() or embedding is None:
        return None
    if tensors.is_equal(TIED_HEAD, embedding):
        return None
    return (
        f"{tensors.file(TIED_HEAD)}: {TIED_HEAD} differs from {embedding} and is not used, because config.json says "
        "tie_word_embeddings. If the head was trained, write tie_word_embeddings: false and build a bundle for it"
    )


def _may_be_unused(name: str, role: CheckpointRole) -> bool:
    return is_ignored(name, role) or (role == "target" and name == TIED_HEAD)


class _DeviceCopies:
    """Copies arguments to the devices, one slice at a time, while the host makes the next slice."""

    def __init__(self, devices: Sequence[jax.Device]):
        self._devices = devices
        self._last: jax.Array | None = None  # the slice that may still be on its way

    def place(
        self, recipe: WeightRecipe, assemble: Callable[[TensorSlice], np.ndarray]
    ) -> jax.Array:
        """Returns an argument on the devices, from a function that makes any of its slices in host memory.

        A replicated argument is made once, a split one slice by slice. The last slice may still be on its way.
        """
        sharding = make_sharding(recipe.sharding, self._devices)
        if sharding.is_fully_replicated:
            whole = assemble(cover_tensor(recipe.shape))
            return self._start(
                lambda: jax.make_array_from_callback(recipe.shape, sharding, lambda _: whole)
            )
        shards = []
        for device, index in sharding.addressable_devices_indices_map(recipe.shape).items():
            # No name keeps the host's array while the next slice is made.
            shards.append(
                self._start(
                    partial(jax.device_put, assemble(_to_slice(index, recipe.shape)), device)
                )
            )
        return jax.make_array_from_single_device_arrays(recipe.shape, sharding, shards)

    def wait(self) -> None:
        """Returns when every slice is on its device."""
        jax.block_until_ready(self._last)
        self._last = None

    def _start(self, copy: Callable[[], jax.Array]) -> jax.Array:
        self.wait()
        self._last = copy()
        return self._last


def _load(recipe: WeightRecipe, tensors: CheckpointTensors, copies: _DeviceCopies) -> jax.Array:
    """Returns one argument on the devices."""
    return copies.place(recipe, lambda wanted: _assemble(recipe, tensors, wanted))


def _load_int8(
    values: WeightRecipe, scales: WeightRecipe, tensors: CheckpointTensors, copies: _DeviceCopies
) -> dict[str, jax.Array]:
    """Returns the integers and the scales of a quantized weight. The host holds a slice of integers, and all scales."""
    weight = Int8Weight(values, tensors, _allocate(scales.shape, np.dtype(np.float32)))
    if weight.splits_rows:
        _run_pieces(values, cover_tensor(values.shape), weight.find_scales)
    integers = copies.place(values, lambda wanted: _collect(values, wanted, weight.read))
    return {
        values.name: integers,
        scales.name: copies.place(scales, partial(_copy_slice, weight.scales)),
    }


def _copy_slice(array: np.ndarray, wanted: TensorSlice) -> np.ndarray:
    """Returns a part of an array as an aligned array of its own."""
    part = _allocate(slice_shape(wanted), array.dtype)
    part[...] = array[to_numpy_slices(wanted)]
    return part


def _to_slice(index: tuple[slice, ...] | None, shape: Sequence[int]) -> TensorSlice:
    """Converts the index that JAX gives for a device's shard."""
    assert index is not None
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _assemble(recipe: WeightRecipe, tensors: CheckpointTensors, wanted: TensorSlice) -> np.ndarray:
    """Returns the slice `wanted` of an argument in host memory, in the device's dtype."""

    def read(placement: Placement, piece: TensorSlice) -> np.ndarray:
        part = shift_slice(piece, placement.offset)
        values = _read(recipe, tensors, placement, find_stored_slice(placement, part))
        return values.reshape(slice_shape(part))

    return _collect(recipe, wanted, read)


def _collect(
    recipe: WeightRecipe, wanted: TensorSlice, read: Callable[[Placement, TensorSlice], np.ndarray]
) -> np.ndarray:
    """Returns the slice `wanted` of an argument from pieces that `read` returns, in the device's dtype."""
    array = _allocate(slice_shape(wanted), np.dtype(recipe.dtype))
    origin = [start for start, _ in wanted]

    def write(placement: Placement, piece: TensorSlice) -> None:
        array[to_numpy_slices(shift_slice(piece, origin))] = read(placement, piece)

    _run_pieces(recipe, wanted, write)
    return array


def _run_pieces(
    recipe: WeightRecipe, wanted: TensorSlice, work: Callable[[Placement, TensorSlice], None]
) -> None:
    """Calls `work` for each piece of the slice `wanted`, in its coordinates of the argument, a few at a time.

    NumPy leaves the interpreter's lock while it reads and converts a piece, so pieces use several processor cores.
    """
    most = MOST_EXPERT_NUMBERS if recipe.interleaved else MOST_READ_NUMBERS
    pieces = [
        (placement, piece)
        for placement in recipe.placements
        if (common := intersect_placement(wanted, placement))
        for piece in ([common] if recipe.mapped else split_slice(common, most))
    ]
    if len(pieces) == 1:
        work(*pieces[0])
        return
    with ThreadPoolExecutor(READERS) as pool:
        try:
            done = pool.map(work, *zip(*pieces, strict=True))
        except RuntimeError as error:
            # From the threading module, which has no class of its own for it.
            raise MemoryError(f"no thread can be started to read weights: {error}") from error
        for _ in done:
            pass


def _allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array, aligned to ALIGNMENT_BYTES."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)


def _read(
    recipe: WeightRecipe, tensors: CheckpointTensors, placement: Placement, part: TensorSlice
) -> np.ndarray:
    """Returns a slice of one stored tensor. A vocabulary map is read and checked as a whole, then sliced."""
    if recipe.mapped:
        return tensors.read_vocabulary_map(placement, recipe.mapped)[to_numpy_slices(part)]
    return tensors.read(placement.tensor, placement.stored, FLOATS, part)
