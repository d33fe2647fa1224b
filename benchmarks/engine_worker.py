"""Worker with the engine on a bundle; callers are threads that record when they have their tokens."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

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


@contextmanager
def open_engine(spec: messages.EngineSpec) -> Iterator[Handlers]:
    """Raises what `Engine.open` raises."""
    select_jax_platforms(read_manifest(Path(spec.bundle)).environment.platform)
    max_waiting = spec.max_waiting or MAX_WAITING
    # Without preload, executables would be loaded during a measurement. Prompts are repeated, and the other contenders
    # compute them each time.
    with Engine.open(
        spec.bundle, k=spec.k, max_waiting=max_waiting, preload=True, prefix_caching=False
    ) as engine:
        yield {messages.Serve: partial(serve, engine)}


def serve(engine: Engine, question: messages.Serve) -> messages.Served:
    """Callers are threads; those of open loops sleep until their prompt is due. Raises what `Engine.stream` raises."""
    before = read_settled(engine)
    began = time.perf_counter()
    sampling = SamplingParams(
        max_tokens=question.max_tokens, temperature=question.temperature, seed=0, stop_token_ids=()
    )
    due: Iterable[float | None] = itertools.repeat(None)
    if question.due is not None:
        began += LEAD
        due = [began + seconds for seconds in question.due]
    with ThreadPoolExecutor(question.callers) as callers:
        ask = partial(listen, engine, sampling)
        answers = list(callers.map(ask, question.prompts, due))
    seconds = time.perf_counter() - began
    after = read_settled(engine)
    rounds = Counter(after.bucket_rounds) - Counter(before.bucket_rounds)
    work = messages.ServingWork(
        rounds=after.rounds - before.rounds,
        rows=sum(bucket.batch * count for (bucket, _), count in rounds.items()),
        row_rounds=after.row_rounds - before.row_rounds,
        host_us=round(1e6 * (after.host_seconds - before.host_seconds)),
        compile_events=after.compile_events - before.compile_events,
    )
    return messages.Served(answers, seconds, work)


def listen(
    engine: Engine, sampling: SamplingParams, prompt: messages.PromptIds, due: float | None
) -> messages.TimedAnswer:
    """One streamed answer, timed since the prompt is due (of `perf_counter`), or since now.

    A full queue refuses prompts of open loops. Raises what `Engine.stream` raises.
    """
    sent = time.perf_counter() if due is None else due
    time.sleep(max(0.0, sent - time.perf_counter()))
    try:
        stream = engine.stream(prompt, sampling)
    except QueueFull:
        if due is None:
            raise
        return messages.TimedAnswer([], [])
    arrivals: list[float] = []
    for delta in stream:
        arrivals += [time.perf_counter() - sent] * len(delta.token_ids)
    result = stream.result()
    return messages.TimedAnswer(result.token_ids, arrivals, result.accepted)


def read_settled(engine: Engine) -> Counters:
    """The counters, once no request is in progress."""
    while True:
        earlier = engine.stats()
        time.sleep(SETTLED)
        if (now := engine.stats()).rounds == earlier.rounds and not now.running + now.waiting:
            return now


if __name__ == "__main__":
    run_worker({messages.EngineSpec: open_engine})
