"""Inspection of the compiler's output: layouts, copies, collectives, donation cost; the report of missing memory."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import jax
import msgspec

from dflash_aot.cache.bundle.manifest import CallCost, ExecutableAnalysis, LargeCopy
from dflash_aot.cache.chips import Chip
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.compile.analysis.hlo import (
    Buffer,
    HloModule,
    Instruction,
    Type,
    list_buffers,
)
from dflash_aot.compile.analysis.schedule import estimate_schedule

# -- out-of-memory report: the compiler's RESOURCE_EXHAUSTED as one sentence with figures

UNIT_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"([\d.]+)([KMGT]?)"
# Messages of libtpu 0.0.42: before and after buffer assignment.
NEEDED_PATTERNS = (
    re.compile(
        rf"total memory required for HLO temporaries \({SIZE}\) exceeds available HBM \({SIZE}\)"
    ),
    re.compile(rf"Used {SIZE} of {SIZE} hbm"),
)
EXCESS_PATTERN = re.compile(rf"Exceeded hbm capacity by {SIZE}")
ALLOCATION_PATTERN = re.compile(rf"^ +\d+\. Size: {SIZE}\n((?:     .*\n?)*)", re.MULTILINE)
LISTED_BUFFERS = 3


def explain_out_of_memory(error: BaseException) -> str | None:
    """The memory that was needed and missing, and the largest buffers if the compiler names them.

    None for errors other than RESOURCE_EXHAUSTED.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    found = next((match for pattern in NEEDED_PATTERNS if (match := pattern.search(text))), None)
    if not found:
        return f"needs more device memory than there is: {text.splitlines()[0]}"
    needed = _parse_bytes(*found.groups()[:2])
    available = _parse_bytes(*found.groups()[2:])
    excess = EXCESS_PATTERN.search(text)  # more exact than the difference of rounded figures
    missing = _parse_bytes(*excess.groups()) if excess else needed - available
    sentence = f"needs {_format_bytes(needed)} of device memory, {_format_bytes(missing)} more than there is"
    largest = ", ".join(_list_largest_buffers(text))
    return f"{sentence}; the largest buffers: {largest}" if largest else sentence


def _list_largest_buffers(text: str) -> list[str]:
    """Shapes (or labels) and sizes of the largest buffers, the largest first, each once."""
    found = {}
    for number, unit, details in ALLOCATION_PATTERN.findall(text):
        name = re.search(r"Shape: (\S+?)(?:\{|$)", details, re.MULTILINE) or re.search(
            r"XLA label: (.+)", details
        )
        if name:
            found[name[1]] = _parse_bytes(number, unit)
    ordered = sorted(found.items(), key=lambda one: -one[1])
    return [f"{name} {_format_bytes(size)}" for name, size in ordered[:LISTED_BUFFERS]]


def _parse_bytes(number: str, unit: str) -> float:
    return float(number) * UNIT_BYTES[unit]


def _format_bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


# -- inspection

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
# Opcodes whose result is no new array.
FORWARDING_OPCODES = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
)


def read_cost(compiled: jax.stages.Compiled, module: HloModule, chip: Chip | None) -> CallCost:
    """The compiler's count of flops and bytes accessed, and for a TPU chip its estimate of the time.

    `module` is the compiled program. Raises BuildFailed if the compiler's text has an unknown form.
    """
    counted = compiled.cost_analysis() or {}
    schedule = estimate_schedule(module, chip) if chip else None
    return CallCost(
        counted.get("flops", 0.0), counted.get("bytes accessed", 0.0), schedule or msgspec.UNSET
    )


def inspect_module(
    module: HloModule, inputs: Sequence[str], outputs: Sequence[str]
) -> ExecutableAnalysis:
    """Inspects a compiled program, on every platform. `inputs` and `outputs` are names in order.

    Raises BuildFailed if a donated array changes its layout.
    """
    results = module.entry.root.type
    arguments = _name_layouts(inputs, [one.type for one in module.entry.parameters])
    returned = _name_layouts(outputs, results if isinstance(results, tuple) else (results,))
    if moved := [name for name in arguments.keys() & returned if arguments[name] != returned[name]]:
        raise BuildFailed(
            f"{', '.join(sorted(moved))}: donated in one layout, but returned in another"
        )
    return ExecutableAnalysis(
        layouts=arguments | returned,
        copies=find_argument_copies(module, inputs),
        collectives=count_collectives(module),
        donated=tuple(name for number, name in enumerate(inputs) if number in module.donated),
        largest=describe_largest_array(module),
    )


