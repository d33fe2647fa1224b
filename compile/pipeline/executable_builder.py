"""One executable from its program to its place in the store: compiled, checked, kept."""

import time

import jax
import msgspec
from jax.experimental import serialize_executable

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import Entry, MemoryUse
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BuildFailed, DflashError
from dflash_aot.cache.key import compiler_options
from dflash_aot.cache.signature import ArraySpec, Signature
from dflash_aot.compile.analysis.inspection import inspect_executable, read_cost
from dflash_aot.compile.analysis.out_of_memory import explain_out_of_memory
from dflash_aot.compile.pipeline.build_target import Machine
from dflash_aot.compile.programs.lowering import check_donation, input_arrays, lower_program, output_arrays


class Order(msgspec.Struct, frozen=True):
    """What is to be compiled: a signature, the weights and state that it names, its StableHLO, and the key it gets."""

    signature: Signature
    known: dict[str, ArraySpec]
    program: bytes
    key: str


class Builder:
    """Compiles for one machine into one store."""

    def __init__(self, machine: Machine, store: Store):
        self._machine, self._store = machine, store

    def compile(self, order: Order) -> Entry:
        """Makes and publishes. Raises BuildFailed, or what the compiler raises."""
        entry, executable, program = make_executable(self._machine, order)
        self._store.add(entry, executable, program)
        return entry


def make_executable(machine: Machine, order: Order) -> tuple[Entry, bytes, bytes]:
    """Compiles, checks, serializes: an entry, and its two files, packed. Raises BuildFailed, or what the compiler does.

    JAX's own cache of executables is off from here on, in all threads.
    """
    # Nobody verifies what comes from there, and on CPU it cannot be serialized once more: it has lost functions.
    jax.config.update("jax_enable_compilation_cache", False)
    began = time.monotonic()
    lowered = lower_program(order.program, order.signature, order.known, machine.devices)
    compiled = lowered.compile(compiler_options=compiler_options(machine.environment))
    inspection = inspect_executable(
        compiled,
        [array.name for array in input_arrays(order.signature, order.known)],
        [array.name for array in output_arrays(order.signature, order.known)],
    )
    check_donation(order.signature, inspection.donated)
    serialized, _, _ = serialize_executable.serialize(compiled)  # the trees are the signature's: flat in, flat out
    blob, executable = pack_blob(serialized)
    program_blob, program = pack_blob(order.program)
    entry = Entry(
        **msgspec.structs.asdict(blob),
        signature=order.signature,
        key=order.key,
        program=program_blob,
        seconds=time.monotonic() - began,
        memory=_read_memory(compiled),
        cost=read_cost(compiled),
        analysis=inspection,
    )
    return entry, executable, program


def _read_memory(compiled: jax.stages.Compiled) -> MemoryUse:
    memory = compiled.memory_analysis()
    if memory is None:
        raise BuildFailed("the compiler does not tell what memory this takes")
    return MemoryUse(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
    )


def explain(error: BaseException) -> str:
    """Why an executable could not be built, in a line."""
    if exhausted := explain_out_of_memory(error):
        return exhausted
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, DflashError) else f"{type(error).__name__}: {line}"
