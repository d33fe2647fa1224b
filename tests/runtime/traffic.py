"""Random requests for an engine, and accounts of what became of them. Not collected by pytest."""

import functools
import gc
import operator
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import jax

from dflash_aot.cache.errors import BadInput, GridMiss, QueueFull
from dflash_aot.runtime import Engine, Result, SamplingParams
from dflash_aot.runtime.requests.request import Request
from tests.runtime.stepper import settle, wait_until

THREADS, SLOTS = 8, 3
T = TypeVar("T", bound=Any)
SHORT = ("len1", "len_eq_block", "len5", "len30", "random12", "len_block_plus1", "len70")  # the last one: two chunks


@dataclass
class Tally:
    """What one thread observed of its requests."""

    ends: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    surely_prefilled: int = 0
    output_tokens: int = 0
    refused: int = 0
    bad: int = 0
    wrong: list[object] = field(default_factory=list)

    def note(self, result: Result) -> None:
        self.ends[result.finish_reason] += 1
        self.prompt_tokens += result.prompt_tokens
        if result.token_ids:
            self.surely_prefilled += result.prompt_tokens - 1  # a sampled one begins at the last token
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
    if not stats.preemptions:  # one that was preempted before its first chunk may find kv that counts for others
        assert tally.surely_prefilled <= stats.prompt_tokens + stats.prefix_hits
    assert sum(stats.latency.counts) == tally.ends.total()
    assert (stats.refused, stats.failures, stats.compile_events) == (tally.refused, 0, 0)
    wait_until(lambda: engine._loop.is_idle)  # rounds of rows that had ended are still read
    assert tally.wrong == []


BAD = (
    ([], {}, BadInput),
    ([1, 512], {}, BadInput),
    ([1] * 209, {}, GridMiss),
    ([1], {"max_tokens": 209}, GridMiss),
    ([1], {"stop_token_ids": [-1]}, BadInput),
    ([1], {"k": 5}, GridMiss),
    ("text", {}, BadInput),
)
SPICES = (
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": 0},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2, "logprobs": 3},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logit_bias": {7: 5.0, 8: -100.0}},
    {"logprobs": 20},
)


class Traffic:
    """Random requests, each with its expected answer."""

    def __init__(self, engine: Engine, cases):
        self._engine, self._cases = engine, cases
        # Told once, alone: the same seed gives the same text in any company.
        self._sampled = []
        for number, spice in enumerate(SPICES):
            case = cases[SHORT[number]]
            params = SamplingParams(max_tokens=5, stop_token_ids=(), seed=number, **spice)
            self._sampled.append((case.prompt, params, engine.generate(case.prompt, params)))

    @property
    def told(self) -> Tally:
        tally = Tally()
        for _, _, result in self._sampled:
            tally.note(result)
        return tally

    def send(self, rng: random.Random, count: int) -> Tally:
        tally = Tally()
        kinds = (self._ask, self._ask_sampled, self._leave, self._hurry, self._err)
        for kind in rng.choices(kinds, weights=(60, 12, 12, 10, 6), k=count):
            kind(rng, tally)
        return tally

    def _draw(self, rng: random.Random) -> tuple[list[int], SamplingParams, list[int]]:
        case = self._cases[rng.choice(SHORT)].later(rng.choice((0, 1, 2, 3, 4, 5, 6, 29)))  # most fit a small chunk
        answer = case.answer[: rng.randint(1, 5)]
        stops = rng.sample(range(512), 3) + ([rng.choice(answer)] if rng.random() < 0.3 else [])
        ends = [answer.index(stop) + 1 for stop in stops if stop in answer]
        k = rng.choice((None, None, None, 0, 3, 7))
        params = SamplingParams(len(answer), stop_token_ids=stops, k=k, trace=rng.random() < 0.1)
        return case.prompt, params, answer[: min(ends, default=len(answer))]

    def _ask(self, rng: random.Random, tally: Tally) -> None:
        prompt, params, answer = self._draw(rng)
        result = self._engine.generate(prompt, params, priority=rng.randrange(3), wait=True)
        self._check(tally, result, result.token_ids == answer and result.finish_reason in ("stop", "length"))

    def _ask_sampled(self, rng: random.Random, tally: Tally) -> None:
        prompt, params, told = rng.choice(self._sampled)
        result = self._engine.generate(prompt, params, priority=rng.randrange(3), wait=True)
        ids = [entry.token_id for entry in result.logprobs or ()]
        logprobs = params.logprobs is None or ids == result.token_ids
        self._check(tally, result, result.token_ids == told.token_ids and logprobs)

    def _leave(self, rng: random.Random, tally: Tally) -> None:
        prompt, params, answer = self._draw(rng)
        stream = self._engine.stream(prompt, params, wait=True)
        for _, _ in zip(range(rng.randrange(3)), stream, strict=False):
            pass
        stream.close()
        result = stream.result()
        self._check(tally, result, result.token_ids == answer[: len(result.token_ids)])

    def _hurry(self, rng: random.Random, tally: Tally) -> None:
        prompt, params, answer = self._draw(rng)
        try:
            result = self._engine.generate(prompt, params, deadline=rng.choice((1e-4, 0.002, 0.02)), wait=False)
        except QueueFull:
            tally.refused += 1
            return
        late = result.finish_reason == "cancelled" and "deadline" in result.error
        whole = result.token_ids == answer
        self._check(tally, result, (late or whole) and result.token_ids == answer[: len(result.token_ids)])

    def _err(self, rng: random.Random, tally: Tally) -> None:
        prompt, wrong, error = rng.choice(BAD)
        try:
            self._engine.generate(prompt, SamplingParams(**wrong), wait=True)
        except error:
            tally.bad += 1

    def _check(self, tally: Tally, result: Result, right: bool) -> None:
        tally.note(result)
        if not right:
            tally.wrong.append(result)


@dataclass(frozen=True)
class Memory:
    """Memory in use: Python blocks, resident bytes, device arrays and their bytes, requests."""

    blocks: int
    resident: int
    arrays: int
    array_bytes: int
    requests: int

    @classmethod
    def measure(cls) -> "Memory":
        gc.collect()
        arrays = jax.live_arrays()
        return cls(
            blocks=sys.getallocatedblocks(),
            resident=read_resident(),
            arrays=len(arrays),
            array_bytes=sum(array.nbytes for array in arrays),
            requests=sum(type(found) is Request for found in gc.get_objects()),
        )


def read_resident() -> int:
    with open("/proc/self/status") as status:
        kilobytes = next(line.split()[1] for line in status if line.startswith("VmRSS"))
    return 1024 * int(kilobytes)