def count_collectives(module: HloModule) -> dict[str, int]:
    """Number of collectives by kind. An asynchronous collective counts once.

    An asynchronous collective has an instruction at its start and an instruction at its end. Or libtpu starts it in one
    fusion, advances it in other fusions, and ends it in another fusion; each of these fusions repeats the collective.
    """
    ends = {
        one.called("calls")
        for one in module.instructions
        if one.name.startswith("async-collective-done")
    }
    opcodes = (
        one.opcode
        for computation in module.computations.values()
        if computation.name not in ends
        and not computation.name.startswith("async_collective_fusion")
        for one in computation.instructions
    )
    kinds = Counter(
        kind for opcode in opcodes if (kind := opcode.removesuffix("-start")) in COLLECTIVES
    )
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
        for leaf in list_buffers(one.type)
        if leaf.in_main_memory and leaf.shape not in taken
    ]
    return max(found, default=(0, ""))[1]


def _name_layouts(names: Sequence[str], types: Sequence[Type]) -> dict[str, str]:
    layouts = [one.layout for one in types if isinstance(one, Buffer)]
    return dict(zip(names, layouts, strict=True))


# -- copy analysis: the instructions of an executable that copy large arguments (weights and kv)
#
# The analysis follows the elements of each argument through the optimized HLO. An instruction is a copy if it only
# moves elements of an argument, and writes them to the device's main memory, or to VMEM while nothing else runs: a
# weight that is copied to VMEM as a whole before its product takes the time of the copy and of the product.
# Instructions inside a fusion write no memory, so only the fusion's result counts. Verified on Qwen3-4B for v5e: if a
# layer's dot needs another order of dimensions than the kv arrays have, XLA carries a copy through the loop over
# layers. The analysis finds the copies before and after the loop.
#
# Scales are the only calculation that is followed: an int8 weight that is converted and multiplied by its scales is
# still the weight, in two or four times its bytes.

# Smaller copies are ignored: they take less than 3 µs. Good programs of Qwen3-4B copy nothing over 0.1 MB. A layer's
# smallest matrix has 1.3 MB on each of 8 devices, and its keys have 2 MB per slot of 1024 positions on one device.
LARGE_COPY_BYTES = 2**20

# Opcodes that move elements and compute nothing. Gather is not listed: it looks up rows of an embedding, or
# kv pages where no kernel reads them.
MOVING_OPCODES = frozenset(
    {
        "copy",
        "transpose",
        "reshape",
        "convert",
        "bitcast-convert",
        "reverse",
        "pad",
        "concatenate",
        "select",
        "slice",
    }
    | {"dynamic-slice", "all-gather", "all-to-all", "collective-permute"}
)
# Opcodes whose result is their operand.
ALIASING_OPCODES = frozenset({"parameter", "bitcast", "optimization-barrier"})
INT8 = "s8"
# Opcodes that are followed only for int8 weights: the number of elements stays, or grows.
SCALING_OPCODES = frozenset({"multiply", "broadcast"})


@dataclass(frozen=True)
class Origin:
    """Where the elements of a buffer come from.

    Attributes:
        argument: name of the argument.
        int8: whether the argument is an int8 weight.
        moved: whether the current instruction moves the elements.
    """

    argument: str
    int8: bool = False
    moved: bool = False


# nested like the type of the instruction; None: computed
Value = Origin | None | tuple["Value", ...]


def find_argument_copies(module: HloModule, inputs: Sequence[str]) -> tuple[LargeCopy, ...]:
    """Copies of large arguments, in the order in which they run; a copy in the body of a loop is listed once.

    `inputs` are the names of the arguments in order.
    """
    arguments = [
        Origin(name, one.type.dtype == INT8)
        if isinstance(one.type, Buffer) and one.type.bytes >= LARGE_COPY_BYTES
        else None
        for name, one in zip(inputs, module.entry.parameters, strict=True)
    ]
    tracer = _OriginTracker(module)
    if any(arguments):
        tracer.run(module.entry.name, arguments)
    return tuple(tracer.copies.values())


