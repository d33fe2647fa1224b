"""Building for attached devices: in this process, for it holds them."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.compile.pipeline.build_target import Machine
from dflash_aot.compile.pipeline.executable_builder import Builder, Order


class Threads:
    """Up to `jobs` compilations at a time; each uses more than a core by itself."""

    def __init__(self, machine: Machine, store: Store, jobs: int):
        self.jobs, self.environment = jobs, machine.environment
        self._builder = Builder(machine, store)
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="compile")

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def start(self, order: Order) -> Future[Entry]:
        return self._pool.submit(self._builder.compile, order)
