"""Whether a program copies what it should read in place: weights and kv, followed from its arguments.

A copy is told from a computation by where its elements come from: an instruction that only moves what an argument
holds, and lays it down in the device's main memory once more, is one. Fused computations are looked through: what
happens inside of them touches no memory. Verified on Qwen3-4B for v5e: where a layer's dot wants another order of
dimensions than the kv arrays have, XLA carries a copy through the loop over layers, and this finds it at both ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from dflash_aot.cache.bundle.manifest import LargeCopy
from dflash_aot.compile.analysis.hlo import Buffer, HloModule, Instruction, Type

# The clean programs of Qwen3-4B copy nothing over 0.1 MB; a layer's smallest matrix is 1.3 MB on each of 8 devices,
# its keys 2 MB per slot of 1024 positions on one. Less than this is read and written in under 3 µs.
LARGE_COPY_BYTES = 2**20

# What moves elements and computes nothing; a gather looks rows up.
MOVING_OPCODES = frozenset(
    {"copy", "transpose", "reshape", "convert", "bitcast-convert", "reverse", "pad", "concatenate", "select", "slice"}
    | {"dynamic-slice", "all-gather", "all-to-all", "collective-permute"}
)
ALIASING_OPCODES = frozenset({"parameter", "bitcast", "optimization-barrier"})


@dataclass(frozen=True)
class Origin:
    """The argument that a buffer's elements come from; `moved` by the instruction that is looked at."""

    argument: str
    moved: bool = False


Value = Origin | None | tuple["Value", ...]  # as the type of its instruction is built


def find_argument_copies(module: HloModule, inputs: Sequence[str]) -> tuple[LargeCopy, ...]:
    """In the order in which they run; `inputs` names the arguments. One in the body of a loop is found once."""
    arguments = [
        Origin(name) if isinstance(one.type, Buffer) and one.type.bytes >= LARGE_COPY_BYTES else None
        for name, one in zip(inputs, module.entry.parameters, strict=True)
    ]
    tracer = _OriginTracker(module)
    if any(arguments):
        tracer.run(module.entry.name, arguments)
    return tuple(tracer.copies.values())


class _OriginTracker:
    """Runs computations on origins instead of arrays, and keeps the copies that it meets."""

    def __init__(self, module: HloModule):
        self._module = module
        self.copies: dict[str, LargeCopy] = {}

    def run(self, computation: str, arguments: Sequence[Value], fused: bool = False) -> Value:
        """→ the value of its root."""
        values: dict[str, Value] = {}
        found = self._module.computations[computation]
        for one in found.instructions:
            inputs = [arguments[one.number]] if one.number is not None else [values[name] for name in one.operands]
            value = self._follow(one, inputs)
            if not fused:
                self._keep_copies(one, one.type, value)
                value = _clear_moved(value)
            values[one.name] = value
        return values[found.root.name]

    def _follow(self, one: Instruction, inputs: Sequence[Value]) -> Value:
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
                return self._follow_loop(one.called("body"), inputs[0])
            case "conditional":
                taken = zip(one.branches, inputs[1:], strict=True)
                return reduce(_merge, (self.run(branch, [value]) for branch, value in taken))
            case "dynamic-update-slice":  # in place; into a buffer that is none of the arguments, it makes a copy
                return inputs[0] or _mark_moved(inputs[1])
            case started if started.endswith(("-start", "-update", "-done")):
                return self._follow_started(one, inputs)
            case "custom-call" if one.target == "ConcatBitcast":  # slices that were prefetched side by side
                return _first_known(inputs)
            case moves if moves in MOVING_OPCODES:
                return _mark_moved(_first_known(inputs))
        return None

    def _follow_started(self, one: Instruction, inputs: Sequence[Value]) -> Value:
        """What runs beside others is a tuple until it is done: (operands, result, ...), of a copy (result, ...)."""
        operation, _, stage = one.opcode.rpartition("-")
        if stage == "start" and operation == "async":
            return (None, self.run(one.called("calls"), inputs, fused=True))
        if stage == "start":
            result = self._follow(replace(one, opcode=operation), inputs)
            return (result, None) if operation == "copy" else (None, result)
        if stage == "update" or not isinstance(inputs[0], tuple):
            return inputs[0]
        return inputs[0][0 if operation == "copy" else 1]

    def _follow_loop(self, body: str, carry: Value) -> Value:
        """What goes round may come from the arguments only after the first turn."""
        carry = _merge(carry, self.run(body, [carry]))
        return _merge(carry, self.run(body, [carry]))

    def _keep_copies(self, one: Instruction, type_: Type, value: Value) -> None:
        if isinstance(type_, tuple):
            for part, inner in zip(type_, value if isinstance(value, tuple) else (), strict=False):
                self._keep_copies(one, part, inner)
        elif isinstance(value, Origin) and value.moved and type_.in_main_memory and type_.bytes >= LARGE_COPY_BYTES:
            self.copies[one.name] = LargeCopy(value.argument, one.name, one.operation, str(type_), type_.bytes)


def _first_known(values: Sequence[Value]) -> Value:
    """Of several operands the one that comes from an argument."""
    return next((value for value in values if value), None)


def _mark_moved(value: Value) -> Value:
    return replace(value, moved=True) if isinstance(value, Origin) else None


def _clear_moved(value: Value) -> Value:
    """Behind its instruction every buffer lies where it lies."""
    if isinstance(value, tuple):
        return tuple(map(_clear_moved, value))
    return replace(value, moved=False) if value else None


def _merge(one: Value, other: Value) -> Value:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(map(_merge, one, other))
    return one or other