class _OriginTracker:
    """Interprets computations on origins instead of arrays, and collects copies."""

    def __init__(self, module: HloModule):
        self._module = module
        self.copies: dict[str, LargeCopy] = {}

    def run(self, computation: str, arguments: Sequence[Value], fused: bool = False) -> Value:
        """Interprets one computation and returns the value of its root."""
        values: dict[str, Value] = {}
        found = self._module.computations[computation]
        for one in found.instructions:
            inputs = (
                [arguments[one.number]]
                if one.number is not None
                else [values[name] for name in one.operands]
            )
            value = self._interpret(one, inputs)
            if not fused:
                self._collect_copies(one, one.type, value)
                value = _clear_moved(value)
            values[one.name] = value
        return values[found.root.name]

    def _interpret(self, one: Instruction, inputs: Sequence[Value]) -> Value:
        match one.opcode:
            case same if same in ALIASING_OPCODES:
                return inputs[0]
            case "tuple":
                return tuple(inputs)
            case "get-tuple-element":
                return inputs[0][one.index] if isinstance(inputs[0], tuple) else None
            case "fusion":
                return self.run(one.called("calls"), inputs, fused=True)
            case "call":
                return self.run(one.called("to_apply"), inputs)
            case "while":
                return self._interpret_loop(one.called("body"), inputs[0])
            case "conditional":
                taken = zip(one.branches, inputs[1:], strict=True)
                return reduce(_merge, (self.run(branch, [value]) for branch, value in taken))
            case (
                "dynamic-update-slice"
            ):  # in place in an argument; in another buffer it makes a copy
                return inputs[0] or _mark_moved(inputs[1])
            case started if started.endswith(("-start", "-update", "-done")):
                return self._interpret_async(one, inputs)
            case "custom-call" if one.target == "ConcatBitcast":  # joins prefetched slices
                return _first_known(inputs)
            case moves if moves in MOVING_OPCODES:
                return _mark_moved(_first_known(inputs))
            case scales if scales in SCALING_OPCODES:
                return _mark_moved(
                    _first_known([one for one in inputs if isinstance(one, Origin) and one.int8])
                )
        return None

    def _interpret_async(self, one: Instruction, inputs: Sequence[Value]) -> Value:
        """Until it is done, an asynchronous operation is a tuple (operands, result, ...); a copy is (result, ...)."""
        operation, _, stage = one.opcode.rpartition("-")
        if stage == "start" and operation == "async":
            return (None, self.run(one.called("calls"), inputs, fused=True))
        if stage == "start":
            result = self._interpret(replace(one, opcode=operation), inputs)
            return (result, None) if operation == "copy" else (None, result)
        if stage == "update" or not isinstance(inputs[0], tuple):
            return inputs[0]
        return inputs[0][0 if operation == "copy" else 1]

    def _interpret_loop(self, body: str, carry: Value) -> Value:
        """Interprets the body twice: a carried value may come from an argument only after the first iteration."""
        carry = _merge(carry, self.run(body, [carry]))
        return _merge(carry, self.run(body, [carry]))

    def _collect_copies(self, one: Instruction, type_: Type, value: Value) -> None:
        if isinstance(type_, tuple):
            for part, inner in zip(type_, value if isinstance(value, tuple) else (), strict=False):
                self._collect_copies(one, part, inner)
        elif (
            isinstance(value, Origin)
            and value.moved
            and type_.bytes >= LARGE_COPY_BYTES
            and _costs_time(one, type_)
        ):
            self.copies[one.name] = LargeCopy(
                value.argument, one.name, one.operation, str(type_), type_.bytes
            )


def _costs_time(copying: Instruction, result: Buffer) -> bool:
    """Whether other instructions wait for a copy: always for main memory, for VMEM unless the copy is asynchronous."""
    return result.in_main_memory or not copying.opcode.endswith(("-start", "-update", "-done"))


def _first_known(values: Sequence[Value]) -> Value:
    """The first operand that comes from an argument."""
    return next((value for value in values if value), None)


def _mark_moved(value: Value) -> Value:
    return replace(value, moved=True) if isinstance(value, Origin) else None


def _clear_moved(value: Value) -> Value:
    """Clears `moved` after an instruction: its result stays where it is."""
    if isinstance(value, tuple):
        return tuple(map(_clear_moved, value))
    return replace(value, moved=False) if value else None


def _merge(one: Value, other: Value) -> Value:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(map(_merge, one, other))
    return one or other
