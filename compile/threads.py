"""Building for attached devices: in this process, for it holds them."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from dflash_aot.cache.signature import Signature
from dflash_aot.compile.builder import Builder, Built


class Threads:
    """Lowers in the caller's thread, for tracing holds the interpreter, and compiles in `jobs` others."""

    def __init__(self, builder: Builder, jobs: int):
        self.jobs, self._builder = jobs, builder
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="compile")

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def start(self, signature: Signature) -> Future[Built]:
        """Never raises: what goes wrong is the future's."""
        found: Future[Built] = Future()
        try:
            lowered, key = self._builder.lower(signature)
            if not (built := self._builder.find(key)):
                return self._pool.submit(self._builder.compile, signature, lowered, key)
            found.set_result(built)
        except Exception as error:
            found.set_exception(error)
        return found
