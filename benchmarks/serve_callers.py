"""Callers of an event loop, who come when they come and share so many connections."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from dflash_aot.benchmarks.serve_traffic import Come, Heard
from dflash_aot.benchmarks.traffic import Prompt

LEAD = 0.1  # seconds for all callers to stand ready before the clock starts
# Of a prompt, so many tokens; what is heard has its times by `perf_counter`.
Ask = Callable[[Prompt, int], Awaitable[Heard]]


async def come_when_due(ask: Ask, question: Come) -> tuple[list[Heard], float]:
    """What each heard, in times since it was due, and how long all of it took. Raises what `ask` raises."""
    free = asyncio.Semaphore(question.connections)  # in the order in which they come
    began = time.perf_counter() + LEAD

    async def come(prompt: Prompt, due: float) -> Heard:
        async with free:
            late = time.perf_counter() - due
            heard = await ask(prompt, question.max_tokens)
        return msgspec.structs.replace(heard, late=late, arrivals=[one - due for one in heard.arrivals])

    tasks = []
    async with asyncio.TaskGroup() as group:
        for prompt, due in zip(question.prompts, question.due, strict=True):
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.append(group.create_task(come(prompt, began + due)))
    return [task.result() for task in tasks], time.perf_counter() - began


def read_main_thread_seconds(process: int) -> float:
    """Processor time of a process's first thread up to now, as Linux tells it: to two hundredths of a second."""
    fields = Path(f"/proc/{process}/task/{process}/stat").read_text().rpartition(")")[2].split()
    user, system = fields[11:13]  # the 14th and 15th of all; names may have blanks
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
