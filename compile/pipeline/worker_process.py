"""Worker process: compiles one executable for a described TPU.

    python -m dflash_aot.compile.pipeline.worker_process v5e:2x2 BUNDLE LOG

Sends the Environment, receives a CompileJob, sends a CompileResult (see `cache.json_process`). When its standard input
ends, it ends at once and removes its log; a log that stays explains a crash.

A process compiles one executable only: the compiler numbers what it makes, so earlier work would show in the bytes.
"""

import sys
import threading
from pathlib import Path

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
    jax_cache_disabled,
)


def main() -> None:
    topology, bundle, log = sys.argv[1:]
    pipe = JsonPipe()
    pipe.exit_with_input(lambda: Path(log).unlink(missing_ok=True))
    devices = describe_devices(parse_topology(topology))
    pipe.send(devices.environment)
    if job := pipe.receive(CompileJob):
        pipe.send(_build(devices, Store(Path(bundle)), job))
    threading.Event().wait()  # until standard input ends


def _build(devices: TargetDevices, store: Store, job: CompileJob) -> CompileResult:
    try:
        with jax_cache_disabled():
            if job.emulate:
                return emulate_executable(devices, job)
            return CompileResult(build_executable(devices, store, job))
    except Exception as error:
        return CompileResult(None, explain_failure(error))


if __name__ == "__main__":
    main()
