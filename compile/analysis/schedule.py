"""Schedule estimate: the time of a TPU executable by the compiler's own estimates, and how often its loops run.

The compiler writes `estimated_cycles` on each fusion, from the schedule that it chose for the fusion. The estimate is
their sum, loops times their trip count, over the clock by which the compiler counts. It is no measurement: no two
instructions overlap, and collectives and most other instructions without a figure take no time. Two kinds without a
figure get one here. Pallas kernels take the time of their bytes and flops at the chip's peaks. Asynchronous copies run
next to other instructions, and only the wait for their end counts.

Main memory serves all of them, at its bandwidth: no instruction is shorter than the bytes that it moves, and copies
progress only in the time that instructions leave. So no program is faster than its bytes.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, prod

from dflash_aot.cache.bundle.manifest import InstructionEstimate, ScheduleEstimate, UnestimatedWork
from dflash_aot.cache.chips import Chip
from dflash_aot.compile.analysis.hlo import (
    Buffer,
    Computation,
    HloModule,
    Instruction,
    Type,
    list_buffers,
)
from dflash_aot.compile.kernels.kernel_device import KERNEL_TARGET
from dflash_aot.compile.programs.costs import RooflineCost

# -- loop counts: how often the loops of an optimized program run, as far as its text says so
#
# The analysis follows the whole numbers that are constants of the program through tuples, loops and calls. XLA often
# moves the bound of a loop out of its condition into the state of the loop.

Value = int | None | tuple["Value", ...]  # nested like the type of the instruction; None: unknown
Sides = tuple[Value, Value]  # of the comparison in a loop's condition

FORWARDING_OPCODES = frozenset(
    {"parameter", "copy", "bitcast", "convert", "reshape", "optimization-barrier"}
)
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
            inputs = (
                [arguments[one.number]]
                if one.number is not None
                else [values[name] for name in one.operands]
            )
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
        return self.evaluate(computation, arguments)[
            self._module.computations[computation].root.name
        ]

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
                return (
                    ARITHMETIC[computes](left, right)
                    if isinstance(left, int) and isinstance(right, int)
                    else None
                )
        return None

    def _compare(self, condition: str, states: Sequence[Value]) -> tuple[str, list[Sides]]:
        """The direction of a condition's comparison, "" if it has another form, and its sides for each state."""
        computation = self._module.computations[condition]
        arguments = [[state] for state in states]
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


# -- the estimate

LISTED_INSTRUCTIONS = 12
LISTED_RESULTS = 3  # of an instruction with many
SMALL_BYTES = 1024  # without a figure, instructions with smaller results are scalars and indices, and are ignored
# Opcodes that take no time, or whose computations are counted instead.
FREE_OPCODES = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "optimization-barrier",
    }
)
# Asynchronous copies between memories of a device.
TRANSFER_OPCODES = frozenset({"copy-start", "slice-start", "dynamic-slice-start", "async-start"})
# Opcodes that read as much of their first operand as they return.
SLICING_OPCODES = frozenset({"slice", "dynamic-slice", "gather"})
# Opcodes that give an array another layout or dtype.
PASSING_OPCODES = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
# Opcodes that write into their first operand: the number of the operand that they write.
UPDATE_OPERANDS = {"dynamic-update-slice": 1, "scatter": 2}
# Custom calls that take no time.
FREE_TARGETS = frozenset(
    {
        "AllocateBuffer",
        "AssumeGatherIndicesInBound",
        "ConcatBitcast",
        "GatherScatterIndicesBitpacked",
    }
)


