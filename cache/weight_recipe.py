"""Weight recipes: which checkpoint tensors make each weight argument, so that the runtime needs no model code."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

MAX_COMPARED = 64  # placements of a recipe that are compared pair by pair
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, "int8": 1, "bool": 1}
SCALE_SUFFIX = "_scale"  # the name of a scale argument is that of its int8 weight and this

# msgspec checks these patterns when it reads JSON.
Dtype = Annotated[str, msgspec.Meta(pattern=r"\A(float32|bfloat16|int32|int8|bool)\Z")]
FloatDtype = Annotated[str, msgspec.Meta(pattern=r"\A(float32|bfloat16)\Z")]
CheckpointRole = Literal["target", "draft"]
# "plain": in the dtype of the activations. "int8": one byte per number, with a float32 scale per output channel.
WeightFormat = Literal["plain", "int8"]
Encoding = Literal["int8_values", "int8_scales"]


class WeightFormats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The format of the linear layers of each model; other weights are plain.

    Attributes:
        target: of the target and of the vocabulary heads that may be the target's.
        draft: of the draft.
    """

    target: WeightFormat = "plain"
    draft: WeightFormat = "plain"


PLAIN = WeightFormats()


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint tensor, and the slice of the weight argument that it fills.

    Attributes:
        tensor: its name in the checkpoint.
        stored: its shape in the checkpoint.
        offset: where the slice starts in the argument.
        extent: shape of the slice, to which the tensor, or a section of its rows, is reshaped
            (row-major).
        rows: start and stop of the section, unset for all rows. Sections of a tensor fill one
            argument, each row equally often.
    """

    tensor: str
    stored: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    rows: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET


class MaskedMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weight holds offsets from a row's index into a larger vocabulary, as a pruned draft's `d2t`.

    Attributes:
        mask: name of the checkpoint tensor [size], bool, that marks the tokens in use.
        size: of the larger vocabulary.
    """

    mask: str
    size: int


class WeightRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one weight argument is made.

    Attributes:
        name: of the argument.
        checkpoint: the model it comes from.
        shape: of the argument.
        dtype: on the device.
        placements: the tensors, which fill the argument completely.
        sharding: as in `ArraySpec`.
        otherwise: name of the argument that replaces this one if the checkpoint has none of its
            tensors.
        mapped: set if the values are token offsets, which have to be checked.
        encoding: set if the argument is half of a quantized weight, whose two recipes name the
            same tensors: "int8_values" are the numbers over their row's scale, "int8_scales" has
            one number for each row (all axes but the last).
        interleaved: set if the checkpoint may hold the tensors of all experts as one, with
            alternating rows of gate and up, as gpt-oss's does.
    """

    name: str
    checkpoint: CheckpointRole
    shape: tuple[int, ...]
    dtype: Dtype
    placements: tuple[Placement, ...]
    sharding: tuple[str | None, ...] = ()
    otherwise: str | None = None
    mapped: MaskedMap | None = None
    encoding: Encoding | msgspec.UnsetType = msgspec.UNSET
    interleaved: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def bytes(self) -> int:
        """Size of the whole argument in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def find_recipe_flaw(recipe: WeightRecipe) -> str | None:
    """Returns why a recipe is invalid (slices outside, wrong shapes, gaps, overlaps), None if it is valid."""
    for placement in recipe.placements:
        place = (placement.offset, placement.extent)
        if any(len(part) != len(recipe.shape) for part in place):
            return f"{placement.tensor} has another number of dimensions than {list(recipe.shape)}"
        if any(
            at < 0 or size < 1 or at + size > end
            for at, size, end in zip(*place, recipe.shape, strict=True)
        ):
            return f"{placement.tensor} is outside {list(recipe.shape)}"
        section = find_section_shape(placement)
        extent = placement.extent
        if not _is_split(section[:-1] if recipe.encoding == "int8_scales" else section, extent):
            return f"{placement.tensor} is stored as {list(section)}, which does not fill {list(extent)}"
    if flaw := _find_section_flaw(recipe.placements):
        return flaw
    filled = sum(math.prod(placement.extent) for placement in recipe.placements)
    if filled != math.prod(recipe.shape):
        return f"its tensors fill {filled} of {math.prod(recipe.shape)} elements"
    return _find_overlap(recipe.placements)


