"""Executables by name, each loaded once: when somebody asks for it, or before, by a thread of its own."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from dflash_aot.cache.errors import CorruptBundle, DflashError
from dflash_aot.cache.signature import ExecutableId
from dflash_aot.runtime.executables.executable import Executable

logger = logging.getLogger(__name__)


class LazyLoader:
    """Whoever asks for what is not loaded loads it, or waits for who is at it.

    Once started, a thread loads the rest: first what was `prepare`d, then in `order`; all of it, or after `pause` only
    what is needed soon. What cannot be loaded is told to everybody who asks for it, and to nobody else.
    """

    def __init__(self, load: Callable[[ExecutableId], Executable], order: Sequence[ExecutableId], soon: int = 0):
        """load: CorruptBundle from it is final; after any other error it is tried again when somebody asks.

        soon: how many of `order` are needed soon.
        """
        self.order = tuple(order)
        self._load, self._all = load, frozenset(order)
        self._loaded: dict[ExecutableId, Executable] = {}
        self._claims: dict[ExecutableId, Future[Executable]] = {}  # what somebody loads, has loaded, or found corrupt
        self._changed = threading.Condition()
        self._soon, self._ahead = deque(self.order[:soon]), deque(self.order)
        self._paused, self._closed = False, False
        self._tell: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._work, name="dflash-loader", daemon=True)

    def __getitem__(self, name: ExecutableId) -> Executable:
        """Raises KeyError for what is not in the order, and what loading it raises."""
        executable = self._loaded.get(name)
        return self._demand(name) if executable is None else executable

    def __contains__(self, name: ExecutableId) -> bool:
        """Whether it is loaded."""
        return name in self._loaded

    def __iter__(self) -> Iterator[Executable]:
        """What is loaded."""
        return iter([*self._loaded.values()])

    def __len__(self) -> int:
        """How many are loaded."""
        return len(self._loaded)

    def prepare(self, names: Sequence[ExecutableId]) -> bool:
        """Whether all of them are loaded. The thread loads next what nobody has begun with."""
        if all(name in self._loaded for name in names):
            return True
        with self._changed:
            self._soon.extend(name for name in names if name not in self._claims and name not in self._soon)
            self._changed.notify_all()
        return False

    # -- the thread

    def start(self) -> None:
        self._thread.start()

    def pause(self) -> None:
        """From now on only what is needed soon."""
        self._paused = True

    def resume(self, tell: Callable[[], None]) -> None:
        """`tell` is called in the thread behind everything that it has loaded."""
        with self._changed:
            self._paused, self._tell = False, tell
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread; what it is just loading is waited for. Who asks is served as before."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        while (name := self._next()) is not None:
            try:
                self[name]
            except DflashError as error:
                logger.error(error)
            self._tell()

    def _next(self) -> ExecutableId | None:
        """What to load now; None once that is nothing for ever."""
        with self._changed:
            while not self._closed:
                for line in (self._soon, self._ahead):
                    while line and line[0] in self._claims:
                        line.popleft()
                if self._soon:
                    return self._soon.popleft()
                if not self._ahead:
                    return None
                if not self._paused:
                    return self._ahead.popleft()
                self._changed.wait()
        return None

    # -- loading

    def _demand(self, name: ExecutableId) -> Executable:
        if name not in self._all:
            raise KeyError(name)
        with self._changed:
            claim, mine = self._claims.get(name), name not in self._claims
            if claim is None:
                claim = self._claims[name] = Future()
        if mine:
            self._fulfil(claim, name)
        if error := claim.exception():
            # A new one, for an exception keeps the frames of all who raise it.
            raise type(error)(*error.args) from error
        return claim.result()

    def _fulfil(self, claim: "Future[Executable]", name: ExecutableId) -> None:
        try:
            executable = self._load(name)
        except BaseException as error:
            if not isinstance(error, CorruptBundle):
                del self._claims[name]
            claim.set_exception(error)
        else:
            self._loaded[name] = executable
            claim.set_result(executable)
