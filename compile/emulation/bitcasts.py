"""Bitcasts: the memory of an array, read in another (tiled) layout, as operations that do not depend on layouts."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dflash_aot.cache.errors import BuildFailed
from dflash_aot.compile.analysis.hlo import Buffer, Instruction
from dflash_aot.compile.emulation.portable_hlo import Line, Scope, refuse

# -- tiled layouts: where each element of an array lies in memory
#
# A layout `{1,0:T(8,128)(2,1)S(1)}` lists the dimensions from minor to major, then tiles, each applied to the
# innermost dimensions that the tile before has left (https://openxla.org/xla/tiled_layout). Dimensions are padded to
# whole tiles.

LAYOUT = re.compile(r"\{([\d,]*)(?::((?:[A-Z]\([\d,]*\)|\([\d,]*\))*))?\}")
PART = re.compile(r"([A-Z]?)\(([\d,]*)\)")
# elements; larger arrays split along their major dimensions, see `map_bitcast`
LARGEST_MAP = 1 << 24


@dataclass(frozen=True)
class TiledLayout:
    """The memory order of an array.

    Attributes:
        order: dimensions from major to minor.
        dimensions: their sizes in that order.
        tiles: from outer to inner.
    """

    order: tuple[int, ...]
    dimensions: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...]

    @property
    def tile_rank(self) -> int:
        """How many of the minor dimensions tiles divide."""
        return max(map(len, self.tiles), default=0)

    @cached_property
    def padded_size(self) -> int:
        """Elements in memory, with the padding of tiles."""
        return math.prod(_pad(self.dimensions, self.tiles))

    def suffix(self, rank: int) -> "TiledLayout":
        """The layout of one element of all but the `rank` minor dimensions."""
        return TiledLayout(
            tuple(range(rank)), self.dimensions[len(self.dimensions) - rank :], self.tiles
        )

    def offsets(self) -> np.ndarray:
        """The offset in memory of each element, int64, elements from major to minor."""
        # Arrays, later numbers.
        positions: list[Any] = [*np.indices(self.dimensions, sparse=True, dtype=np.int64)]
        sizes = list(self.dimensions)
        for tile in self.tiles:
            missing = max(0, len(tile) - len(sizes))
            positions = [*[np.int64(0)] * missing, *positions]
            sizes = [1] * missing + sizes
            kept = len(sizes) - len(tile)
            inner = list(zip(positions[kept:], sizes[kept:], tile, strict=True))
            positions = (
                positions[:kept] + [at // t for at, _, t in inner] + [at % t for at, _, t in inner]
            )
            sizes = (
                sizes[:kept] + [-(-size // t) for _, size, t in inner] + [t for _, _, t in inner]
            )
        offset = np.zeros(self.dimensions, np.int64)
        for at, size in zip(positions, sizes, strict=True):
            offset = offset * size + at
        return offset.ravel()


def read_layout(buffer: Buffer) -> TiledLayout:
    """Parses the layout of an array. Raises BuildFailed for a layout of an unknown form."""
    found = LAYOUT.fullmatch(
        buffer.layout or "{" + ",".join(map(str, reversed(range(len(buffer.dimensions))))) + "}"
    )
    minor_to_major = [int(number) for number in found[1].split(",") if number] if found else None
    if found is None or sorted(minor_to_major or ()) != list(range(len(buffer.dimensions))):
        raise BuildFailed(f"the layout of {buffer} is of an unknown form")
    order = tuple(reversed(minor_to_major or ()))
    # T begins the list of tiles; S is a memory space.
    tiles = []
    kind = ""
    for letter, sizes in PART.findall(found[2] or ""):
        kind = letter or kind
        if kind == "T":
            tiles.append(tuple(map(int, sizes.split(","))))
        elif kind != "S":
            raise BuildFailed(f"the layout of {buffer} is of an unknown form")
    return TiledLayout(order, tuple(buffer.dimensions[axis] for axis in order), tuple(tiles))


# -- bitcasts


@dataclass(frozen=True)
class BitcastMap:
    """Which elements a bitcast's result takes, for each element of its leading dimensions.

    Attributes:
        repeats: product of the leading dimensions, which are equal on both sides.
        held: elements of the operand per repeat.
        sources: for each element of the result per repeat, in memory order, the operand's element; -1 where the result
            reads the padding of a tile.
    """

    repeats: int
    held: int
    sources: np.ndarray

    @property
    def is_prefix(self) -> bool:
        """Whether the result has the operand's first elements in the operand's order."""
        return bool((self.sources == np.arange(self.sources.size)).all())

    @property
    def reads_padding(self) -> bool:
        return bool((self.sources < 0).any())

    def factor(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The map as a transposition: dimensions of the operand's elements, and their order in the result.

        None if the map is no transposition.
        """
        digits = _find_digits(self.sources)
        if digits is None or self.sources.size != self.held:
            return None
        strides = sorted((stride for _, stride in digits), reverse=True)
        sizes = {stride: size for size, stride in digits}
        return tuple(sizes[stride] for stride in strides), tuple(
            strides.index(stride) for _, stride in digits
        )