def find_pairing_flaw(recipes: Sequence[WeightRecipe]) -> str | None:
    """Returns which quantized weight lacks its other half or contradicts it, None if none does."""
    by_name = {recipe.name: recipe for recipe in recipes}
    for recipe in recipes:
        if recipe.encoding == "int8_scales" and by_name.get(
            recipe.name.removesuffix(SCALE_SUFFIX)
        ) in (None, recipe):
            return f"{recipe.name} has scales of no weight"
        if recipe.encoding != "int8_values":
            continue
        scales = by_name.get(recipe.name + SCALE_SUFFIX)
        if (
            recipe.dtype != "int8"
            or recipe.mapped
            or scales is None
            or scales != make_scale_recipe(recipe)
        ):
            return f"{recipe.name} is int8 without scales that fit"
    return None


def make_scale_recipe(values: WeightRecipe) -> WeightRecipe:
    """Returns the recipe of the scales that belong to int8 values: the same without the last axis, in float32."""
    return msgspec.structs.replace(
        values,
        name=values.name + SCALE_SUFFIX,
        shape=values.shape[:-1],
        dtype="float32",
        placements=tuple(
            msgspec.structs.replace(one, offset=one.offset[:-1], extent=one.extent[:-1])
            for one in values.placements
        ),
        sharding=values.sharding[:-1] if any(values.sharding[:-1]) else (),
        otherwise=values.otherwise and values.otherwise + SCALE_SUFFIX,
        encoding="int8_scales",
    )


def _find_overlap(placements: Sequence[Placement], axis: int = 0) -> str | None:
    """Returns which placements share elements, None if none do.

    Splits them axis by axis where one ends before the next begins: stacked layers fall apart at once. What is left is
    compared pair by pair. Many that no axis splits are refused, because comparing them could take hours.
    """
    if len(placements) < 2:
        return None
    if axis == len(placements[0].offset):
        if len(placements) > MAX_COMPARED:
            return f"{len(placements)} tensors from {placements[0].tensor} on are not split along any axis"
        pairs = (pair for pair in itertools.combinations(placements, 2) if _share_elements(*pair))
        return next(
            (f"{one.tensor} and {other.tensor} fill the same elements" for one, other in pairs),
            None,
        )
    groups: list[list[Placement]] = []
    end = -1
    for one in sorted(placements, key=lambda placement: placement.offset[axis]):
        if one.offset[axis] >= end:
            groups.append([])
        groups[-1].append(one)
        end = max(end, one.offset[axis] + one.extent[axis])
    return next(filter(None, (_find_overlap(group, axis + 1) for group in groups)), None)


def _share_elements(one: Placement, other: Placement) -> bool:
    sides = zip(one.offset, one.extent, other.offset, other.extent, strict=True)
    return all(a < b + other_size and b < a + size for a, size, b, other_size in sides)


def find_section_shape(placement: Placement) -> tuple[int, ...]:
    """Returns the stored shape of the rows that fill the slice."""
    if placement.rows is msgspec.UNSET:
        return placement.stored
    start, stop = placement.rows
    return (stop - start, *placement.stored[1:])


def _find_section_flaw(placements: Sequence[Placement]) -> str | None:
    """Returns which tensor's sections do not hold each of its rows equally often, None if all do."""
    sections: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for one in placements:
        if one.rows is not msgspec.UNSET:
            sections.setdefault((one.tensor, one.stored[0] if one.stored else 0), []).append(
                one.rows
            )
    for (tensor, size), ranges in sections.items():
        counts = Counter(ranges)
        ends = sorted(counts)
        joined = [0, *(stop for _, stop in ends)] == [*(start for start, _ in ends), size]
        if not joined or len(set(counts.values())) > 1:
            return f"{tensor}: the sections {sorted(ranges)} do not hold each of {size} rows equally often"
    return None


def _is_split(stored: Sequence[int], extent: Sequence[int]) -> bool:
    """Whether each stored dimension is a dimension of `extent` or a product of neighbours, and the others are 1."""
    sizes = iter(extent)
    for size in stored:
        product = 1
        while product < size and (next_size := next(sizes, 0)):
            product *= next_size
        if product != size:
            return False
    return all(size == 1 for size in sizes)
