"""Worker with the engine on a bundle; callers are threads that record when they have their tokens."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from dflash_aot.benchmarks import messages
from dflash_aot.benchmarks.messages import Handlers, run_worker
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.errors import QueueFull
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.engine import MAX_WAITING
from dflash_aot.runtime.metrics.counters import Counters

SETTLED = 0.02  # seconds in which an idle engine counts no further round
LEAD = 0.25  # seconds for all callers to be ready before the clock starts
T = TypeVar("T")


@contextmanager
def open_engine(spec: messages.EngineSpec) -> Iterator[Handlers]:
    """Raises what `Engine.open` raises."""
    select_jax_platforms(read_manifest(Path(spec.bundle)).environment.platform)
    max_waiting = spec.max_waiting or MAX_WAITING
    # Without preload, executables would be loaded during a measurement. Prompts are repeated, and the other contenders
    # compute them each time.
    pair = spec.target, spec.draft
    with Engine.open(
        spec.bundle, *pair, spec.k, max_waiting, preload=True, prefix_caching=False
    ) as engine:
        yield {
            messages.ServeClosed: partial(serve_closed, engine),
            messages.ServeOpen: partial(serve_open, engine),
        }


def serve_closed(engine: Engine, question: messages.ServeClosed) -> messages.ServedClosed:
    """One thread per caller. Raises what `Engine.stream` raises."""

    def ask_in_turn(prompts: list[messages.PromptIds]) -> list[messages.TimedAnswer]:
        return [
            listen(engine, prompt, question.max_tokens, time.perf_counter()) for prompt in prompts
        ]

    def serve() -> tuple[list[list[messages.TimedAnswer]], float]:
        began = time.perf_counter()
        with ThreadPoolExecutor(len(question.lists)) as callers:
            answers = list(callers.map(ask_in_turn, question.lists))
        return answers, time.perf_counter() - began

    (answers, seconds), work = count_work(engine, serve)
    return messages.ServedClosed(answers, seconds, work)


def serve_open(engine: Engine, question: messages.ServeOpen) -> messages.ServedOpen:
    """Like `ask_when_due`, with the engine's work."""
    return messages.ServedOpen(*count_work(engine, lambda: ask_when_due(engine, question)))


def ask_when_due(engine: Engine, question: messages.ServeOpen) -> list[messages.TimedAnswer | None]:
    """One thread per request, asleep until the request is due, so that a slow answer delays no other request.

    Returns None for a refused request. Raises what `Engine.stream` raises.
    """

    def ask(prompt: messages.PromptIds, due: float) -> messages.TimedAnswer | None:
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            return listen(engine, prompt, question.max_tokens, due)
        except QueueFull:
            return None

    began = time.perf_counter() + LEAD
    with ThreadPoolExecutor(len(question.due)) as callers:
        return list(callers.map(ask, question.prompts, [began + due for due in question.due]))


def listen(
    engine: Engine, prompt: messages.PromptIds, tokens: int, began: float
) -> messages.TimedAnswer:
    """One streamed greedy answer without stop tokens, timed since `began` (of `perf_counter`)."""
    stream = engine.stream(prompt, SamplingParams(max_tokens=tokens, stop_token_ids=()))
    arrivals: list[float] = []
    for delta in stream:
        arrivals += [time.perf_counter() - began] * len(delta.token_ids)
    result = stream.result()
    return messages.TimedAnswer(result.token_ids, arrivals, result.accepted)


def count_work(engine: Engine, serve: Callable[[], T]) -> tuple[T, messages.ServingWork]:
    """Returns the result of `serve`, and what the engine counted during the call."""
    before = read_settled(engine)
    served = serve()
    after = read_settled(engine)
    rounds = Counter(after.bucket_rounds) - Counter(before.bucket_rounds)
    return served, messages.ServingWork(
        rounds=after.rounds - before.rounds,
        rows=sum(bucket.batch * count for (bucket, _), count in rounds.items()),
        row_rounds=after.row_rounds - before.row_rounds,
        host_seconds=after.host_seconds - before.host_seconds,
        compile_events=after.compile_events - before.compile_events,
    )


def read_settled(engine: Engine) -> Counters:
    """The counters, once no request is in progress."""
    while True:
        earlier = engine.stats()
        time.sleep(SETTLED)
        if (now := engine.stats()).rounds == earlier.rounds and not now.running + now.waiting:
            return now


if __name__ == "__main__":
    run_worker(messages.EngineSpec, open_engine)
