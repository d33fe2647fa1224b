"""The same traffic without a server: callers in the engine's process, in one event loop."""

import asyncio
import gc
import os
import time

from dflash_aot.benchmarks.callers import count_work, make_params
from dflash_aot.benchmarks.serve_callers import come_when_due, read_main_thread_seconds
from dflash_aot.benchmarks.serve_traffic import Came, Come, Heard
from dflash_aot.benchmarks.traffic import Prompt
from dflash_aot.cache.errors import QueueFull
from dflash_aot.runtime import Engine


def serve_inside(engine: Engine, question: Come) -> Came:
    """In the main thread. Raises what `Engine.asubmit` raises, but for a refusal."""
    gc.freeze()  # as the server does

    async def ask(prompt: Prompt, tokens: int) -> Heard:
        return await listen(engine, prompt, tokens)

    def serve() -> tuple[list[Heard], float, float]:
        before = read_main_thread_seconds(os.getpid())
        heard, seconds = asyncio.run(come_when_due(ask, question))
        return heard, seconds, read_main_thread_seconds(os.getpid()) - before

    (heard, seconds, loop_seconds), work = count_work(engine, serve)
    return Came(heard, seconds, loop_seconds, None, work)


async def listen(engine: Engine, prompt: Prompt, tokens: int) -> Heard:
    """As the server answers: what has no text is not told, and who finds the line full gets 503."""
    try:
        stream = await engine.asubmit(prompt, make_params(tokens))
    except QueueFull:
        return Heard(503)
    text, arrivals, reason = "", [], None
    async for delta in stream:
        if delta.text or delta.finish_reason:
            text += delta.text
            arrivals.append(time.perf_counter())
            reason = delta.finish_reason
    return Heard(200, text, arrivals, lost="" if reason == "length" else f"it ended as {reason}")
