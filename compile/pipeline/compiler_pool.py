"""Compiler pools: where executables are compiled. In this process, in worker processes, or on a Ray cluster."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Protocol

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.topology import Topology
from dflash_aot.compile.pipeline.build_target import BuildTarget, TargetDevices
from dflash_aot.compile.pipeline.executable_builder import CompileJob, build_executable, jax_cache_disabled
from dflash_aot.compile.pipeline.observer import BuildObserver
from dflash_aot.compile.pipeline.ray_pool import open_ray_pool
from dflash_aot.compile.pipeline.worker_pool import WorkerPool

ATTACHED_JOBS = 2  # each compilation for an attached device has threads of its own
MAX_WORKERS = 8


class CompilerPool(Protocol):
    """Compiles executables and adds them to a store.

    Attributes:
        jobs: the number of executables compiled at a time.
        environment: what executables for the build target depend on.
    """

    jobs: int
    environment: Environment

    def start(self, job: CompileJob) -> Future[Entry]: ...


class InProcessPool:
    """For attached devices: compiles in threads of this process, which holds the devices."""

    def __init__(self, devices: TargetDevices, store: Store, jobs: int):
        self.jobs, self.environment = jobs, devices.environment
        self._devices, self._store = devices, store
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="compile")
        self._settings = ExitStack()

    def __enter__(self) -> "InProcessPool":
        self._settings.enter_context(jax_cache_disabled())
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._settings.close()

    def start(self, job: CompileJob) -> Future[Entry]:
        return self._threads.submit(build_executable, self._devices, self._store, job)


def choose_jobs(target: BuildTarget, jobs: int | None) -> int:
    """The number of executables compiled at a time; `jobs` if given.

    A worker process for a TPU starts on one core and compiles on 1.6: on two cores, two at a time took 105 s for what
    one at a time took 142 s for (Qwen3-4B, 43 executables).
    """
    if jobs or isinstance(target, TargetDevices):
        return jobs or ATTACHED_JOBS
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def check_ray_target(target: BuildTarget) -> None:
    """Raises BadInput for devices that only the process that holds them can compile for."""
    if isinstance(target, TargetDevices) and target.environment.platform != "cpu":
        raise BadInput(
            f"--executor ray: a {target.environment.device_kind} is attached, and compiling for it needs the device "
            "itself. Build here with --executor local, or where none is attached with --topology or --platform cpu"
        )


def open_compiler_pool(
    target: BuildTarget, store: Store, jobs: int | None, ray_address: str | None, observer: BuildObserver
) -> AbstractContextManager[CompilerPool]:
    """The pool for a build target: on the Ray cluster at `ray_address`, or on this machine if None."""
    if ray_address is not None:
        return _open_ray_pool(target, store, jobs, ray_address, observer)
    count = choose_jobs(target, jobs)
    if isinstance(target, Topology):
        return WorkerPool(target, store.bundle, count)
    return InProcessPool(target, store, count)


@contextmanager
def _open_ray_pool(
    target: BuildTarget, store: Store, jobs: int | None, address: str, observer: BuildObserver
) -> Iterator[CompilerPool]:
    with open_ray_pool(target, store, jobs, address) as pool:
        observer.on_info(pool.location)
        yield pool
