"""Symbolic pickle machine: follows the opcodes of a pickle without importing, creating or calling anything.

Every call that the pickle would make is reported instead. The machine understands only what Python's pickler writes for
data without cycles. In particular, it refuses opcodes that move values around the stack, and changes of an object after
its first use. So each value ends in the arguments of a reported call or in the result, as the machine shows it there.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_aot.cache.errors import CorruptBundle

Value = Any  # None, bool, int, str, bytes, tuple, Name, Instance, Items or KeyedItems
OnCall = Callable[[str, tuple[Value, ...]], None]


class BadPickle(CorruptBundle):
    """The bytes are not a pickle that JAX writes for an executable."""


@dataclass(slots=True, frozen=True)
class Name:
    """A class or function, by its module and name: `numpy.dtype`."""

    text: str


@dataclass(slots=True, eq=False)
class Instance:
    """The result of a call: what was called, and with which arguments.

    fresh: whether the object was not used yet, so that its state may be set.
    """

    name: str
    arguments: tuple[Value, ...]
    fresh: bool = True


@dataclass(slots=True, eq=False)
class Items:
    """A collection of the `kind` list, set or frozenset.

    fresh: whether the collection was not used yet, so that values may be added.
    """

    kind: str
    values: list[Value]
    fresh: bool = True


@dataclass(slots=True, eq=False)
class KeyedItems:
    """A dict whose keys are texts; `fresh` as of `Items`."""

    values: dict[str, Value]
    fresh: bool = True


@dataclass(slots=True, frozen=True)
class PickleSize:
    """Size of a pickle: the number of its opcodes and memo entries, and the items of its largest collection."""

    opcodes: int
    memo: int
    items: int


class PickleMachine:
    """Follows one pickle."""

    def __init__(self, on_call: OnCall, limit: PickleSize):
        """on_call: receives each call: operation and name, and the arguments; may raise."""
        self._on_call, self._limit = on_call, limit
        self._stack: list[Value] = []
        self._below: list[list[Value]] = []  # the stacks below each MARK
        self._memo: list[Value] = []
        self._opcodes = self._largest = 0

    @property
    def size(self) -> PickleSize:
        """What was followed so far."""
        return PickleSize(self._opcodes, len(self._memo), self._largest)

    def follow(self, blob: bytes) -> Value:
        """Returns the value that the pickle describes. Raises BadPickle, or what `on_call` raises."""
        end = 0
        try:
            for self._opcodes, (opcode, argument, position) in enumerate(pickletools.genops(blob), 1):
                if (handler := HANDLERS.get(opcode.name)) is None:
                    raise BadPickle(f"the pickle uses {opcode.name}, which JAX never writes")
                if self._opcodes > self._limit.opcodes:
                    raise BadPickle(f"the pickle has more than {self._limit.opcodes} opcodes")
                handler(self, argument)
                end = (position or 0) + 1
        except (ValueError, IndexError) as error:  # of genops
            raise BadPickle(f"not a pickle: {error}") from error
        if end != len(blob):
            raise BadPickle(f"the pickle ends after {end} of {len(blob)} bytes")
        if self._below or len(self._stack) != 1:
            raise BadPickle("the pickle leaves values behind")
        return self._stack[0]

    def push(self, value: Value) -> None:
        self._stack.append(value)

    def mark(self, _: object) -> None:
        self._below.append(self._stack)
        self._stack = []

    def take_marked(self) -> list[Value]:
        """Returns the values above the last mark, and removes both."""
        if not self._below:
            raise BadPickle("the pickle uses a mark that it does not set")
        values, self._stack = self._stack, self._below.pop()
        self._check_items(len(values))
        return values

    def take(self, count: int) -> tuple[Value, ...]:
        """Returns the last values of the stack, and removes them."""
        if len(self._stack) < count:
            raise BadPickle("the pickle uses values that it does not have")
        values = tuple(self._stack[-count:])
        del self._stack[-count:]
        return values

    def memoize(self, _: object) -> None:
        if len(self._memo) >= self._limit.memo:
            raise BadPickle(f"the pickle has more than {self._limit.memo} memo entries")
        if not self._stack:
            raise BadPickle("the pickle uses values that it does not have")
        self._memo.append(self._stack[-1])

    def recall(self, index: int) -> None:
        if not 0 <= index < len(self._memo):
            raise BadPickle(f"the pickle uses memo entry {index}, which it does not have")
        value = self._memo[index]
        if isinstance(value, (Items, KeyedItems, Instance)):
            value.fresh = False
        self._stack.append(value)

    def add_items(self, kind: str, values: list[Value]) -> None:
        items = self._top(Items)
        if items.kind != kind:
            raise BadPickle(f"the pickle adds to a {items.kind} as to a {kind}")
        self._check_items(len(items.values) + len(values))
        items.values.extend(values)

    def set_items(self, pairs: list[Value]) -> None:
        record = self._top(KeyedItems)
        self._check_items(len(record.values) + len(pairs) // 2)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) is not str or key in record.values:
                raise BadPickle("the pickle has a dict with a key that is not text, or is there twice")
            record.values[key] = value

    def name(self, _: object) -> None:
        module, name = self.take(2)
        if type(module) is not str or type(name) is not str:
            raise BadPickle("the pickle names a class by something other than texts")
        found = Name(f"{module}.{name}")
        self._on_call(f"STACK_GLOBAL {found.text}", ())
        self._stack.append(found)

    def call(self, operation: str, arguments: tuple[Value, ...]) -> None:
        """Reports the call of a name with arguments, and pushes the result."""
        called, *rest = arguments
        if type(called) is not Name:
            raise BadPickle(f"the pickle uses {operation} on something other than a class or function")
        self._on_call(f"{operation} {called.text}", tuple(rest))
        self._stack.append(Instance(called.text, tuple(rest)))

    def call_persistent(self, _: object) -> None:
        """Reports a device, client or machine code, which JAX writes as a tuple that begins with the kind."""
        (identity,) = self.take(1)
        if type(identity) is not tuple or not identity or type(identity[0]) is not str:
            raise BadPickle("the pickle has a persistent id that JAX never writes")
        self._on_call(f"BINPERSID {identity[0]}", identity[1:])
        self._stack.append(Instance(identity[0], identity[1:]))

    def build(self, _: object) -> None:
        (state,) = self.take(1)
        target = self._top(Instance)
        target.fresh = False
        self._on_call(f"BUILD {target.name}", (target.arguments, state))

    def _top(self, kind: type[Any]) -> Any:
        """Returns the value on top of the stack if it is of this type and fresh."""
        if not self._stack or type(self._stack[-1]) is not kind or not self._stack[-1].fresh:
            raise BadPickle("the pickle changes a value that cannot be changed, or not any more")
        return self._stack[-1]

    def _check_items(self, count: int) -> None:
        self._largest = max(self._largest, count)
        if count > self._limit.items:
            raise BadPickle(f"the pickle has a collection of more than {self._limit.items} items")


Machine = PickleMachine
HANDLERS: dict[str, Callable[[PickleMachine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, length: None,
    "STOP": lambda machine, _: None,
    "MARK": Machine.mark,
    "MEMOIZE": Machine.memoize,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), Machine.push),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), Machine.recall),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.push(machine.take(1)),
    "TUPLE2": lambda machine, _: machine.push(machine.take(2)),
    "TUPLE3": lambda machine, _: machine.push(machine.take(3)),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.take_marked())),
    "EMPTY_LIST": lambda machine, _: machine.push(Items("list", [])),
    "APPEND": lambda machine, _: machine.add_items("list", list(machine.take(1))),
    "APPENDS": lambda machine, _: machine.add_items("list", machine.take_marked()),
    "EMPTY_SET": lambda machine, _: machine.push(Items("set", [])),
    "ADDITEMS": lambda machine, _: machine.add_items("set", machine.take_marked()),
    "FROZENSET": lambda machine, _: machine.push(Items("frozenset", machine.take_marked(), fresh=False)),
    "EMPTY_DICT": lambda machine, _: machine.push(KeyedItems({})),
    "SETITEM": lambda machine, _: machine.set_items(list(machine.take(2))),
    "SETITEMS": lambda machine, _: machine.set_items(machine.take_marked()),
    "STACK_GLOBAL": Machine.name,
    "REDUCE": lambda machine, _: machine.call("REDUCE", machine.take(2)),
    "NEWOBJ": lambda machine, _: machine.call("NEWOBJ", machine.take(2)),
    "NEWOBJ_EX": lambda machine, _: machine.call("NEWOBJ_EX", machine.take(3)),
    "BINPERSID": Machine.call_persistent,
    "BUILD": Machine.build,
}
