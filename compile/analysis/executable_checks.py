"""Executable checks: finds unexpected temporaries, copies, collectives, layouts and times of executables."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, LargeCopy
from dflash_aot.cache.signature import KV_POOLS, SAMPLED_PROGRAMS, ArraySpec, Signature
from dflash_aot.compile.analysis.hlo import Buffer, HloModule, Instruction, Type

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


# -- checks

MAX_TEMPORARIES_SHARE = 0.02  # temporaries of one executable, as a share of weights and state
# Programs whose temporaries are checked.
TEMPORARIES_CHECKED = frozenset({"draft", "verify", "kv_write", "rounds"}) | SAMPLED_PROGRAMS
# Estimated time over bound. A bare product with a large weight reaches 1.2 (v6e), 1.4 (v5e) and 1.6 (v5p).
MAX_RATIO = 3.0
# Programs whose ratio is checked. Not those that sample: their bound leaves out top_k and top_p. Not move: it is rare.
RATIO_CHECKED = frozenset({"prefill", "draft", "verify", "kv_write", "rounds"})
# the fixed cost of instructions, 1 µs each, dominates executables with a smaller bound
MIN_RATED_SECONDS = 0.5e-3
# float32 arrays of the size of the logits that a sampled verification may need besides
MAX_LOGITS_ARRAYS = 3


def find_problems(
    entry: Entry, known: Mapping[str, ArraySpec], devices: int, collectives: int
) -> list[str]:
    """Lists what is wrong with a TPU executable, one line per problem, which names the executable and the buffer.

    Not for CPU and GPU executables: XLA copies freely there, and small copies are cheap. See `find_pool_copies`.

    Args:
        entry: the executable's entry in the manifest.
        known: weights and state by name.
        devices: number of devices that share the executable.
        collectives: the number of collectives that the program needs.
    """
    found = [
        *_check_temporaries(entry, known, devices),
        *_check_copies(entry, known, devices),
        *_check_collectives(entry, collectives),
        *_check_ratio(entry),
    ]
    return [f"{entry.signature.label}: {line}" for line in found]


def find_pool_copies(entry: Entry, known: Mapping[str, ArraySpec], devices: int) -> list[str]:
    """Lists copies of whole kv pools, which are expensive on every platform; arguments and lines as `find_problems`."""
    return [
        f"{entry.signature.label}: {_describe_copy(copy)}"
        for copy in entry.analysis.copies
        if copy.buffer in KV_POOLS and copy.bytes >= known[copy.buffer].shard_bytes(devices)
    ]


def find_layout_conflicts(entries: Iterable[Entry]) -> list[str]:
    """Lists buffers that several executables use with different layouts, on every platform.

    An executable would refuse a buffer that another one left in a different layout. Weights and state are shared by
    name. Arguments and results of one name and shape are taken to be the same buffer.
    """
    places: dict[tuple[str, tuple[int, ...]], dict[str, list[str]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for entry in entries:
        for key in _buffers(entry.signature):
            places[key][entry.analysis.layouts[key[0]]].append(entry.signature.label)
    return [
        f"{name} has different layouts: "
        + "; ".join(f"{layout} in {_shorten(labels)}" for layout, labels in layouts.items())
        for (name, _), layouts in places.items()
        if len(layouts) > 1
    ]


def _check_temporaries(entry: Entry, known: Mapping[str, ArraySpec], devices: int) -> Iterable[str]:
    held = sum(array.shard_bytes(devices) for array in known.values())
    taken = entry.memory.temporaries
    allowed = max(
        MAX_TEMPORARIES_SHARE * held, LARGE_COPY_BYTES
    ) + MAX_LOGITS_ARRAYS * _logits_bytes(entry.signature, known, devices)
    if entry.signature.program in TEMPORARIES_CHECKED and taken > allowed:
        yield (
            f"{_megabytes(taken)} of temporaries are {taken / held:.1%} of weights and state ({_megabytes(held)}), "
            f"more than {MAX_TEMPORARIES_SHARE:.0%}; the largest: {entry.analysis.largest}"
        )


def _logits_bytes(signature: Signature, known: Mapping[str, ArraySpec], devices: int) -> int:
    """Size of the logits of a sampled verification on each device; 0 for other programs."""
    if signature.program not in SAMPLED_PROGRAMS:
        return 0
    return (
        signature.bucket["batch"]
        * (signature.bucket["k"] + 1)
        * known["bias"].shard_bytes(devices)
        // known["bias"].shape[0]
    )


def _check_copies(entry: Entry, known: Mapping[str, ArraySpec], devices: int) -> Iterable[str]:
    """Copies of weights and state. Arguments of a call may be copied, and a move copies on purpose.

    A write to a kv pool reads as many positions of a page as it writes, at most a page, of all layers, changes them and
    writes them back.
    """
    for copy in entry.analysis.copies:
        if copy.buffer not in known or entry.signature.program == "move":
            continue
        written = (
            _count_written_bytes(entry.signature, known[copy.buffer], devices)
            if copy.buffer in KV_POOLS
            else 0
        )
        if copy.bytes > written:
            yield _describe_copy(copy)


def _count_written_bytes(signature: Signature, pool: ArraySpec, devices: int) -> int:
    """The part of a page of a kv pool that one write of a call changes, in all layers; 0 if the call writes none."""
    if pool.name not in signature.donated:
        return 0
    _, pages, _, page, _ = pool.shape
    sizes = signature.bucket
    positions = max(
        sizes.get("prefill", 0),
        sizes.get("width", 0),
        sizes.get("k", -1) + 1,
        sizes.get("rounds", 0),
    )
    return pool.shard_bytes(devices) * min(page, positions) // (pages * page)


def _describe_copy(copy: LargeCopy) -> str:
    made = f" ({copy.operation})" if copy.operation else ""
    return f"{copy.buffer} is copied, {_megabytes(copy.bytes)}: %{copy.instruction} = {copy.shape}{made}"


def _check_collectives(entry: Entry, expected: int) -> Iterable[str]:
    found = entry.analysis.collectives
    if (count := sum(found.values())) > expected:
        kinds = ", ".join(f"{number} {kind}" for kind, number in found.items())
        yield f"{count} collectives ({kinds}), but the program needs {expected}"


def _check_ratio(entry: Entry) -> Iterable[str]:
    cost = entry.cost
    ratio = entry.cost.ratio
    if cost.schedule is msgspec.UNSET or cost.bound_seconds is msgspec.UNSET or ratio is None:
        return
    if (
        entry.signature.program in RATIO_CHECKED
        and cost.bound_seconds >= MIN_RATED_SECONDS
        and ratio > MAX_RATIO
    ):
        longest = cost.schedule.largest[0]
        milliseconds = f"{longest.seconds * 1e3:.2f} ms"
        yield (
            f"estimated at {cost.schedule.seconds * 1e3:.2f} ms, {ratio:.1f} times its bound, more than {MAX_RATIO:g}; "
            f"the longest: %{longest.instruction} = {longest.shape}, {milliseconds} ({longest.operation})"
        )


def _buffers(signature: Signature) -> Iterable[tuple[str, tuple[int, ...]]]:
    yield from ((name, ()) for name in (*signature.weights, *signature.state))
    yield from ((array.name, array.shape) for array in (*signature.arguments, *signature.results))


def _shorten(labels: list[str]) -> str:
    first, *more = labels
    return f"{first} and {len(more)} more" if more else first


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