def estimate_schedule(module: HloModule, chip: Chip) -> ScheduleEstimate | None:
    """Estimates one call of an executable on each of its devices; None if the compiler estimated nothing.

    A conditional counts as the branch that takes longest. A loop whose trip count only the run tells counts once. The
    notes name both. Raises BuildFailed if the text has an unknown form.
    """
    work = _WorkCounter(module, chip).count(
        module.entry.name, [None] * len(module.entry.parameters)
    )
    if not work.runs:
        return None
    instructions = {one.name: one for one in module.instructions}
    estimates = [_describe(instructions[name], work, chip) for name in work.runs]
    return ScheduleEstimate(
        seconds=work.seconds(chip),
        cycles=work.cycles.total(),
        kernel_seconds=sum(work.kernel_seconds.values(), 0.0),
        waiting_seconds=sum(work.waiting_seconds.values(), 0.0),
        largest=tuple(sorted(estimates, key=lambda one: -one.seconds)[:LISTED_INSTRUCTIONS]),
        left_out=tuple(
            UnestimatedWork(opcode, runs, work.left_out_bytes[opcode])
            for opcode, runs in sorted(
                work.left_out.items(), key=lambda item: -work.left_out_bytes[item[0]]
            )
        ),
        notes=tuple(work.notes),
    )


@dataclass
class _Work:
    """What one run of a computation does.

    Attributes:
        runs, cycles, kernel_seconds: by the name of the instruction.
        waiting_seconds: for main memory, beyond the compiler's estimate; by the name of the instruction.
        memory_seconds: of main memory; by the name of the instruction.
        left_out, left_out_bytes: by opcode.
        notes: in order, each once.
    """

    runs: Counter[str] = field(default_factory=Counter)
    cycles: Counter[str] = field(default_factory=Counter)
    kernel_seconds: dict[str, float] = field(default_factory=dict)
    waiting_seconds: dict[str, float] = field(default_factory=dict)
    memory_seconds: dict[str, float] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    left_out_bytes: Counter[str] = field(default_factory=Counter)
    notes: dict[str, None] = field(default_factory=dict)

    def seconds(self, chip: Chip) -> float:
        taken = (*self.kernel_seconds.values(), *self.waiting_seconds.values())
        return self.cycles.total() / chip.cycles_per_second + sum(taken)

    def add(self, other: "_Work", times: int = 1) -> None:
        """Adds so many runs of other work."""
        for name in (
            "runs",
            "cycles",
            "left_out",
            "left_out_bytes",
            "kernel_seconds",
            "waiting_seconds",
            "memory_seconds",
        ):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + value * times
        self.notes |= other.notes


class _WorkCounter:
    """Counts the work of computations, whose instructions follow each other."""

    def __init__(self, module: HloModule, chip: Chip):
        self._module = module
        self._chip = chip
        self._bytes_per_second = chip.bytes_per_second / chip.devices
        self._numbers = KnownNumbers(module)
        self._memory = _MemoryTraffic(module)

    def count(self, computation: str, arguments: Sequence[Value]) -> _Work:
        """The work of one run of a computation with these arguments."""
        work = _Work()
        transfers = _Transfers()
        found = self._module.computations[computation]
        values = self._numbers.evaluate(computation, arguments)
        types = {one.name: one.type for one in found.instructions}
        for one in found.instructions:
            inputs = [values[name] for name in one.operands]
            if one.opcode.endswith("-done"):
                _wait(one.name, transfers.finish(one.operands[0]), work)
                continue
            part = self._count_part(one, inputs, [types[name] for name in one.operands])
            transfers.progress(part.seconds(self._chip) - sum(part.memory_seconds.values()))
            work.add(part)
            if one.opcode in TRANSFER_OPCODES:
                seconds = _result_bytes(one, ()) / self._bytes_per_second
                transfers.start(one.name, seconds)
                work.memory_seconds[one.name] = seconds
        for name in transfers.left():  # their ends are in another computation
            _wait(name, transfers.finish(name), work)
        return work

    def _count_part(
        self, one: Instruction, inputs: Sequence[Value], operands: Sequence[Type]
    ) -> _Work:
        """The work of one instruction, with that of the computations that it calls."""
        match one.opcode:
            case "while":
                return self._count_loop(one, inputs[0])
            case "conditional":
                return self._count_conditional(one, inputs[1:])
            case "call":
                return self.count(one.called("to_apply"), inputs)
        work = _Work()
        self._count_instruction(one, operands, work)
        return work

    def _count_loop(self, loop: Instruction, first: Value) -> _Work:
        work = _Work()
        trips = self._numbers.count_trips(loop, first)
        body = self.count(loop.called("body"), [self._numbers.find_invariants(loop, first)])
        work.add(body, 1 if trips is None else trips)
        if trips is None and body.runs:
            work.notes[
                f"%{loop.name} counts once: its trip count is known at run time only{_origin(loop)}"
            ] = None
        return work

    def _count_conditional(self, one: Instruction, inputs: Sequence[Value]) -> _Work:
        branches = [
            self.count(branch, [value]) for branch, value in zip(one.branches, inputs, strict=True)
        ]
        dearest = max(branches, key=lambda work: work.seconds(self._chip))
        if dearest.runs:
            dearest.notes[
                f"%{one.name} counts as the dearest of its {len(branches)} branches{_origin(one)}"
            ] = None
        return dearest

    def _count_instruction(self, one: Instruction, operands: Sequence[Type], work: _Work) -> None:
        if one.opcode in FREE_OPCODES or one.opcode.endswith("-update"):
            return
        if found := one.backend_config.get("window_config", {}).get("estimated_cycles"):
            memory = self._memory.count(one, operands) / self._bytes_per_second
            work.cycles[one.name] += int(found)
            work.memory_seconds[one.name] = memory
            work.runs[one.name] += 1
            if (wait := memory - work.cycles[one.name] / self._chip.cycles_per_second) > 0:
                work.waiting_seconds[one.name] = wait
        elif one.opcode == "custom-call" and one.target == KERNEL_TARGET:
            cost, source = _find_kernel_cost(one, operands)
            work.kernel_seconds[one.name] = cost.bound_seconds(self._chip)
            work.memory_seconds[one.name] = cost.bytes / self._bytes_per_second
            work.runs[one.name] += 1
            work.notes[
                f"%{one.name} is a Pallas kernel: its time follows from {source}{_origin(one)}"
            ] = None
        elif (
            one.target not in FREE_TARGETS and (size := _result_bytes(one, operands)) >= SMALL_BYTES
        ):
            opcode = f"custom-call {one.target}" if one.target else one.opcode
            work.left_out[opcode] += 1
            work.left_out_bytes[opcode] += size


