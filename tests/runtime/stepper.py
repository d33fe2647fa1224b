"""Engines a step at a time, so that tests of moments need no luck; not collected by pytest."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from dflash_aot.runtime import Delta, Engine, SamplingParams
from dflash_aot.runtime.metrics.counters import Counters

LONG = 120.0  # seconds: longer than anything that does not hang
T = TypeVar("T")


def up_to(tokens: int | None) -> SamplingParams:
    """Parameters of a greedy answer that no token ends."""
    return SamplingParams(max_tokens=tokens, stop_token_ids=())


def join(deltas: Iterable[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


class Stepper:
    """A running request that blocks the engine's thread at each of its tokens until a test lets it go on.

    Meanwhile nothing is scheduled, dropped or dispatched. With K = 0 it gets one token per step of the loop.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int]):
        self._stands, self._permits, self._over = threading.Semaphore(0), threading.Semaphore(0), False
        self.request = engine._build_request(list(prompt), SamplingParams(stop_token_ids=()), self._hold)
        engine._submit(self.request)
        self._wait()
        self.advance()  # the first token and the first round's are read in one step

    def _hold(self, delta: Delta) -> None:
        self._stands.release()
        if not (self._over or delta.finish_reason):
            self._permits.acquire()

    def _wait(self) -> None:
        assert self._stands.acquire(timeout=LONG), "the engine's loop does not go on"

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._permits.release()
            self._wait()

    def let_go(self) -> None:
        self._over = True
        self.request.cancel()
        self._permits.release()


@contextmanager
def hold(engine: Engine, prompt: Sequence[int] = (1,)) -> Iterator[Stepper]:
    """Blocks an idle engine: inside the context it makes only the steps that a test asks for."""
    wait_until(lambda: engine.stats().running == engine.stats().waiting == 0)
    stepper = Stepper(engine, prompt)
    try:
        yield stepper
    finally:
        stepper.let_go()


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread is about to do."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.001)


def settle(engine: Engine, ended: int) -> Counters:
    """The counters once `ended` requests have ended: callers receive an end before its step is over."""
    wait_until(lambda: sum(engine.stats().finished.values()) >= ended)
    return engine.stats()


def finish(work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread; hanging is a failure, and leaves the thread behind."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=LONG)
    if errors:
        raise errors[0]
    assert results, "it hangs"
    return results[0]
