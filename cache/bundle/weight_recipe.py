"""Which checkpoint tensors make each weight argument, as data: the runtime loads weights without model code."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, "bool": 1}

# Checked where they are read from JSON.
Dtype = Annotated[str, msgspec.Meta(pattern=r"\A(float32|bfloat16|int32|bool)\Z")]
FloatDtype = Annotated[str, msgspec.Meta(pattern=r"\A(float32|bfloat16)\Z")]
CheckpointRole = Literal["target", "draft"]


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint tensor and the box of the argument that it fills.

    `stored` is the tensor's shape in the checkpoint; reshaped (row-major) to `extent` it fills the argument
    from `offset` on.
    """

    tensor: str
    stored: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]


class MaskedMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Offsets from a row's own number into a vocabulary of `size`; `mask` [size], bool, says which are met."""

    mask: str
    size: int


class WeightRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One weight argument: its name, shape and dtype on the device, and the tensors that fill it completely.

    sharding: as `Array`'s. otherwise: the argument that takes its place where the checkpoint has none of its
    tensors. mapped: the numbers in it are token offsets, to be checked as such.
    """

    name: str
    checkpoint: CheckpointRole
    shape: tuple[int, ...]
    dtype: Dtype
    placements: tuple[Placement, ...]
    sharding: tuple[str | None, ...] = ()
    otherwise: str | None = None
    mapped: MaskedMap | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def find_recipe_flaw(recipe: WeightRecipe) -> str | None:
    """Why a recipe cannot be followed: boxes that lie outside, overlap or leave gaps, shapes that do not fit."""
    for placement in recipe.placements:
        box = (placement.offset, placement.extent)
        if any(len(side) != len(recipe.shape) for side in box):
            return f"{placement.tensor} has no place in {list(recipe.shape)}"
        if any(at < 0 or size < 1 or at + size > end for at, size, end in zip(*box, recipe.shape, strict=True)):
            return f"{placement.tensor} lies outside of {list(recipe.shape)}"
        stored, extent = placement.stored, placement.extent
        if not _is_split(stored, extent):
            return f"{placement.tensor} is stored as {list(stored)}, which does not fill {list(extent)}"
    filled = sum(math.prod(placement.extent) for placement in recipe.placements)
    if filled != math.prod(recipe.shape):
        return f"its tensors fill {filled} of {math.prod(recipe.shape)} places"
    return None


def _is_split(stored: Sequence[int], extent: Sequence[int]) -> bool:
    """Whether each stored dimension is one of `extent`, or a product of neighbours; others there are 1."""
    sizes = iter(extent)
    for size in stored:
        product = 1
        while product < size and (next_size := next(sizes, 0)):
            product *= next_size
        if product != size:
            return False
    return all(size == 1 for size in sizes)
