"""Copy analysis: finds the instructions of an executable that copy large arguments (weights and kv).

The analysis follows the elements of each argument through the optimized HLO. An instruction is a copy if it only moves
elements of an argument, and writes them to the device's main memory, or to VMEM while nothing else runs: a weight that
is copied to VMEM as a whole before its product takes the time of the copy and of the product. Instructions inside a
fusion write no memory, so only the fusion's result counts. Verified on Qwen3-4B for v5e: if a layer's dot needs another
order of dimensions than the kv arrays have, XLA carries a copy through the loop over layers. The analysis finds the
copies before and after it.

Scales are the one calculation that is followed: an int8 weight that is converted and multiplied by its scales is still
the weight, in two or four times its bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from dflash_aot.cache.bundle.manifest import LargeCopy
from dflash_aot.compile.analysis.hlo import Buffer, HloModule, Instruction, Type

# Smaller copies are ignored: they take less than 3 µs. Good programs of Qwen3-4B copy nothing over 0.1 MB. A layer's
# smallest matrix has 1.3 MB on each of 8 devices, and its keys have 2 MB per slot of 1024 positions on one device.
LARGE_COPY_BYTES = 2**20

# Opcodes that move elements and compute nothing. Not gather, which looks rows up: those of an embedding, and kv pages
# where no kernel reads them.
MOVING_OPCODES = frozenset(
    {"copy", "transpose", "reshape", "convert", "bitcast-convert", "reverse", "pad", "concatenate", "select", "slice"}
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


Value = Origin | None | tuple["Value", ...]  # nested like the type of the instruction; None: computed


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
            inputs = [arguments[one.number]] if one.number is not None else [values[name] for name in one.operands]
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
            case "dynamic-update-slice":  # in place in an argument; in another buffer it makes a copy
                return inputs[0] or _mark_moved(inputs[1])
            case started if started.endswith(("-start", "-update", "-done")):
                return self._interpret_async(one, inputs)
            case "custom-call" if one.target == "ConcatBitcast":  # joins prefetched slices
                return _first_known(inputs)
            case moves if moves in MOVING_OPCODES:
                return _mark_moved(_first_known(inputs))
            case scales if scales in SCALING_OPCODES:
                return _mark_moved(_first_known([one for one in inputs if isinstance(one, Origin) and one.int8]))
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
        elif isinstance(value, Origin) and value.moved and type_.bytes >= LARGE_COPY_BYTES and _costs_time(one, type_):
            self.copies[one.name] = LargeCopy(value.argument, one.name, one.operation, str(type_), type_.bytes)


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
