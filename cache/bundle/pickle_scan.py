"""Pickle scan: a serialized executable is a pickle, and is loaded only if it calls what JAX's own pickles call.

`executable_pickles/<JAX version>.json` lists the calls of real executables with the shapes of their arguments (see
`pickle_shapes`). tests/compile/test_executable_pickles.py observes and compares them.
"""

import functools
import importlib.metadata
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.cache.bundle.pickle_machine import BadPickle, PickleMachine, PickleSize, Value
from dflash_aot.cache.bundle.pickle_shapes import Compared, Shape, parse_shape
from dflash_aot.cache.errors import IncompatibleBundle
from dflash_aot.cache.signature import Signature

TABLES = Path(__file__).parent / "executable_pickles"
MARGIN = 4  # how much larger a pickle may be than those that were observed
MAX_OPCODES = 1 << 18  # ten times those of the largest supported model


@dataclass(frozen=True)
class PickleTable:
    """What the pickles of one JAX version contain.

    jax: the version.
    size: the largest observed opcodes, memo entries and collections, for each array of a signature.
    calls: the shape of the arguments of each call, and of the "result".
    """

    jax: str
    size: PickleSize
    calls: Mapping[str, Shape]

    def limit(self, arrays: int) -> PickleSize:
        """Returns the largest accepted size for a signature with this number of inputs and outputs."""
        times = MARGIN * arrays
        return PickleSize(min(times * self.size.opcodes, MAX_OPCODES), times * self.size.memo, times * self.size.items)


@functools.cache
def list_versions() -> tuple[str, ...]:
    """Returns the JAX versions that have a table, the installed one first."""
    versions = sorted(path.name.removesuffix(".json") for path in TABLES.glob("*.json"))
    return tuple(sorted(versions, key=lambda version: version != importlib.metadata.version("jax")))


@functools.cache
def find_table(jax_version: str) -> PickleTable:
    """Returns the table of a JAX version. Raises IncompatibleBundle for a version without one."""
    if jax_version not in list_versions():
        supported = " or ".join(sorted(list_versions()))
        raise IncompatibleBundle(
            f"JAX {jax_version} is installed, but executables are built and loaded with JAX {supported} only, because "
            "it is not known what other versions write. Install one of these versions"
        )
    content = json.loads((TABLES / f"{jax_version}.json").read_text())
    calls = {call: parse_shape(shape) for call, shape in content["calls"].items()}
    return PickleTable(jax_version, PickleSize(**content["size"]), calls)


def scan_pickle(blob: bytes, signature: Signature, table: PickleTable) -> frozenset[int]:
    """Follows the opcodes of a pickle without executing them; returns the device ids of the executable.

    signature: of the executable; the number of its arrays limits the size of the pickle.

    Raises BadPickle for an opcode, call, shape of arguments or size that the table does not have.
    """
    accepted: Compared = {}
    devices: set[int] = set()

    def check_call(call: str, arguments: Value) -> None:
        if (shape := table.calls.get(call)) is None or not shape.accepts(arguments, accepted):
            raise _refuse(call, shape is not None, table.jax)
        if call == "BINPERSID device":
            devices.add(arguments[0])
        elif call == "BUILD numpy._core.multiarray._reconstruct":
            _check_array(arguments[1])

    limit = table.limit(count_arrays(signature))
    check_call("result", PickleMachine(check_call, limit).follow(blob))
    return frozenset(devices)


def scan_stored_pickle(blob: bytes, signature: Signature) -> None:
    """Scans a pickle that is not loaded here: it may be of any supported JAX version. Raises BadPickle."""
    refusals = []
    for version in list_versions():
        try:
            scan_pickle(blob, signature, find_table(version))
            return
        except BadPickle as error:
            refusals.append(error)
    raise refusals[0]


def count_arrays(signature: Signature) -> int:
    """Returns the number of inputs and outputs."""
    inputs = len(signature.weights) + len(signature.state) + len(signature.arguments)
    return inputs + len(signature.donated) + len(signature.results)


def _refuse(call: str, known: bool, jax_version: str) -> BadPickle:
    operation, _, name = call.partition(" ")
    if operation == "STACK_GLOBAL":
        return BadPickle(f"the pickle names {name}, which executables do not need")
    what = "with such arguments" if known else "for an executable"
    return BadPickle(f"the pickle has {call}, which JAX {jax_version} never writes {what}")


def _check_array(state: tuple[Value, ...]) -> None:
    """Checks that an array has as many items as its shape says: numpy takes so many without looking."""
    _, shape, _, _, items = state
    if math.prod(shape) != len(items.values):
        raise BadPickle(f"the pickle has an array of shape {shape} with {len(items.values)} items")