def _find_digits(sources: np.ndarray) -> list[tuple[int, int]] | None:
    """Sizes and strides, from major to minor, of which `sources` is the sum; None if there are none."""
    digits: list[tuple[int, int]] = []
    rest = sources
    while rest.size > 1:
        stride = int(rest[1] - rest[0])
        regular = int(np.argmax(np.append(np.diff(rest) != stride, True))) + 1
        if regular < 2 or rest.size % regular:
            return None
        if (rest.reshape(-1, regular) - rest[::regular, None] != stride * np.arange(regular)).any():
            return None
        digits.insert(0, (regular, stride))
        rest = rest[::regular]
    known = len({stride for _, stride in digits}) == len(digits) and all(
        stride > 0 for _, stride in digits
    )
    return digits if known and not rest.any() else None


def map_bitcast(operand: TiledLayout, result: TiledLayout) -> BitcastMap:
    """Returns how a bitcast between two layouts reads memory. Raises BuildFailed if it is too large to be followed."""
    for ranks in _list_suffixes(operand, result):
        before = operand.suffix(ranks[0])
        after = result.suffix(ranks[1])
        repeats = math.prod(operand.dimensions[: len(operand.dimensions) - ranks[0]])
        whole = ranks == (len(operand.dimensions), len(result.dimensions))
        same = repeats == math.prod(result.dimensions[: len(result.dimensions) - ranks[1]])
        if whole or (same and before.padded_size == after.padded_size):
            if max(before.padded_size, after.padded_size) > LARGEST_MAP:
                raise BuildFailed(
                    f"a bitcast of {before.padded_size} elements is too large to be followed"
                )
            return BitcastMap(repeats, math.prod(before.dimensions), _map_memory(before, after))
    raise AssertionError("the whole arrays are the last suffixes")


def _list_suffixes(operand: TiledLayout, result: TiledLayout) -> list[tuple[int, int]]:
    """Pairs of ranks that tiles do not divide further, the smallest arrays first."""
    ranks = [
        range(min(one.tile_rank, len(one.dimensions)), len(one.dimensions) + 1)
        for one in (operand, result)
    ]
    return sorted(((a, b) for a in ranks[0] for b in ranks[1]), key=sum)


def _map_memory(operand: TiledLayout, result: TiledLayout) -> np.ndarray:
    memory = np.full(max(operand.padded_size, result.padded_size), -1, np.int64)
    offsets = operand.offsets()
    memory[offsets] = np.arange(offsets.size)
    return memory[result.offsets()]


