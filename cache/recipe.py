"""Which checkpoint tensors make each weight argument, as data: the runtime loads weights without model code."""

import math
from typing import Literal

import msgspec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, "bool": 1}

Checkpoint = Literal["target", "draft"]


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
    checkpoint: Checkpoint
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[Placement, ...]
    sharding: tuple[str | None, ...] = ()
    otherwise: str | None = None
    mapped: MaskedMap | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
