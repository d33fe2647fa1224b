"""Requests that have no slot yet: a bounded line, ordered by priority, then by arrival."""

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from dflash_aot.cache.errors import EngineFailed, QueueFull
from dflash_aot.runtime.requests.request import Request

Place = Future[None]  # done once its request stands in line


class RequestQueue:
    """Callers join it from any thread; one thread, the engine's, takes from it.

    No request is forgotten: each that joined is taken, dropped because it ended, or handed back by `shut` at the end.
    """

    def __init__(self, limit: int):
        """`limit`: how many may stand in it; those who wait for a place are not in it yet."""
        self.limit = limit
        self.refused = 0
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._line: list[tuple[int, int, Request]] = []  # a heap by priority and number
        self._outside: deque[tuple[Request, Place]] = deque()
        self._deadline = math.inf  # the earliest in line, or one that has left it
        self._cancels, self._woken = False, False
        self._closed: str | None = None

    def __len__(self) -> int:
        return len(self._line)

    # -- callers

    def join(self, request: Request) -> None:
        """Raises QueueFull at once where there is no place, EngineFailed where none will ever be."""
        with self._changed:
            self._check_open()
            if len(self._line) >= self.limit:
                self.refused += 1
                raise QueueFull(
                    f"{len(self._line)} requests are waiting, and no more than {self.limit} may. Try again later, "
                    "wait for a place (wait=True or seconds), or open the engine with a larger max_waiting"
                )
            self._append(request)

    def ask(self, request: Request) -> Place:
        """Like `join`, but where the line is full the request stands outside, first come first served."""
        place = Place()
        with self._changed:
            self._check_open()
            if len(self._line) < self.limit and not self._outside:
                self._append(request)
                place.set_result(None)
            else:
                self._outside.append((request, place))
        return place

    def withdraw(self, request: Request, in_vain: bool = False) -> None:
        """Whoever asked for it waits no longer; if it has got a place meanwhile, it is cancelled there.

        in_vain: no place came in time, which counts as refused.
        """
        with self._changed:
            request.cancel()
            self._outside = deque(one for one in self._outside if one[0] is not request)
            self.refused += in_vain

    def note_cancel(self) -> None:
        """One of the requests was cancelled. Takes no lock: a signal handler may say so."""
        self._cancels = True

    def wake(self) -> None:
        """Whoever waits there for somebody has something else to do."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    # -- the engine's thread

    def wait(self) -> None:
        """Until somebody stands in line, it is shut, or it was woken meanwhile or before."""
        with self._changed:
            while not self._line and self._closed is None and not self._woken:
                self._changed.wait()
            self._woken = False

    def take(self) -> Request | None:
        """The next one, whose place goes to the first outside."""
        with self._changed:
            if not self._line:
                return None
            _, _, request = heapq.heappop(self._line)
            self._let_in()
            return request

    def drop_ended(self, now: float) -> list[tuple[Request, str]]:
        """Those whose caller left or whose deadline has passed, with the reason; looked for only if there may be."""
        if not self._cancels and now < self._deadline:
            return []
        with self._changed:
            self._cancels = False
            ends = [(entry, entry[2].find_end(now)) for entry in self._line]
            self._line = [entry for entry, why in ends if why is None]
            heapq.heapify(self._line)
            deadlines = (entry[2].deadline for entry in self._line)
            self._deadline = min((one for one in deadlines if one is not None), default=math.inf)
            self._let_in()
        return [(entry[2], why) for entry, why in ends if why is not None]

    # -- the end

    @property
    def closed(self) -> str | None:
        """Why nobody joins any more; None while somebody may."""
        return self._closed

    def close(self, why: str) -> None:
        """Nobody joins any more; who is in line stays there."""
        with self._changed:
            self._closed = self._closed or why
            outside, self._outside = self._outside, deque()
            self._changed.notify_all()
        for request, place in outside:
            request.cancel()
            if place.set_running_or_notify_cancel():
                place.set_exception(self._refusal())

    def empty(self) -> Iterator[Request]:
        """Everybody who is left."""
        with self._changed:
            left, self._line = self._line, []
        return (request for _, _, request in sorted(left, key=lambda entry: entry[:2]))

    def _append(self, request: Request) -> None:
        heapq.heappush(self._line, (request.priority, next(self._numbers), request))
        if request.cancelled:  # while it stood outside
            self._cancels = True
        if request.deadline is not None:
            self._deadline = min(self._deadline, request.deadline)
        self._changed.notify()

    def _let_in(self) -> None:
        while self._outside and len(self._line) < self.limit:
            request, place = self._outside.popleft()
            if place.set_running_or_notify_cancel():
                self._append(request)
                place.set_result(None)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._refusal()

    def _refusal(self) -> EngineFailed:
        return EngineFailed(f"no request is taken any more: {self._closed}")