def _wait(name: str, seconds: float, work: _Work) -> None:
    if seconds:
        work.waiting_seconds[name] = seconds
        work.runs[name] += 1


class _Transfers:
    """Asynchronous copies, which main memory serves in order in the time that instructions leave. Times in seconds."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}

    def start(self, name: str, seconds: float) -> None:
        self._left[name] = seconds

    def progress(self, idle: float) -> None:
        """Main memory is idle for `idle` seconds while an instruction runs: copies use them."""
        for name, seconds in self._left.items():
            used = max(0.0, min(idle, seconds))
            self._left[name] -= used
            idle -= used

    def finish(self, name: str) -> float:
        """How long a copy and those before it still take; 0 for a copy that began in another computation."""
        if name not in self._left:
            return 0.0
        names = self.left()
        return sum(self._left.pop(one) for one in names[: names.index(name) + 1])

    def left(self) -> list[str]:
        """Copies without an end, in order."""
        return list(self._left)


def _count_elements(type_: Type) -> int:
    return sum(prod(buffer.dimensions) for buffer in list_buffers(type_))


class _MemoryTraffic:
    """Counts the bytes of main memory that instructions read and write."""

    def __init__(self, module: HloModule):
        self._module = module

    def count(self, one: Instruction, operands: Sequence[Type]) -> int:
        """Bytes that one run of a fusion moves, or of an instruction that is not fused."""
        read = sum(
            self._find_share_read(one, position, type_) * buffer.bytes
            for position, type_ in enumerate(operands)
            for buffer in list_buffers(type_)
            if buffer.in_main_memory
        )
        buffers = list(list_buffers(one.type))
        sizes = self._list_written(one, operands)
        if len(sizes) != len(buffers):  # updates of several arrays at once
            sizes = [buffer.bytes for buffer in buffers]
        written = zip(sizes, buffers, strict=True)
        return round(read) + sum(size for size, buffer in written if buffer.in_main_memory)

    def _find_share_read(self, one: Instruction, position: int, operand: Type) -> float:
        """Which part of an operand an instruction reads."""
        if one.opcode == "fusion":
            computation = self._module.computations[one.called("calls")]
            return self._find_share_used(computation, computation.parameters[position])
        if position == 0 and one.opcode in SLICING_OPCODES:
            return min(1.0, _count_elements(one.type) / max(1, _count_elements(operand)))
        return 0.0 if position == 0 and one.opcode in UPDATE_OPERANDS else 1.0

    def _find_share_used(self, computation: Computation, array: Instruction) -> float:
        """Which part of an array a fused computation reads: it computes only what its result needs."""
        if array.name == computation.root.name:
            return 1.0
        found = 0.0
        for one in computation.instructions:
            for position in (at for at, name in enumerate(one.operands) if name == array.name):
                if self._passes_on(one):
                    found += self._find_share_used(computation, one)
                else:
                    found += self._find_share_read(one, position, array.type)
        return min(found, 1.0)

    def _passes_on(self, one: Instruction) -> bool:
        """Whether an instruction only gives its operand another layout or dtype."""
        if one.opcode != "fusion":
            return one.opcode in PASSING_OPCODES
        parts = self._module.computations[one.called("calls")].instructions
        return all(part.number is not None or self._passes_on(part) for part in parts)

    def _list_written(self, one: Instruction, operands: Sequence[Type]) -> list[int]:
        """Bytes of each array of an instruction's result that it writes."""
        if one.opcode in UPDATE_OPERANDS:
            update = operands[UPDATE_OPERANDS[one.opcode]]
            return [sum(buffer.bytes for buffer in list_buffers(update))]
        if one.opcode != "fusion":
            return [buffer.bytes for buffer in list_buffers(one.type)]
        computation = self._module.computations[one.called("calls")]
        by_name = {part.name: part for part in computation.instructions}
        root = computation.root
        results = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
        sizes: list[int] = []
        for result in results:
            while result.opcode == "bitcast":
                result = by_name[result.operands[0]]
            sizes += self._list_written(result, [by_name[name].type for name in result.operands])
        return sizes


