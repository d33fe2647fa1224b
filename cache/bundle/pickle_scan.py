"""Pickle scan: a serialized executable is a pickle, and is loaded only if it names nothing but JAX's own classes."""

import pickletools
from typing import Any

from dflash_aot.cache.errors import CorruptBundle

# All names that jax.experimental.serialize_executable writes in the supported versions.
ALLOWED = frozenset(
    {
        ("jax", "P"),
        ("jax._src.core", "ManualAxisType"),
        ("jax._src.core", "MemorySpace"),
        ("jax._src.core", "ShapedArray"),
        ("jax._src.interpreters.pxla", "AllArgsInfo"),
        ("jax._src.interpreters.pxla", "UnloadedMeshExecutable"),
        ("jax._src.layout", "Layout"),
        ("jax._src.linear_util", "DebugInfo"),
        ("jax._src.mesh", "AbstractDevice"),
        ("jax._src.mesh", "AbstractMesh"),
        ("jax._src.mesh", "AxisType"),
        ("jax._src.mesh", "Mesh"),
        ("jax._src.named_sharding", "_unpickle_named_sharding"),
        ("jax._src.sharding_impls", "_unpickle_single_device_sharding"),
        ("jax._src.stages", "ArgInfo"),
        ("jaxlib._jax", "DeviceList"),
        ("ml_dtypes", "bfloat16"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),  # for the device array of a mesh
    }
)
TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
RECALLS = {"BINGET", "LONG_BINGET", "GET"}
STORES = {"BINPUT", "LONG_BINPUT", "PUT"}
# Other opcodes that name a class; pickle protocol 4, which JAX writes, uses none of them.
FOREIGN = {"GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"}
NUMBERS = {"BININT", "BININT1", "BININT2"}


def scan_pickle(blob: bytes) -> frozenset[int]:
    """Reads the opcodes of a pickle without executing them; returns the device ids of the executable.

    STACK_GLOBAL names a class by the two texts right before it, which are literal or from the memo. A pickle in which
    these texts are not certain is refused. JAX writes each device as the persistent id ("device", id). Raises
    CorruptBundle for a name outside ALLOWED.
    """
    memo: dict[int, str | None] = {}
    texts: list[str | None] = []
    number, devices = None, set()
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(blob):
            if opcode.name in NUMBERS:
                number = argument
            elif opcode.name == "BINPERSID" and number is not None:
                devices.add(number)
            elif opcode.name not in ("TUPLE2", "MEMOIZE"):
                number = None
            if opcode.name in TEXTS:
                texts.append(argument)
            elif opcode.name in RECALLS:
                texts.append(memo.get(argument))
            elif opcode.name == "MEMOIZE":
                memo[len(memo)] = texts[-1] if texts else None
            elif opcode.name in STORES:
                memo[argument] = texts[-1] if texts else None
            elif opcode.name in FOREIGN:
                raise CorruptBundle(f"the pickle uses {opcode.name}, which JAX never writes. It was not loaded")
            elif opcode.name != "FRAME":  # a frame may start between the two texts, without effect
                if opcode.name == "STACK_GLOBAL" and (name := tuple(texts[-2:])) not in ALLOWED:
                    raise CorruptBundle(
                        f"the pickle names {_dotted(name)}, which executables do not need. It was not loaded"
                    )
                texts = []
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise CorruptBundle(f"not a pickle: {error}") from error
    return frozenset(devices)


def _dotted(name: tuple[str | None, ...]) -> str:
    return ".".join(part or "something hidden" for part in name) or "something hidden"
