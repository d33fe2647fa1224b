"""An engine embedded in an asyncio worker: reads jobs from standard input and writes results as they finish.

dflash-precompile                                  # once: builds the bundle of the embedded pair
echo '{"id": 1, "prompt": "import os", "max_tokens": 16, "deadline": 5}' | python examples/embed_worker.py
    [--bundle DIR] [--concurrency 8] [--drain_seconds 30]

Jobs and results are JSON lines. At most --concurrency jobs are in flight. At the end of the input, or on SIGTERM, the
worker stops reading, finishes the jobs in flight within --drain_seconds, and exits with 0. A job that did not finish
in time has finish_reason "cancelled". A job without a result was never started.
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
from dflash_aot.cache.files.locations import user_cache_directory
from dflash_aot.runtime import Engine, SamplingParams


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the input.

    Attributes:
        id: returned with the result.
        prompt: the text to continue.
        max_tokens: most tokens to generate.
        deadline: seconds after reading within which the job must finish, including the time in the queue.
    """

    id: int | str
    prompt: str
    max_tokens: int = 64
    deadline: float | None = None


async def work(engine: Engine, concurrency: int, drain_seconds: float) -> None:
    """Runs jobs until the input ends or SIGTERM arrives, then waits for those in flight."""
    loop, lines, in_flight = (
        asyncio.get_running_loop(),
        asyncio.Queue[bytes](),
        set[asyncio.Task[None]](),
    )
    free = threading.Semaphore(concurrency)
    loop.add_signal_handler(signal.SIGTERM, lines.put_nowait, b"")
    threading.Thread(target=read_lines, args=(loop, lines, free), daemon=True).start()
    while line := await lines.get():
        task = asyncio.create_task(process_line(engine, line))
        in_flight.add(task)
        task.add_done_callback(in_flight.discard)
        task.add_done_callback(lambda _: free.release())
    try:
        async with asyncio.timeout(drain_seconds):
            await asyncio.gather(*in_flight)  # the timeout cancels them
    except TimeoutError:
        print(f"jobs were cancelled after {drain_seconds:g} s", file=sys.stderr)


def read_lines(
    loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[bytes], free: threading.Semaphore
) -> None:
    """Runs in a thread, because reading blocks. Passes on each line when a job may start, and b"" at the end."""
    with open(0, "rb") as stdin:
        while True:
            free.acquire()
            line = stdin.readline()
            loop.call_soon_threadsafe(lines.put_nowait, line)
            if not line:
                return


async def process_line(engine: Engine, line: bytes) -> None:
    """Runs one job and prints its result or its error as one line."""
    result: dict[str, Any] = {"id": None}
    try:
        job = msgspec.json.decode(line, type=Job)
        result["id"] = job.id
        result |= await generate(engine, job)
    except (DflashError, msgspec.DecodeError) as error:
        result["error"] = str(error)
    except asyncio.CancelledError:
        result["finish_reason"] = "cancelled"
        raise
    finally:
        print(msgspec.json.encode(result).decode(), flush=True)


async def generate(engine: Engine, job: Job) -> dict[str, Any]:
    """The result of a job. Raises what `Engine.generate` raises."""
    params = SamplingParams(max_tokens=job.max_tokens)
    stream = await engine.asubmit(job.prompt, params, deadline=job.deadline, wait=True)
    try:
        generated = await stream.result()
    finally:
        stream.close()  # frees the slot of a job that is cancelled
    return {"text": generated.text, "finish_reason": generated.finish_reason}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=user_cache_directory() / "embedded")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--drain_seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    with Engine.open(arguments.bundle, preload=True) as engine:
        print("ready", file=sys.stderr, flush=True)
        asyncio.run(work(engine, arguments.concurrency, arguments.drain_seconds))