def _find_kernel_cost(kernel: Instruction, operands: Sequence[Type]) -> tuple[RooflineCost, str]:
    """The cost of a run of a kernel, and where it comes from."""
    found = kernel.backend_config.get("custom_call_config", {}).get("cost_estimate")
    if found:
        cost = RooflineCost(float(found["bytes_accessed"]), float(found["flops"]))
        return (
            cost,
            f"its cost estimate ({cost.bytes / 1e6:,.1f} MB, {cost.flops / 1e9:,.2f} Gflop)",
        )
    moved = sum(
        leaf.bytes
        for type_ in (*operands, kernel.type)
        for leaf in list_buffers(type_)
        if leaf.in_main_memory
    )
    return RooflineCost(moved, 0.0), f"the size of its operands and results ({moved / 1e6:,.1f} MB)"


def _result_bytes(one: Instruction, operands: Sequence[Type]) -> int:
    """Bytes that an instruction writes. An update writes its second operand; a start returns its operands too."""
    if one.opcode == "dynamic-update-slice":
        return sum(leaf.bytes for leaf in list_buffers(operands[1]))
    if one.opcode.endswith("-start") and isinstance(one.type, tuple):
        return sum(
            leaf.bytes for leaf in list_buffers(one.type[0 if one.opcode == "copy-start" else 1])
        )
    return sum(leaf.bytes for leaf in list_buffers(one.type))


def _describe(one: Instruction, work: _Work, chip: Chip) -> InstructionEstimate:
    seconds = work.cycles[one.name] / chip.cycles_per_second
    seconds += work.kernel_seconds.get(one.name, 0.0) + work.waiting_seconds.get(one.name, 0.0)
    shapes = [leaf.shape for leaf in list_buffers(one.type)]
    more = len(shapes) - LISTED_RESULTS
    shape = " ".join(shapes[:LISTED_RESULTS]) + (f" and {more} more" if more > 0 else "")
    return InstructionEstimate(one.name, one.operation, shape, work.runs[one.name], seconds)


def _origin(one: Instruction) -> str:
    return f" ({one.operation})" if one.operation else ""