def _pad(dimensions: tuple[int, ...], tiles: tuple[tuple[int, ...], ...]) -> list[int]:
    sizes = list(dimensions)
    for tile in tiles:
        sizes = [1] * (len(tile) - len(sizes)) + sizes
        kept = len(sizes) - len(tile)
        sizes = (
            sizes[:kept]
            + [-(-size // t) for size, t in zip(sizes[kept:], tile, strict=True)]
            + list(tile)
        )
    return sizes


# the first operand, the same memory or a copy
FORWARDED = frozenset({"bitcast", "copy", "copy-start", "copy-done"})
LARGEST_GATHER = 1 << 12  # elements, each a number in the program's text


def translate_bitcast(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """The memory of the operand, read in the order of the result's layout."""
    operand = scope.operand(instruction)
    source = scope.array(operand)
    result = scope.array(instruction)
    if source.dtype != result.dtype:
        raise refuse(instruction, f"it reads {source.dtype} as {result.dtype}")
    before = read_layout(source)
    after = read_layout(result)
    taken = map_bitcast(before, after)
    if taken.reads_padding:
        operand = find_whole_array(instruction, scope)
        before = read_layout(scope.array(operand))
        taken = map_bitcast(before, after)
    yield from _relayout(instruction, operand.name, result, before, after, taken)


def _relayout(
    instruction: Instruction,
    source: str,
    result: Buffer,
    before: TiledLayout,
    after: TiledLayout,
    taken: BitcastMap,
) -> Iterator[Line]:
    name = instruction.name

    def array(*sizes: int) -> Buffer:
        return Buffer(result.dtype, sizes, "")

    yield Line(f"{name}.ordered", array(*before.dimensions), _transpose(source, before.order))
    yield Line(f"{name}.rows", array(taken.repeats, taken.held), f"reshape(%{name}.ordered)")
    if taken.is_prefix and taken.sources.size <= taken.held:
        kept = array(taken.repeats, taken.sources.size)
        bounds = ", ".join(f"[0:{size}]" for size in kept.dimensions)
        yield Line(f"{name}.kept", kept, f"slice(%{name}.rows), slice={{{bounds}}}")
    elif factors := taken.factor():
        sizes, order = factors
        yield Line(f"{name}.digits", array(taken.repeats, *sizes), f"reshape(%{name}.rows)")
        moved = (0, *(axis + 1 for axis in order))
        exchanged = array(taken.repeats, *(sizes[axis] for axis in order))
        yield Line(f"{name}.kept", exchanged, _transpose(f"{name}.digits", moved))
    elif taken.sources.size <= LARGEST_GATHER:
        yield from _gather(name, taken, result.dtype)
    else:
        raise refuse(instruction, f"its layouts place elements in another order: {result}")
    yield Line(f"{name}.shaped", array(*after.dimensions), f"reshape(%{name}.kept)")
    yield Line(
        name,
        result,
        _transpose(f"{name}.shaped", [after.order.index(axis) for axis in range(len(after.order))]),
    )


def _gather(name: str, taken: BitcastMap, dtype: str) -> Iterator[Line]:
    """Any elements one by one. The compiler reads the first 8 numbers of rows of 32 as rows of 8."""
    count = taken.sources.size
    yield Line(
        f"{name}.sources",
        Buffer("s32", (count,), ""),
        f"constant({{{', '.join(map(str, taken.sources))}}})",
    )
    axes = "offset_dims={0}, collapsed_slice_dims={1}, start_index_map={1}, index_vector_dim=1"
    expression = f"gather(%{name}.rows, %{name}.sources), {axes}, slice_sizes={{{taken.repeats},1}}"
    yield Line(f"{name}.kept", Buffer(dtype, (taken.repeats, count), ""), expression)


def _transpose(name: str, order: Sequence[int]) -> str:
    return f"transpose(%{name}), dimensions={{{','.join(map(str, order))}}}"


def find_whole_array(instruction: Instruction, scope: Scope) -> Instruction:
    """Returns the whole array that a bitcast reads, although its operand holds only the first elements.

    The compiler reads the first element of a small array as a separate array, carries it through a loop that does
    not change it, and reads the whole array again: the other elements are still after it in memory. Raises BuildFailed
    if there is no such array.
    """
    result = scope.array(instruction)
    found = scope.operand(instruction)
    while (found.type, found.opcode) and not _covers(found, result):
        origin = _forward(found, scope)
        if origin is None:
            raise refuse(
                instruction,
                f"it reads memory after %{instruction.operands[0]}, whose contents are not known",
            )
        found = origin
    return found


def _covers(instruction: Instruction, result: Buffer) -> bool:
    array = instruction.type
    if not isinstance(array, Buffer) or array.dtype != result.dtype:
        return False
    return math.prod(array.dimensions) >= math.prod(result.dimensions) and not (
        map_bitcast(read_layout(array), read_layout(result)).reads_padding
    )


def _forward(instruction: Instruction, scope: Scope) -> Instruction | None:
    """The instruction whose value this instruction passes on, None if that is not known."""
    if instruction.opcode in FORWARDED:
        return scope.operand(instruction)
    if instruction.opcode != "get-tuple-element":
        return None
    source = scope.operand(instruction)
    index = instruction.index
    if source.opcode == "while":
        body = Scope(scope.module, scope.module.computations[source.called("body")])
        if not _is_unchanged(body, index):
            return None
        source = scope.operand(source)
    return scope.operand(source, index) if source.opcode == "tuple" else None


def _is_unchanged(body: Scope, index: int) -> bool:
    """Whether a loop passes an element of its state on as it is."""
    root = body.computation.root
    if root.opcode != "tuple":
        return False
    element = body.operand(root, index)
    while element.opcode in FORWARDED:
        element = body.operand(element)
    return (
        element.opcode == "get-tuple-element"
        and element.index == index
        and body.operand(element).opcode == "parameter"
    )
