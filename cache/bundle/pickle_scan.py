"""Pickle scan: a serialized executable is a pickle, and is loaded only if it names nothing but what JAX writes there.

The scan reads the opcodes and executes none. It does not check what the named classes are called with.
"""

import pickletools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.signature import Signature

# What executables of JAX 0.10.2 and 0.12.0.1 name, for CPU and TPU, on one device and on several.
CLASSES = {
    "jax": {"P"},
    "jax._src.core": {"ManualAxisType", "MemorySpace", "ShapedArray"},
    "jax._src.interpreters.pxla": {"AllArgsInfo", "UnloadedMeshExecutable"},
    "jax._src.layout": {"AutoLayoutSingleton", "Layout"},
    "jax._src.linear_util": {"DebugInfo"},
    "jax._src.mesh": {"AbstractDevice", "AbstractMesh", "AxisType", "Mesh"},
    "jax._src.named_sharding": {"_unpickle_named_sharding"},
    "jax._src.sharding_impls": {"_unpickle_single_device_sharding"},
    "jax._src.stages": {"ArgInfo"},
    "jaxlib._jax": {"DeviceList"},
    "ml_dtypes": {"bfloat16"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct"},
}
CONSTANTS = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "SHORT_BINBYTES",
    "BINBYTES",
}
COLLECTIONS = {"EMPTY_LIST", "EMPTY_SET", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "FROZENSET"}
CHANGES = {"APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS", "BUILD"}
OTHERS = CHANGES | {"MARK", "NONE", "NEWTRUE", "NEWFALSE", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "STOP"}
# Persistent ids as JAX writes them: a tuple that begins with the kind, and what follows.
PERSISTENT_IDS = {"client": [], "device": [int], "exec": [bytes]}
# What a pickle may have for each input and output of the executable: four times what executables have. Items of a
# collection are bounded with the opcodes: each item takes an opcode.
LIMITS = {"opcodes": 540, "memo entries": 136, "collections": 80}
MAX_OPCODES = 1 << 18  # ten times those of the largest supported model
UNKNOWN = object()


class BadPickle(CorruptBundle):
    """The bytes are not a pickle that JAX writes for an executable."""


def scan_pickle(blob: bytes, signature: Signature) -> frozenset[int]:
    """Returns the device ids of the executable.

    signature: of the executable; the number of its arrays limits the size of the pickle.

    Raises BadPickle for a class, persistent id or opcode that JAX does not write there, or for too many opcodes.
    """
    arrays = _count_arrays(signature)
    walk = PickleWalk({what: min(limit * arrays, MAX_OPCODES) for what, limit in LIMITS.items()})
    end = 0
    try:
        for opcode, argument, position in pickletools.genops(blob):
            walk.follow(opcode.name, argument)
            end = (position or 0) + 1
    except (ValueError, IndexError) as error:  # of genops
        raise BadPickle(f"not a pickle: {error}") from error
    if end != len(blob):
        raise BadPickle(f"the pickle ends after {end} of {len(blob)} bytes")
    return frozenset(walk.devices)


def _count_arrays(signature: Signature) -> int:
    """Returns the number of inputs and outputs."""
    inputs = len(signature.weights) + len(signature.state) + len(signature.arguments)
    return inputs + len(signature.donated) + len(signature.results)


@dataclass
class PickleWalk:
    """Follows the opcodes as far as it takes to know the operands of a class's name and of a persistent id.

    Attributes:
        limits: how many opcodes, memo entries and collections there may be.
        counts: how many there were so far.
        top: the values on top of the pickle's stack; what lies below them is not known.
        memo: the remembered values, UNKNOWN for all but constants and tuples of constants.
        devices: the device ids so far.
    """

    limits: dict[str, int]
    counts: Counter[str] = field(default_factory=Counter)
    top: list[Any] = field(default_factory=list)
    memo: list[Any] = field(default_factory=list)
    devices: set[int] = field(default_factory=set)

    def follow(self, opcode: str, argument: Any) -> None:
        """Follows one opcode. Raises BadPickle."""
        self._count("opcodes")
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "MEMOIZE":
                self._count("memo entries")
                self.memo.append(self.top[-1] if self.top else UNKNOWN)
            case "BINGET" | "LONG_BINGET":
                self.top.append(self.memo[argument] if argument < len(self.memo) else UNKNOWN)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._make_tuple(int(opcode[-1]))
            case "STACK_GLOBAL":
                self._check_class(self.top[-2:])
                self.top.clear()
            case "BINPERSID":
                self._check_persistent_id(self.top[-1:])
                self.top.clear()
            case _ if opcode in CONSTANTS:
                self.top.append(argument)
            case _ if opcode in COLLECTIONS:
                self._count("collections")
                self.top.clear()
            case _ if opcode in OTHERS:
                self.top.clear()
            case _:
                raise BadPickle(f"the pickle uses {opcode}, which JAX never writes")

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        if self.counts[what] > self.limits[what]:
            raise BadPickle(f"the pickle has more than {self.limits[what]} {what}")

    def _make_tuple(self, count: int) -> None:
        self._count("collections")
        items = tuple(self.top[-count:])
        del self.top[-count:]
        self.top.append(items if len(items) == count else UNKNOWN)

    def _check_class(self, operands: list[Any]) -> None:
        if [type(operand) for operand in operands] != [str, str]:
            raise BadPickle(
                "the pickle names a class by something other than the two texts before it"
            )
        module, name = operands
        if name not in CLASSES.get(module, ()):
            raise BadPickle(f"the pickle names {module}.{name}, which executables do not need")

    def _check_persistent_id(self, operands: list[Any]) -> None:
        identity = operands[0] if operands else UNKNOWN
        if type(identity) is not tuple or type(identity[0]) is not str:
            raise BadPickle("the pickle has a persistent id that JAX never writes")
        kind, *values = identity
        if PERSISTENT_IDS.get(kind) != [type(value) for value in values]:
            raise BadPickle(
                f"the pickle has the persistent id {kind}, or values with it, that JAX never writes"
            )
        if kind == "device":
            self.devices.update(values)
