"""Executables by name, each loaded once: when somebody asks for it, or before, by a thread of its own."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from dflash_aot.cache.completeness import Name
from dflash_aot.cache.errors import CorruptBundle, DflashError
from dflash_aot.runtime.executable import Executable

logger = logging.getLogger(__name__)


class Loader:
    """Whoever asks for what is not loaded loads it himself, or waits for who is at it.

    Without a thread (`start`) nothing else is loaded. The thread loads what was `prepare`d, the first `soon` of
    `order`, and the rest of it while it may, see `resume` and `pause`. What cannot be loaded is told to everybody who
    asks for it, and to nobody else.
    """

    def __init__(self, load: Callable[[Name], Executable], order: Sequence[Name], soon: int = 0):
        """load: raises errors of ours. CorruptBundle is final; after any other one it is tried again."""
        self.order = tuple(order)
        self._load, self._known = load, frozenset(order)
        self._changed = threading.Condition()
        self._claims: dict[Name, Future[Executable]] = {}
        self._ahead = deque(self.order)
        self._soon = deque(self.order[:soon])
        self._resting, self._closed = False, False
        self._thread: threading.Thread | None = None
        self._tell: Callable[[], None] = lambda: None

    def __getitem__(self, name: Name) -> Executable:
        """Raises KeyError for what nobody has, CorruptBundle or what else loading it raises."""
        claim = self._claims.get(name)
        if claim is None or not claim.done():
            claim = self._claim(name)
        if error := claim.exception():
            # Anew, for an exception keeps the frames of all who have raised it.
            raise type(error)(*error.args) from error
        return claim.result()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Name]:
        return iter(self.order)

    @property
    def loaded(self) -> int:
        """How many are."""
        return sum(map(self.has, self.order))

    def has(self, name: Name) -> bool:
        """Whether it is loaded."""
        claim = self._claims.get(name)
        return claim is not None and claim.done() and claim.exception() is None

    def prepare(self, names: Sequence[Name]) -> bool:
        """Whether all of them are loaded. What is missing is loaded next."""
        missing = [name for name in names if name not in self._claims]
        if missing:
            with self._changed:
                self._soon.extend(name for name in missing if name not in self._soon)
                self._changed.notify_all()
        return not missing and all(map(self.has, names))

    # -- the thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="dflash-loader", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """From now on only what is needed soon."""
        self._resting = True

    def resume(self, tell: Callable[[], None]) -> None:
        """Everything, one after the other; `tell` is called behind each, in the loader's thread."""
        with self._changed:
            self._resting, self._tell = False, tell
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is loaded ahead; what is being loaded just now is waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join()

    def _work(self) -> None:
        while (name := self._next()) is not None:
            try:
                self[name]
            except DflashError as error:
                logger.error(error)
            self._tell()

    def _next(self) -> Name | None:
        """What to load now; None when there will be nothing more."""
        with self._changed:
            while not self._closed:
                for waiting in (self._soon, self._ahead):
                    while waiting and waiting[0] in self._claims:
                        waiting.popleft()
                if self._soon:
                    return self._soon.popleft()
                if not self._ahead:
                    return None
                if not self._resting:
                    return self._ahead.popleft()
                self._changed.wait()
        return None

    def _claim(self, name: Name) -> "Future[Executable]":
        """Loads it, unless somebody else does: then waits for that."""
        if name not in self._known:
            raise KeyError(name)
        with self._changed:
            claim, mine = self._claims.get(name), name not in self._claims
            if claim is None:
                claim = self._claims[name] = Future()
        if mine:
            self._fulfil(claim, name)
        return claim

    def _fulfil(self, claim: "Future[Executable]", name: Name) -> None:
        try:
            claim.set_result(self._load(name))
        except BaseException as error:
            if not isinstance(error, CorruptBundle):
                del self._claims[name]
            claim.set_exception(error)
