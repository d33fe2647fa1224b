"""From safetensors to device arrays, by the manifest's recipe. No model code."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  teaches NumPy bfloat16, in which safetensors hands such tensors out
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.recipe import Checkpoint, Placement, WeightRecipe

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("BF16", "F16", "F32")
# In the checkpoint of a tied model, and the same as the embedding: some released ones carry it.
TIED_COPY = "lm_head.weight"


class Tensors:
    """The tensors of one checkpoint directory, memory-mapped, in one file or in shards with an index."""

    def __init__(self, directory: Path):
        self._files: dict[str, Path] = {}
        self._open = {}
        for path, promised in _list_files(directory):
            try:
                file = safe_open(path, framework="numpy")
            except FileNotFoundError as error:
                raise BadCheckpoint(f"{path} does not exist, but {INDEX} names it") from error
            except (SafetensorError, OSError) as error:
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

    def read(self, placement: Placement) -> np.ndarray:
        """One tensor, still mapped. Raises BadCheckpoint for a shape, dtype or value that cannot be right."""
        path, name = self._files[placement.tensor], placement.tensor
        facts = self._open[path].get_slice(name)
        if (shape := tuple(facts.get_shape())) != placement.stored:
            raise BadCheckpoint(f"{path}: {name} is {list(shape)}, its config.json makes it {list(placement.stored)}")
        if facts.get_dtype() not in FLOATS:
            raise BadCheckpoint(f"{path}: {name} is {facts.get_dtype()}, expected one of {', '.join(FLOATS)}")
        tensor = self._open[path].get_tensor(name)
        if not _is_finite(tensor):
            raise BadCheckpoint(f"{path}: {name} holds NaN or infinity: the file is damaged or the training diverged")
        return tensor


def load_weights(
    recipes: Sequence[WeightRecipe], directories: Mapping[Checkpoint, Path], device: jax.Device
) -> dict[str, jax.Array]:
    """Every weight argument by name, on the device. Every tensor of both checkpoints is used exactly once.

    Raises BadCheckpoint naming tensors that are missing, left over, misshapen or not finite.
    """
    checkpoints = {role: Tensors(directory) for role, directory in directories.items()}
    for role, tensors in checkpoints.items():
        own = [recipe for recipe in recipes if recipe.checkpoint == role]
        _check_names(tensors, own, {TIED_COPY} if role == "target" else set())
    return {
        recipe.name: jax.device_put(_assemble(recipe, checkpoints[recipe.checkpoint]), device) for recipe in recipes
    }


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path} is not an index of shards: {type(error).__name__}: {error}") from error
    if not sound:
        raise BadCheckpoint(f"{path}: weight_map names something that is not a file beside it")
    return places


def _check_names(tensors: Tensors, recipes: Iterable[WeightRecipe], spare: set[str]) -> None:
    """Every tensor is expected, but for the `spare` ones, and every expected one is there."""
    expected = {placement.tensor for recipe in recipes for placement in recipe.placements}
    found = tensors.names() - (spare - expected)
    if missing := expected - found:
        raise BadCheckpoint(f"{tensors.directory}: {len(missing)} tensors are missing: {_some(missing)}")
    if extra := found - expected:
        raise BadCheckpoint(
            f"{tensors.directory}: {len(extra)} tensors that this architecture has no place for: {_some(extra)}"
        )


def _assemble(recipe: WeightRecipe, tensors: Tensors) -> np.ndarray:
    """The argument in host memory, in the device's dtype."""
    array = np.empty(recipe.shape, recipe.dtype)
    for placement in recipe.placements:
        box = tuple(slice(start, start + size) for start, size in zip(placement.offset, placement.extent, strict=True))
        array[box] = tensors.read(placement).reshape(placement.extent)
    return array


def _is_finite(tensor: np.ndarray) -> bool:
    """A sum is finite only if every term is, and takes one pass without a mask; overflow falls back to looking."""
    with np.errstate(all="ignore"):
        total = np.sum(tensor, dtype=np.float32)
    return bool(np.isfinite(total)) or bool(np.isfinite(tensor).all())


def _some(names: Iterable[str], most: int = 4) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
