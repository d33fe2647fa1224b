"""The engine in an asyncio worker: jobs are lines of standard input, answers lines of standard output as they end.

dflash-precompile                                  # once: the bundle of the embedded pair
echo '{"id": 1, "prompt": "import os", "max_tokens": 16, "deadline": 5}' | python examples/embed_worker.py
    [--bundle DIR] [--concurrency 8] [--drain_seconds 30]

No more than --concurrency jobs are read before others have ended. At the end of the input, or at SIGTERM, it takes no
more, answers those under way within --drain_seconds, and ends with 0. What was cut short says "cancelled"; a job
without an answer was not begun.
"""

import argparse
import asyncio
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.cache.errors import DflashError
from dflash_aot.cache.locations import user_cache_directory
from dflash_aot.runtime import Engine, SamplingParams


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """deadline: seconds from when it is read, its turn in line included."""

    id: int | str
    prompt: str
    max_tokens: int = 64
    deadline: float | None = None


async def work(engine: Engine, concurrency: int, drain_seconds: float) -> None:
    """Until there are no more jobs, and those that were begun are answered."""
    loop, lines, under_way = asyncio.get_running_loop(), asyncio.Queue[bytes](), set[asyncio.Task[None]]()
    free = threading.Semaphore(concurrency)
    loop.add_signal_handler(signal.SIGTERM, lines.put_nowait, b"")
    threading.Thread(target=read_lines, args=(loop, lines, free), daemon=True).start()
    while line := await lines.get():
        task = asyncio.create_task(do(engine, line))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        task.add_done_callback(lambda _: free.release())
    try:
        async with asyncio.timeout(drain_seconds):
            await asyncio.gather(*under_way)  # which it cancels when the time is over
    except TimeoutError:
        print(f"not done within {drain_seconds:g} s", file=sys.stderr)


def read_lines(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[bytes], free: threading.Semaphore) -> None:
    """In a thread, since reading blocks: each line when somebody has time for it, and b"" at the end."""
    with open(0, "rb") as given:
        while True:
            free.acquire()
            line = given.readline()
            loop.call_soon_threadsafe(lines.put_nowait, line)
            if not line:
                return


async def do(engine: Engine, line: bytes) -> None:
    """Prints one line, whatever becomes of the job."""
    told: dict[str, Any] = {"id": None}
    try:
        job = msgspec.json.decode(line, type=Job)
        told["id"] = job.id
        told |= await answer(engine, job)
    except (DflashError, msgspec.DecodeError) as error:
        told["error"] = str(error)
    except asyncio.CancelledError:
        told["finish_reason"] = "cancelled"
        raise
    finally:
        print(msgspec.json.encode(told).decode(), flush=True)


async def answer(engine: Engine, job: Job) -> dict[str, Any]:
    """Raises what `Engine.generate` raises."""
    params = SamplingParams(max_tokens=job.max_tokens)
    stream = await engine.asubmit(job.prompt, params, deadline=job.deadline, wait=True)
    try:
        result = await stream.result()
    finally:
        stream.close()  # frees the slot of a job that is cancelled
    return {"text": result.text, "finish_reason": result.finish_reason}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=user_cache_directory() / "embedded")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--drain_seconds", type=float, default=30.0)
    given = parser.parse_args()
    with Engine.open(given.bundle, preload=True) as engine:
        print("ready", file=sys.stderr, flush=True)
        asyncio.run(work(engine, given.concurrency, given.drain_seconds))
