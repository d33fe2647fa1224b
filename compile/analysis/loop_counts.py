"""Loop counts: how often the loops of an optimized program run, as far as its text says so.

The analysis follows the whole numbers that are constants of the program through tuples, loops and calls. XLA often
moves the bound of a loop out of its condition into the state of the loop.
"""

import operator
import re
from collections.abc import Callable, Sequence
from math import ceil

from dflash_aot.compile.analysis.hlo import Buffer, HloModule, Instruction

Value = int | None | tuple["Value", ...]  # nested like the type of the instruction; None: unknown
Sides = tuple[Value, Value]  # of the comparison in a loop's condition

FORWARDING_OPCODES = frozenset({"parameter", "copy", "bitcast", "convert", "reshape", "optimization-barrier"})
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
}


class KnownNumbers:
    """Interprets the computations of a program on the whole numbers that its text determines."""

    def __init__(self, module: HloModule):
        self._module = module

    def evaluate(self, computation: str, arguments: Sequence[Value]) -> dict[str, Value]:
        """The value of each instruction of a computation, by name."""
        values: dict[str, Value] = {}
        for one in self._module.computations[computation].instructions:
            inputs = [arguments[one.number]] if one.number is not None else [values[name] for name in one.operands]
            values[one.name] = self._interpret(one, inputs)
        return values

    def count_trips(self, loop: Instruction, first: Value) -> int | None:
        """How often the body of a `while` with the initial state `first` runs; None if only the run itself tells."""
        if found := loop.backend_config.get("known_trip_count"):
            return int(found["n"])
        second = self._call(loop.called("body"), [first])
        third = self._call(loop.called("body"), [second])
        direction, sides = self._compare(loop.called("condition"), [first, second, third])
        return _solve(direction, sides)

    def find_invariants(self, loop: Instruction, first: Value) -> Value:
        """The state of a `while` as far as it is the same in each iteration."""
        state = _merge(first, self._call(loop.called("body"), [first]))
        return _merge(state, self._call(loop.called("body"), [state]))

    def _call(self, computation: str, arguments: Sequence[Value]) -> Value:
        return self.evaluate(computation, arguments)[self._module.computations[computation].root.name]

    def _interpret(self, one: Instruction, inputs: Sequence[Value]) -> Value:
        match one.opcode:
            case "constant":
                return int(one.literal) if re.fullmatch(r"-?\d+", one.literal) else None
            case "tuple":
                return tuple(inputs)
            case "get-tuple-element":
                return inputs[0][one.index] if isinstance(inputs[0], tuple) else None
            case "while":
                return self.find_invariants(one, inputs[0])
            case "call":
                return self._call(one.called("to_apply"), inputs)
            case "fusion" if isinstance(one.type, Buffer) and not one.type.dimensions:
                return self._call(one.called("calls"), inputs)
            case "copy-start":
                return (inputs[0], None, None)
            case "copy-done":
                return inputs[0][0] if isinstance(inputs[0], tuple) else None
            case forwards if forwards in FORWARDING_OPCODES:
                return inputs[0]
            case computes if computes in ARITHMETIC:
                left, right = inputs
                return ARITHMETIC[computes](left, right) if isinstance(left, int) and isinstance(right, int) else None
        return None

    def _compare(self, condition: str, states: Sequence[Value]) -> tuple[str, list[Sides]]:
        """The direction of a condition's comparison, "" if it has another form, and its sides for each state."""
        computation, arguments = self._module.computations[condition], [[state] for state in states]
        if computation.root.opcode == "fusion":
            root = computation.root
            arguments = [
                [values[name] for name in root.operands]
                for values in (self.evaluate(condition, given) for given in arguments)
            ]
            computation = self._module.computations[root.called("calls")]
        if computation.root.opcode != "compare":
            return "", []
        left, right = computation.root.operands
        found = [self.evaluate(computation.name, given) for given in arguments]
        return computation.root.direction, [(values[left], values[right]) for values in found]


def _solve(direction: str, sides: Sequence[Sides]) -> int | None:
    """Iterations of a loop whose condition compares `sides` before the first three; None if they do not tell.

    The difference between both sides has to shrink by the same amount in each iteration.
    """
    differences = []
    for left, right in sides:
        if not isinstance(left, int) or not isinstance(right, int):
            return None
        differences.append(left - right if direction in ("GT", "GE") else right - left)
    if direction not in ("LT", "LE", "GT", "GE", "NE"):
        return None
    first, second, third = differences
    step = first - second
    if second - third != step or not step:
        return None
    if direction == "NE":
        return first // step if first % step == 0 and first // step >= 0 else None
    beyond = first + (direction in ("LE", "GE"))  # the loop goes on while this is above 0
    if beyond <= 0:
        return 0
    return ceil(beyond / step) if step > 0 else None


def _merge(one: Value, other: Value) -> Value:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(map(_merge, one, other))
    return one if one == other else None
