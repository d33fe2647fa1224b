"""The request queue: order, bound, and no request lost, with one thread and with many."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_aot.cache.errors import EngineFailed, QueueFull
from dflash_aot.runtime.requests.request import Request, RequestProgress
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.request_queue import RequestQueue

LONG = 120.0  # seconds: longer than anything that does not hang


def request(
    line: RequestQueue | None = None, priority: int = 0, deadline: float | None = None, name: int = 0
) -> Request:
    progress = RequestProgress(on_cancel=(lambda: None) if line is None else line.note_cancel)
    one = Request([name], SamplingParams(), 1, frozenset(), None, print, 0.0, priority, deadline)
    one.progress = progress
    return one


def joined(line: RequestQueue, *priorities: int) -> list[Request]:
    requests = [request(line, priority) for priority in priorities]
    for one in requests:
        line.put(one)
    return requests


def take_all(line: RequestQueue) -> list[Request]:
    return list(iter(line.take, None))


def start(*targets: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def finish(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "a thread hangs"


# -- order and bound


def test_request_that_was_looked_at_is_taken():
    line = RequestQueue(9)
    a, b = joined(line, 0, 0)
    assert line.peek() is a
    (c,) = joined(line, -1)
    assert line.take(a) is a
    assert take_all(line) == [c, b]
    assert line.peek() is None


def test_full_queue_refuses_and_counts():
    line = RequestQueue(2)
    a, b = joined(line, 0, 0)
    with pytest.raises(QueueFull, match="2 of 2 requests are waiting.*larger max_waiting"):
        line.put(request())
    with pytest.raises(QueueFull):
        line.put(request(priority=-9))  # the overflow is first come, first served
    assert (line.refused, len(line)) == (2, 2)
    assert line.take() is a
    c = request()
    line.put(c)
    assert take_all(line) == [b, c]


# -- waiting for a place


def test_cancelled_place_goes_to_the_next_request():
    """As an event loop does, before it withdraws the request."""
    line = RequestQueue(1)
    joined(line, 0)
    places = [line.put_when_free(request(name=number)) for number in range(2)]
    assert places[0].cancel()
    line.take()
    assert places[1].done()
    assert [one.prompt for one in take_all(line)] == [[1]]


# -- cancelled and expired requests


def test_request_cancelled_in_the_overflow_is_dropped():
    line = RequestQueue(1)
    joined(line, 0)
    gone = request(line)
    line.put_when_free(gone)
    gone.cancel()
    assert line.drop_ended(0.0) == []
    line.take()
    assert line.drop_ended(0.0) == [(gone, "")]


# -- the end


def test_closed_queue_refuses_with_the_reason():
    line = RequestQueue(1)
    (a,) = joined(line, 0)
    one = request()
    outside = line.put_when_free(one)
    assert line.closed is None
    line.close("the engine was closed")
    line.close("something else")
    assert line.closed == "the engine was closed"
    for refused in (lambda: outside.result(0), lambda: line.put(request()), lambda: line.put_when_free(request())):
        with pytest.raises(EngineFailed, match="the engine accepts no more requests: the engine was closed"):
            refused()
    assert one.progress.cancelled
    assert line.refused == 0  # there is no place to wait for
    line.wait()  # returns at once: the queue is closed
    assert list(line.drain()) == [a]
    line.wait()
    assert len(line) == 0


def test_queue_closes_while_a_caller_gives_up():
    """An event loop cancels the place first and withdraws when the task runs again: a close may come between."""
    line = RequestQueue(1)
    joined(line, 0)
    given_up, kept = line.put_when_free(request()), line.put_when_free(request())
    given_up.cancel()
    line.close("the engine was closed")
    with pytest.raises(CancelledError):
        given_up.result(0)
    with pytest.raises(EngineFailed):
        kept.result(0)


# -- any order of events


class PlainLine:
    """The slow, obvious queue: lists, sorted at each take."""

    def __init__(self, limit: int):
        self.limit = limit
        self.inside: list[Request] = []
        self.outside: deque[Request] = deque()

    def join(self, one: Request) -> bool:
        if len(self.inside) < self.limit:
            self.inside.append(one)
            return True
        return False

    def ask(self, one: Request) -> None:
        self.outside.append(one)
        self.let_in()

    def let_in(self) -> None:
        while self.outside and len(self.inside) < self.limit:
            self.inside.append(self.outside.popleft())

    def take(self) -> Request | None:
        if not self.inside:
            return None
        taken = sorted(self.inside, key=lambda one: one.priority)[0]  # stable
        self.inside.remove(taken)
        self.let_in()
        return taken

    def drop_ended(self, now: float) -> list[Request]:
        ended = [one for one in self.inside if one.find_end(now) is not None]
        self.inside = [one for one in self.inside if one not in ended]
        self.let_in()
        return ended


events = st.tuples(
    st.sampled_from(["join", "join", "ask", "take", "cancel", "withdraw", "sweep"]),
    st.integers(-3, 3),  # priority
    st.none() | st.integers(1, 9),  # deadline
    st.integers(0, 50),  # whom
)


@settings(derandomize=True, max_examples=300)
@given(limit=st.sampled_from([1, 2, 9]), happening=st.lists(events, max_size=50))
def test_queue_equals_the_plain_model(limit, happening):
    line, plain, known = RequestQueue(limit), PlainLine(limit), []
    for now, (what, priority, deadline, whom) in enumerate(happening):
        one = request(line, priority, deadline)
        match what:
            case "join":
                if plain.join(one):
                    line.put(one)
                else:
                    with pytest.raises(QueueFull):
                        line.put(one)
            case "ask":
                plain.ask(one)
                assert line.put_when_free(one).done() == (one in plain.inside)
            case "take":
                assert line.take() is plain.take()
            case "cancel" if plain.inside:  # in the overflow, callers withdraw instead
                plain.inside[whom % len(plain.inside)].cancel()
            case "withdraw" if known:
                line.withdraw(known[whom % len(known)])
                plain.outside = deque(other for other in plain.outside if other is not known[whom % len(known)])
            case "sweep":
                assert {other for other, _ in line.drop_ended(now)} == set(plain.drop_ended(now))
        known.append(one)
        assert len(line) == len(plain.inside) <= limit
    assert list(line.drain()) == sorted(plain.inside, key=lambda other: other.priority)


# -- threads


def test_wake_ends_one_wait():
    line, woken = RequestQueue(1), threading.Semaphore(0)

    def wait() -> None:
        while line.closed is None:
            line.wait()
            woken.release()

    line.wake()  # before the wait: the wake is not lost
    threads = start(wait)
    assert woken.acquire(timeout=LONG)
    line.wake()
    assert woken.acquire(timeout=LONG)
    assert not woken.acquire(blocking=False)
    line.close("the engine was closed")
    finish(threads)
    assert len(line) == 0
