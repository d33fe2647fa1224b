"""One executable from its signature to its place in the store: lowered, looked for, compiled, checked, kept."""

import hashlib
import time

import jax
import msgspec
from jax.experimental import serialize_executable

from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.manifest import Entry, Memory
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.store import Store, pack
from dflash_aot.compile.exhaustion import explain_exhaustion
from dflash_aot.compile.inspection import inspect, read_cost
from dflash_aot.compile.lowering import (
    check_donation,
    compiler_options,
    executable_key,
    input_arrays,
    lower,
    output_arrays,
)
from dflash_aot.compile.machine import Machine
from dflash_aot.compile.programs import Programs


class Built(msgspec.Struct, frozen=True):
    """An executable in the store, and whether it had to be compiled for it."""

    entry: Entry
    compiled: bool


class Builder:
    """Builds the executables of one grid for one machine into one store."""

    def __init__(self, programs: Programs, grid: Grid, machine: Machine, store: Store):
        self._programs, self._machine, self._store = programs, machine, store
        self._known = programs.known_arrays(grid)

    def lower(self, signature: Signature) -> tuple[jax.stages.Lowered, str]:
        """The program as StableHLO, and the key of its executable."""
        lowered = lower(signature, self._programs.function(signature), self._known, self._machine.devices)
        return lowered, executable_key(lowered, signature, self._machine.environment)

    def find(self, key: str) -> Built | None:
        """What an earlier build left."""
        entry = self._store.find(key)
        return Built(entry, compiled=False) if entry else None

    def compile(self, signature: Signature, lowered: jax.stages.Lowered, key: str) -> Built:
        """Compiles, checks, serializes and publishes. Raises BuildFailed, or what the compiler raises."""
        began = time.monotonic()
        compiled = lowered.compile(compiler_options=compiler_options(self._machine.environment))
        memory = compiled.memory_analysis()
        if memory is None:
            raise BuildFailed("the compiler does not tell what memory this takes")
        inspection = inspect(
            compiled,
            [array.name for array in input_arrays(signature, self._known)],
            [array.name for array in output_arrays(signature, self._known)],
        )
        check_donation(signature, inspection.donated)
        serialized, _, _ = serialize_executable.serialize(compiled)  # the trees are the signature's: flat in, flat out
        blob = pack(serialized)
        entry = Entry(
            signature=signature,
            key=key,
            sha256=hashlib.sha256(blob).hexdigest(),
            bytes=len(blob),
            serialized_bytes=len(serialized),
            seconds=time.monotonic() - began,
            memory=Memory(
                arguments=memory.argument_size_in_bytes,
                outputs=memory.output_size_in_bytes,
                aliased=memory.alias_size_in_bytes,
                temporaries=memory.temp_size_in_bytes,
                code=memory.generated_code_size_in_bytes,
            ),
            cost=read_cost(compiled),
            inspection=inspection,
        )
        self._store.add(entry, blob)
        return Built(entry, compiled=True)


def explain(error: BaseException) -> str:
    """Why an executable could not be built, in a line."""
    if exhausted := explain_exhaustion(error):
        return exhausted
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, BuildFailed) else f"{type(error).__name__}: {line}"
