"""Threads that send random requests, and accounts of what became of them. Not collected by pytest."""

import functools
import operator
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from dflash_aot.runtime import Engine, Result
from tests.runtime.stepper import settle, wait_until

THREADS = 8
T = TypeVar("T", bound=Any)


@dataclass
class Tally:
    """What one thread observed of its requests."""

    ends: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    wrong: list[object] = field(default_factory=list)

    def note(self, result: Result) -> None:
        self.ends[result.finish_reason] += 1
        self.prompt_tokens += result.prompt_tokens
        self.output_tokens += len(result.token_ids)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


def run_threads(work: Callable[[random.Random], T], seed: int) -> T:
    """Starts eight threads together, each with its own random numbers. Returns the sum of what they return."""
    start = threading.Barrier(THREADS)

    def run(number: int) -> T:
        start.wait()
        return work(random.Random(f"{seed}, {number}"))

    with ThreadPoolExecutor(THREADS) as pool:
        return functools.reduce(operator.add, pool.map(run, range(THREADS)))


def check_accounts(engine: Engine, tally: Tally) -> None:
    """Asserts that nothing is left behind and that counters equal what callers observed."""
    stats = settle(engine, tally.ends.total())
    assert (stats.running, stats.waiting, len(engine._queue._overflow)) == (0, 0, 0)
    assert stats.finished == dict(tally.ends)
    assert stats.output_tokens == tally.output_tokens
    assert stats.prompt_tokens + stats.prefix_hits <= tally.prompt_tokens
    assert sum(stats.latency.counts) == tally.ends.total()
    assert (stats.refused, stats.failures, stats.compile_events) == (0, 0, 0)
    wait_until(lambda: engine._loop.is_idle)  # rounds of rows that had ended are still read
    assert tally.wrong == []
