"""Bitcasts: the memory of an array, read in another layout, as operations that do not depend on layouts."""

import math
from collections.abc import Iterator, Sequence

from dflash_aot.compile.analysis.hlo import Buffer, Instruction
from dflash_aot.compile.emulation.portable_hlo import Line, Scope, refuse
from dflash_aot.compile.emulation.tiled_layout import BitcastMap, TiledLayout, map_bitcast, read_layout

FORWARDED = frozenset({"bitcast", "copy", "copy-start", "copy-done"})  # the first operand, the same memory or a copy
LARGEST_GATHER = 1 << 12  # elements, each a number in the program's text


def translate_bitcast(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """The memory of the operand, read in the order of the result's layout."""
    operand = scope.operand(instruction)
    source, result = scope.array(operand), scope.array(instruction)
    if source.dtype != result.dtype:
        raise refuse(instruction, f"it reads {source.dtype} as {result.dtype}")
    before, after = read_layout(source), read_layout(result)
    taken = map_bitcast(before, after)
    if taken.reads_padding:
        operand = find_whole_array(instruction, scope)
        before = read_layout(scope.array(operand))
        taken = map_bitcast(before, after)
    yield from _relayout(instruction, operand.name, result, before, after, taken)


def _relayout(
    instruction: Instruction, source: str, result: Buffer, before: TiledLayout, after: TiledLayout, taken: BitcastMap
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
        name, result, _transpose(f"{name}.shaped", [after.order.index(axis) for axis in range(len(after.order))])
    )


def _gather(name: str, taken: BitcastMap, dtype: str) -> Iterator[Line]:
    """Any elements one by one. The compiler reads the first 8 numbers of rows of 32 as rows of 8."""
    count = taken.sources.size
    yield Line(f"{name}.sources", Buffer("s32", (count,), ""), f"constant({{{', '.join(map(str, taken.sources))}}})")
    axes = "offset_dims={0}, collapsed_slice_dims={1}, start_index_map={1}, index_vector_dim=1"
    expression = f"gather(%{name}.rows, %{name}.sources), {axes}, slice_sizes={{{taken.repeats},1}}"
    yield Line(f"{name}.kept", Buffer(dtype, (taken.repeats, count), ""), expression)


def _transpose(name: str, order: Sequence[int]) -> str:
    return f"transpose(%{name}), dimensions={{{','.join(map(str, order))}}}"


def find_whole_array(instruction: Instruction, scope: Scope) -> Instruction:
    """Returns the array whose first elements a bitcast was given, and the whole of which it reads.

    The compiler reads the first element of a small array as an array of its own, carries it through a loop that does
    not change it, and reads the whole array again: the other elements are still after it in memory. Raises BuildFailed
    if there is no such array.
    """
    result, found = scope.array(instruction), scope.operand(instruction)
    while (found.type, found.opcode) and not _covers(found, result):
        origin = _forward(found, scope)
        if origin is None:
            raise refuse(instruction, f"it reads memory after %{instruction.operands[0]}, whose contents are not known")
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
    """The instruction whose value another one passes on, None if that is not known."""
    if instruction.opcode in FORWARDED:
        return scope.operand(instruction)
    if instruction.opcode != "get-tuple-element":
        return None
    source, index = scope.operand(instruction), instruction.index
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
        element.opcode == "get-tuple-element" and element.index == index and body.operand(element).opcode == "parameter"
    )
