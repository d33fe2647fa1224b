"""Callers of an engine, each in a thread of its own, who note when they have their tokens."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dflash_aot.benchmarks.traffic import Answer, Arrive, Arrived, Prompt, Serve, Served, Work
from dflash_aot.cache.errors import QueueFull
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.metrics.counters import Counters

SETTLED = 0.02  # seconds in which an engine with nothing to do counts no further round
LEAD = 0.25  # seconds for all callers to stand ready before the clock starts
T = TypeVar("T")


def serve_lists(engine: Engine, question: Serve) -> Served:
    """One thread per caller. Raises what `Engine.stream` raises."""

    def ask_in_turn(prompts: list[Prompt]) -> list[Answer]:
        return [listen(engine, prompt, question.max_tokens, time.perf_counter()) for prompt in prompts]

    def serve() -> tuple[list[list[Answer]], float]:
        began = time.perf_counter()
        with ThreadPoolExecutor(len(question.lists)) as callers:
            answers = list(callers.map(ask_in_turn, question.lists))
        return answers, time.perf_counter() - began

    (answers, seconds), work = count_work(engine, serve)
    return Served(answers, seconds, work)


def serve_arrivals(engine: Engine, question: Arrive) -> Arrived:
    """As `come_when_due`."""
    ends, work = count_work(engine, lambda: come_when_due(engine, question))
    return Arrived([answer for answer, _ in ends], [late for _, late in ends], work)


def come_when_due(engine: Engine, question: Arrive) -> list[tuple[Answer | None, float]]:
    """One thread per request, asleep until it is due: an answer that takes long makes nobody else come later.

    Answers, None for who was refused, and by how many seconds each was sent late. Raises as `Engine.stream` otherwise.
    """

    def come(prompt: Prompt, due: float) -> tuple[Answer | None, float]:
        time.sleep(max(0.0, due - time.perf_counter()))
        late = time.perf_counter() - due
        try:
            return listen(engine, prompt, question.max_tokens, due), late
        except QueueFull:
            return None, late

    began = time.perf_counter() + LEAD
    with ThreadPoolExecutor(len(question.due)) as callers:
        return list(callers.map(come, question.prompts, [began + due for due in question.due]))


def listen(engine: Engine, prompt: Prompt, tokens: int, began: float) -> Answer:
    """One answer, as its caller gets it, in seconds since `began` (by `perf_counter`). Raises as `Engine.stream`."""
    stream = engine.stream(prompt, make_params(tokens))
    arrivals: list[float] = []
    for delta in stream:
        arrivals += [time.perf_counter() - began] * len(delta.token_ids)
    result = stream.result()
    return Answer(result.token_ids, arrivals, result.accepted)


def make_params(tokens: int) -> SamplingParams:
    """Greedy, and as many tokens as asked for: no text ends the run of one way earlier."""
    return SamplingParams(max_tokens=tokens, stop_token_ids=())


def count_work(engine: Engine, serve: Callable[[], T]) -> tuple[T, Work]:
    """What it returns, and what the engine counted meanwhile."""
    before = settle(engine)
    served = serve()
    after = settle(engine)
    rounds = Counter(after.bucket_rounds) - Counter(before.bucket_rounds)
    by_k: Counter[int] = Counter()
    for (bucket, _), count in rounds.items():
        by_k[bucket.k] += count
    return served, Work(
        rounds=after.rounds - before.rounds,
        rounds_by_k=dict(sorted(by_k.items())),
        rows=sum(bucket.batch * count for (bucket, _), count in rounds.items()),
        row_rounds=after.row_rounds - before.row_rounds,
        padded_rows=after.padded_rows - before.padded_rows,
        host_seconds=after.host_seconds - before.host_seconds,
        host_wall_seconds=after.host_wall_seconds - before.host_wall_seconds,
        compile_events=after.compile_events - before.compile_events,
    )


def settle(engine: Engine) -> Counters:
    """What was counted, once nothing is on its way."""
    while True:
        earlier = engine.stats()
        time.sleep(SETTLED)
        if (now := engine.stats()).rounds == earlier.rounds and not now.running + now.waiting:
            return now
