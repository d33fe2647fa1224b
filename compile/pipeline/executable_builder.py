"""Executable builder: compiles one program, checks the executable and serializes it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import msgspec
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.bundle.blob import find_excess, pack_blob
from dflash_aot.cache.bundle.manifest import Entry, MemoryUse
from dflash_aot.cache.bundle.pickle_scan import scan_pickle
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.devices import ignore_jax_switches
from dflash_aot.cache.errors import BuildFailed, CorruptBundle, DflashError
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.analysis.hlo import parse_module
from dflash_aot.compile.analysis.inspection import explain_out_of_memory, inspect_module, read_cost
from dflash_aot.compile.pipeline.build_target import TargetDevices, find_chip
from dflash_aot.compile.programs.lowering import (
    check_donation,
    input_arrays,
    lower_program,
    output_arrays,
)


class CompileJob(msgspec.Struct, frozen=True):
    """One executable to compile; also a message to worker processes.

    Attributes:
        signature: its inputs and outputs.
        known: the weights and state that the signature names, by name.
        program: portable StableHLO.
        key: the executable's key.
        options: what the compiler gets in addition to the program.
        emulate: answer with the emulated program, and store nothing.
    """

    signature: Signature
    known: dict[str, ArraySpec]
    program: bytes
    key: str
    options: dict[str, str]
    emulate: bool = False


class CompileResult(msgspec.Struct, frozen=True):
    """A worker process's answer to a CompileJob.

    Attributes:
        entry: the executable's entry; None where it could not be built.
        failure: why it could not.
        emulated: for `CompileJob.emulate`, a program for CPUs that computes what the executable computes.
    """

    entry: Entry | None
    failure: str = ""
    emulated: bytes = b""


class CompiledExecutable(NamedTuple):
    """An executable in this process.

    Attributes:
        entry: its entry.
        executable: the packed executable.
        program: the packed program.
        compiled: as JAX has it.
    """

    entry: Entry
    executable: bytes
    program: bytes
    compiled: jax.stages.Compiled


def build_executable(devices: TargetDevices, store: Store, job: CompileJob) -> Entry:
    """Compiles an executable and adds it to the store. Raises BuildFailed, or what the compiler raises."""
    built = compile_executable(devices, job)
    store.add(built.entry, built.executable, built.program)
    return built.entry


@ignore_jax_switches()
def emulate_executable(devices: TargetDevices, job: CompileJob) -> CompileResult:
    """Compiles an executable and makes its optimized program portable. Raises as `build_executable` does."""
    # Imports Pallas and flax, which other compiler processes do not need.
    from dflash_aot.compile.emulation.portable_hlo import print_optimized_program  # noqa: PLC0415
    from dflash_aot.compile.emulation.translation import make_portable_program  # noqa: PLC0415

    built = compile_executable(devices, job)
    text = print_optimized_program(built.compiled)
    emulated = make_portable_program(
        text, job.signature, job.known, devices.environment.device_count
    )
    return CompileResult(built.entry, emulated=emulated)


@ignore_jax_switches()
def compile_executable(devices: TargetDevices, job: CompileJob) -> CompiledExecutable:
    """Compiles, checks and serializes; call it inside `pinned_compiler_settings`.

    Raises BuildFailed, or what the compiler raises.
    """
    began = time.monotonic()
    lowered = lower_program(job.program, job.signature, job.known, devices.devices)
    compiled = lowered.compile(compiler_options={**job.options})
    module = parse_module(compiled.as_text() or "")
    inspection = inspect_module(
        module,
        [array.name for array in input_arrays(job.signature, job.known)],
        [array.name for array in output_arrays(job.signature, job.known)],
    )
    check_donation(job.signature, inspection.donated)
    # the trees are the signature's: flat in, flat out
    serialized, _, _ = serialize_executable.serialize(compiled)
    _check_pickle(serialized, job.signature)
    blob, executable = pack_blob(serialized)
    program_blob, program = pack_blob(job.program)
    entry = Entry(
        **msgspec.structs.asdict(blob),
        signature=job.signature,
        key=job.key,
        program=program_blob,
        seconds=time.monotonic() - began,
        memory=_read_memory(compiled),
        cost=read_cost(compiled, module, find_chip(devices)),
        compiler_options=job.options,
        analysis=inspection,
    )
    for kind, one in (("executable", entry), ("program", program_blob)):
        if excess := find_excess(one):
            raise BuildFailed(
                f"the {kind} {excess}: no engine would load it. Build a grid with smaller sizes or fewer rounds"
            )
    return CompiledExecutable(entry, executable, program, compiled)


def _check_pickle(serialized: bytes, signature: Signature) -> None:
    """Raises BuildFailed for an executable that would not be loaded."""
    try:
        scan_pickle(serialized, signature)
    except CorruptBundle as error:
        raise BuildFailed(
            f"JAX {jax.__version__} serialized the executable in a way that loading would refuse: {error}. This is a "
            "defect of dflash-aot, or it was not tested with this version of JAX"
        ) from error


# Settings of JAX that change what the compiler makes of a program, with the values for all executables: JAX's defaults,
# except the first. They are not in the keys, and the process or a variable like JAX_OPTIMIZATION_LEVEL may have set
# others. An executable of JAX's own cache would be unverified, and on a CPU it cannot be serialized again.
COMPILER_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "jax_enable_compilation_cache": False,
        "jax_compilation_cache_expect_pgle": False,
        "jax_compiler_enable_remat_pass": True,
        "jax_disable_most_optimizations": False,
        "jax_enable_pgle": False,
        "jax_exec_time_optimization_effort": 0.0,  # only JAX 0.10 has this setting
        "jax_memory_fitting_effort": 0.0,  # as above
        "jax_memory_fitting_level": "O2",
        "jax_optimization_level": "UNKNOWN",
        "jax_use_shardy_partitioner": True,
        "jax_xla_profile_version": 0,
    }
)


@contextmanager
def pinned_compiler_settings() -> Iterator[None]:
    """Inside, JAX compiles with COMPILER_SETTINGS, in all threads."""
    before = {
        name: jax.config.values[name] for name in COMPILER_SETTINGS.keys() & jax.config.values
    }
    _configure_jax({name: COMPILER_SETTINGS[name] for name in before})
    try:
        yield
    finally:
        _configure_jax(before)


def _configure_jax(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads its setting at the first compilation only


def _read_memory(compiled: jax.stages.Compiled) -> MemoryUse:
    memory = compiled.memory_analysis()
    if memory is None:
        raise BuildFailed("the compiler does not report the memory that this executable takes")
    return MemoryUse(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
    )


def explain_failure(error: BaseException) -> str:
    """Why an executable could not be built, in one line."""
    if exhausted := explain_out_of_memory(error):
        return exhausted
    line = quote_first_line(str(error))
    return line if isinstance(error, DflashError) else f"{type(error).__name__}: {line}"
