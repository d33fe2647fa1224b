"""Lazy loader: executables by id, each loaded once, on demand or ahead of demand by a background thread."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from dflash_aot.cache.errors import CorruptBundle, DflashError
from dflash_aot.cache.signature import ExecutableId
from dflash_aot.runtime.executables.executable import Executable

logger = logging.getLogger(__name__)


class LazyLoader:
    """A mapping of executables. A look-up loads the executable, or waits for the thread that is loading it.

    Once started, a background thread loads the rest: first what was prefetched, then in `order`. While it is paused,
    it loads only prefetched executables and the first executables of `order`. An executable that cannot be loaded
    raises in each look-up of this executable only.

    Attributes:
        order: the ids of all executables, in the order in which the thread loads them.
    """

    def __init__(self, load: Callable[[ExecutableId], Executable], order: Sequence[ExecutableId], soon: int = 0):
        """load: returns an executable. A CorruptBundle is final; after another error the next look-up tries again.

        soon: how many of `order` are loaded although the thread is paused.
        """
        self.order = tuple(order)
        self._load, self._all = load, frozenset(order)
        self._loaded: dict[ExecutableId, Executable] = {}
        self._futures: dict[
            ExecutableId, Future[Executable]
        ] = {}  # of executables that are loading, loaded, or corrupt
        self._changed = threading.Condition()
        self._soon, self._ahead = deque(self.order[:soon]), deque(self.order)
        self._paused, self._closed = False, False
        self.has_ended = False  # whether the thread has nothing left to load
        self._on_loaded: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="dflash-loader", daemon=True)

    def __getitem__(self, name: ExecutableId) -> Executable:
        """Returns the executable, loading it if needed. Raises KeyError for an unknown id, and what `load` raises."""
        executable = self._loaded.get(name)
        return self._load_on_demand(name) if executable is None else executable

    def is_loaded(self, name: ExecutableId) -> bool:
        return name in self._loaded

    def list_loaded(self) -> list[Executable]:
        """The executables that are loaded so far."""
        return [*self._loaded.values()]

    def prefetch(self, names: Sequence[ExecutableId]) -> bool:
        """Lets the thread load these executables next. Returns whether all of them are loaded already."""
        if all(name in self._loaded for name in names):
            return True
        with self._changed:
            self._soon.extend(name for name in names if name not in self._futures and name not in self._soon)
            self._changed.notify_all()
        return False

    # -- the background thread

    def start(self) -> None:
        self._thread.start()

    def pause(self) -> None:
        """From now on the thread loads only what is needed soon."""
        self._paused = True

    def resume(self, on_loaded: Callable[[], None]) -> None:
        """Lets the thread load everything. `on_loaded` is called in the thread after each executable."""
        with self._changed:
            self._paused, self._on_loaded = False, on_loaded
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, after the executable that it is loading. Look-ups still work."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (name := self._wait_for_next()) is not None:
            try:
                self[name]
            except (DflashError, MemoryError) as error:
                logger.error(error)
            self._on_loaded()
        self.has_ended = True
        self._on_loaded()

    def _wait_for_next(self) -> ExecutableId | None:
        """Returns what the thread loads next; None once everything is loaded or the loader is closed."""
        with self._changed:
            while not self._closed:
                for pending in (self._soon, self._ahead):
                    while pending and pending[0] in self._futures:
                        pending.popleft()
                if self._soon:
                    return self._soon.popleft()
                if not self._ahead:
                    return None
                if not self._paused:
                    return self._ahead.popleft()
                self._changed.wait()
        return None

    # -- loading

    def _load_on_demand(self, name: ExecutableId) -> Executable:
        if name not in self._all:
            raise KeyError(name)
        with self._changed:
            future, mine = self._futures.get(name), name not in self._futures
            if future is None:
                future = self._futures[name] = Future()
        if mine:
            self._complete(future, name)
        if error := future.exception():
            # A new exception for each look-up: an exception that is raised again keeps the frames of all callers.
            raise type(error)(*error.args) from error
        return future.result()

    def _complete(self, future: "Future[Executable]", name: ExecutableId) -> None:
        try:
            executable = self._load(name)
        except BaseException as error:
            if not isinstance(error, CorruptBundle):
                del self._futures[name]
            future.set_exception(error)
        else:
            self._loaded[name] = executable
            future.set_result(executable)
