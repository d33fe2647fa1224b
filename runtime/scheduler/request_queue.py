"""The request queue: requests that wait for a slot, bounded, ordered by priority and then by arrival."""

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from dflash_aot.cache.errors import EngineFailed, QueueFull
from dflash_aot.runtime.requests.request import Request

QueuePlace = Future[None]  # done once its request is in the queue


class RequestQueue:
    """A bounded priority queue. Callers put requests in from any thread; the engine's thread takes them out.

    No request is forgotten: each request that was put in is taken, dropped because it ended, or returned by `drain`.
    A caller may also wait for a place while the queue is full: such a request is in the overflow, not in the queue.
    """

    def __init__(self, limit: int):
        """limit: requests that may be in the queue; those in the overflow are not counted."""
        self.limit = limit
        self.refused = 0
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._heap: list[tuple[int, int, Request]] = []  # by priority, then by number
        self._overflow: deque[tuple[Request, QueuePlace]] = deque()
        self._earliest_deadline = math.inf  # of the queue, or of a request that has left it
        self._has_cancelled = False
        self._is_woken = False
        self._closed: str | None = None

    def __len__(self) -> int:
        return len(self._heap)

    # -- callers

    def put(self, request: Request) -> None:
        """Adds a request. Raises QueueFull where the queue is full, EngineFailed where it is closed."""
        with self._changed:
            self._check_open()
            if len(self._heap) >= self.limit:
                self.refused += 1
                raise QueueFull(
                    f"the request queue is full: {len(self._heap)} of {self.limit} requests are waiting (max_waiting). "
                    "Try again later, wait for a place (wait=True or seconds), or open the engine with a larger "
                    "max_waiting"
                )
            self._push(request)

    def put_when_free(self, request: Request) -> QueuePlace:
        """Like `put`, but waits in the overflow where the queue is full, first come first served."""
        place = QueuePlace()
        with self._changed:
            self._check_open()
            if len(self._heap) < self.limit and not self._overflow:
                self._push(request)
                place.set_result(None)
            else:
                self._overflow.append((request, place))
        return place

    def withdraw(self, request: Request, timed_out: bool = False) -> None:
        """Cancels a request whose caller stopped waiting for a place, in the overflow or already in the queue.

        timed_out: no place came free in time, which counts as refused.
        """
        with self._changed:
            request.cancel()
            self._overflow = deque(one for one in self._overflow if one[0] is not request)
            self.refused += timed_out

    def note_cancel(self) -> None:
        """A request was cancelled: `drop_ended` looks for it. Takes no lock, so a signal handler may call this."""
        self._has_cancelled = True

    def wake(self) -> None:
        """Ends the engine thread's current or next `wait`."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    # -- the engine's thread

    def wait(self) -> None:
        """Blocks until a request is in the queue, the queue is closed, or `wake` was called."""
        with self._changed:
            while not self._heap and self._closed is None and not self._is_woken:
                self._changed.wait()
            self._is_woken = False

    def peek(self) -> Request | None:
        """The next request, which stays in the queue; None where the queue is empty."""
        # Without the lock: a request that comes just now is seen at the next step.
        if not self._heap:
            return None
        with self._changed:
            return self._heap[0][2] if self._heap else None

    def take(self, request: Request | None = None) -> Request | None:
        """Removes and returns the next request, None if there is none. The overflow's first request gets its place.

        request: from `peek`. It is removed even if a caller has meanwhile put in a request that comes before it.
        """
        with self._changed:
            if not self._heap:
                return None
            if request is None or self._heap[0][2] is request:
                request = heapq.heappop(self._heap)[2]
            else:
                self._heap = [entry for entry in self._heap if entry[2] is not request]
                heapq.heapify(self._heap)
            self._fill_from_overflow()
            return request

    def put_back(self, request: Request) -> None:
        """Puts a request that was taken back to its old place, even where the queue is full or closed."""
        with self._changed:
            self._push(request)

    def drop_ended(self, now: float) -> list[tuple[Request, str]]:
        """Removes cancelled requests and those whose deadline has passed; returns each with the reason."""
        if not self._has_cancelled and now < self._earliest_deadline:
            return []
        with self._changed:
            self._has_cancelled = False
            ends = [(entry, entry[2].find_end(now)) for entry in self._heap]
            self._heap = [entry for entry, reason in ends if reason is None]
            heapq.heapify(self._heap)
            deadlines = (entry[2].deadline for entry in self._heap)
            self._earliest_deadline = min(
                (one for one in deadlines if one is not None), default=math.inf
            )
            self._fill_from_overflow()
        return [(entry[2], reason) for entry, reason in ends if reason is not None]

    # -- the end

    @property
    def closed(self) -> str | None:
        """Why requests are refused; None while the queue is open."""
        return self._closed

    def close(self, reason: str) -> None:
        """Refuses further requests and those in the overflow; requests in the queue stay there."""
        with self._changed:
            self._closed = self._closed or reason
            overflow = self._overflow
            self._overflow = deque()
            self._changed.notify_all()
        for request, place in overflow:
            request.cancel()
            if place.set_running_or_notify_cancel():
                place.set_exception(self._refusal())

    def drain(self) -> Iterator[Request]:
        """Takes out every request, in order."""
        with self._changed:
            entries = self._heap
            self._heap = []
        return (request for _, _, request in sorted(entries, key=lambda entry: entry[:2]))

    def _push(self, request: Request) -> None:
        if request.progress.arrival is None:
            request.progress.arrival = next(self._numbers)
        heapq.heappush(self._heap, (request.priority, request.progress.arrival, request))
        if request.progress.cancelled:  # while it was in the overflow
            self._has_cancelled = True
        if request.deadline is not None:
            self._earliest_deadline = min(self._earliest_deadline, request.deadline)
        self._changed.notify()

    def _fill_from_overflow(self) -> None:
        while self._overflow and len(self._heap) < self.limit:
            request, place = self._overflow.popleft()
            if place.set_running_or_notify_cancel():
                self._push(request)
                place.set_result(None)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._refusal()

    def _refusal(self) -> EngineFailed:
        return EngineFailed(f"the engine accepts no more requests: {self._closed}")
