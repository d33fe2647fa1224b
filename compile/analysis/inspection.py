"""Inspection of a compiled executable: layouts, copies, collectives, donation and cost, from the compiler's output."""

from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import msgspec

from dflash_aot.cache.bundle.manifest import CallCost, ExecutableAnalysis
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.topology import Chip
from dflash_aot.compile.analysis.copy_analysis import find_argument_copies
from dflash_aot.compile.analysis.hlo import Buffer, HloModule, Type, parse_module
from dflash_aot.compile.analysis.schedule import estimate_schedule

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
# Opcodes whose result is no new array.
FORWARDING_OPCODES = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")


def read_cost(compiled: jax.stages.Compiled, module: HloModule, chip: Chip | None) -> CallCost:
    """The compiler's count of flops and bytes accessed, and for a TPU chip its estimate of the time.

    `module` is the compiled program. Raises BuildFailed if the compiler's text has an unknown form.
    """
    counted = compiled.cost_analysis() or {}
    schedule = estimate_schedule(module, chip) if chip else None
    return CallCost(counted.get("flops", 0.0), counted.get("bytes accessed", 0.0), schedule or msgspec.UNSET)


def inspect_hlo(text: str, inputs: Sequence[str], outputs: Sequence[str]) -> ExecutableAnalysis:
    """Inspects optimized HLO text. Raises BuildFailed if it cannot be parsed, and as `inspect_module` does."""
    return inspect_module(parse_module(text), inputs, outputs)


def inspect_module(module: HloModule, inputs: Sequence[str], outputs: Sequence[str]) -> ExecutableAnalysis:
    """Inspects a compiled program, on every platform. `inputs` and `outputs` are names in order.

    Raises BuildFailed if a donated array changes its layout.
    """
    results = module.entry.root.type
    arguments = _name_layouts(inputs, [one.type for one in module.entry.parameters])
    returned = _name_layouts(outputs, results if isinstance(results, tuple) else (results,))
    if moved := [name for name in arguments.keys() & returned if arguments[name] != returned[name]]:
        raise BuildFailed(f"{', '.join(sorted(moved))}: donated in one layout, but returned in another")
    return ExecutableAnalysis(
        layouts=arguments | returned,
        copies=find_argument_copies(module, inputs),
        collectives=count_collectives(module),
        donated=tuple(name for number, name in enumerate(inputs) if number in module.donated),
        largest=describe_largest_array(module),
    )


def count_collectives(module: HloModule) -> dict[str, int]:
    """Number of collectives by kind. An asynchronous collective counts once.

    It has an instruction at its start and one at its end. Or libtpu starts it in one fusion, advances it in others
    beside their own work, and ends it in one more: each of these repeats the collective.
    """
    ends = {one.called("calls") for one in module.instructions if one.name.startswith("async-collective-done")}
    opcodes = (
        one.opcode
        for computation in module.computations.values()
        if computation.name not in ends and not computation.name.startswith("async_collective_fusion")
        for one in computation.instructions
    )
    kinds = Counter(kind for opcode in opcodes if (kind := opcode.removesuffix("-start")) in COLLECTIVES)
    return dict(sorted(kinds.items()))


def describe_largest_array(module: HloModule) -> str:
    """The instruction with the largest new array, as text; "" if there is none.

    Arrays with the shape of an argument are left out, because they may be written in its place.
    """
    fused = {one.called("calls") for one in module.instructions if one.opcode == "fusion"}
    taken = {one.type.shape for one in module.entry.parameters if isinstance(one.type, Buffer)}
    found = [
        (leaf.bytes, f"%{one.name} = {leaf}" + (f" ({one.operation})" if one.operation else ""))
        for computation in module.computations.values()
        if computation.name not in fused
        for one in computation.instructions
        if one.opcode not in FORWARDING_OPCODES
        for leaf in _leaves(one.type)
        if leaf.in_main_memory and leaf.shape not in taken
    ]
    return max(found, default=(0, ""))[1]


def _leaves(type_: Type) -> Iterator[Buffer]:
    if isinstance(type_, Buffer):
        yield type_
    else:
        for part in type_:
            yield from _leaves(part)


def _name_layouts(names: Sequence[str], types: Sequence[Type]) -> dict[str, str]:
    layouts = [one.layout for one in types if isinstance(one, Buffer)]
    return dict(zip(names, layouts, strict=True))
