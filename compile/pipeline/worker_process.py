"""Worker process: compiles executables for a described TPU, each in a fork.

    python -m dflash_aot.compile.pipeline.worker_process v5e:2x2 BUNDLE LOG [emulate]

For each executable it sends the Environment, receives a CompileJob, sends a CompileResult (see `cache.json_process`).
When its standard input ends, it ends at once and removes its log; a log that stays explains a crash. With `emulate` it
also imports what emulated programs need.

A fork compiles one executable only: the compiler numbers what it makes, so earlier work would show in the bytes. The
process itself imports JAX once and starts no compiler, so that its forks do. As a fork crashes, the process ends.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.chips import parse_topology
from dflash_aot.cache.json_process import JsonPipe
from dflash_aot.compile.pipeline.build_target import TargetDevices, describe_devices
from dflash_aot.compile.pipeline.executable_builder import (
    CompileJob,
    CompileResult,
    build_executable,
    emulate_executable,
    explain_failure,
    pinned_compiler_settings,
)

ANSWERED = 64  # exit status of a fork that has sent its result


def main() -> None:
    topology, bundle, log, *emulates = sys.argv[1:]
    if emulates:
        import dflash_aot.compile.emulation.translation  # noqa: F401, PLC0415  each fork would import it
    pipe = JsonPipe()
    while True:
        fork = os.fork()
        if not fork:
            _answer_one_job(pipe, topology, Path(bundle), Path(log))
        _, status = os.waitpid(fork, 0)
        if os.waitstatus_to_exitcode(status) != ANSWERED:
            _end_as(os.waitstatus_to_exitcode(status))
        select.select([sys.stdin], [], [])  # until the next job comes, or standard input ends


def _answer_one_job(pipe: JsonPipe, topology: str, bundle: Path, log: Path) -> NoReturn:
    """Ends with status 0 where standard input does."""
    pipe.exit_with_input(lambda: log.unlink(missing_ok=True))
    devices = describe_devices(parse_topology(topology))
    pipe.send(devices.environment)
    if job := pipe.receive(CompileJob):
        pipe.send(_build(devices, Store(bundle), job))
    os._exit(ANSWERED)


def _end_as(code: int) -> NoReturn:
    """Ends this process by the signal that ended a fork (negative), or with its exit status."""
    if code < 0:
        with suppress(OSError):  # of SIGKILL, which has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _build(devices: TargetDevices, store: Store, job: CompileJob) -> CompileResult:
    try:
        with pinned_compiler_settings():
            if job.emulate:
                return emulate_executable(devices, job)
            return CompileResult(build_executable(devices, store, job))
    except Exception as error:
        return CompileResult(None, explain_failure(error))


if __name__ == "__main__":
    main()
