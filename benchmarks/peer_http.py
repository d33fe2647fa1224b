"""The load of a server, as a peer: python -m dflash_aot.benchmarks.peer_http"""

import asyncio
import time
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dflash_aot.benchmarks.peer import Handlers, run_peer
from dflash_aot.benchmarks.serve_callers import come_when_due, read_main_thread_seconds
from dflash_aot.benchmarks.serve_traffic import Came, ClientOrder, Come, Heard
from dflash_aot.benchmarks.traffic import Prompt, Work

HEADERS = {"content-type": "application/json"}
PATIENCE = 300.0  # seconds of silence: an answer that takes longer is lost
DONE = b"[DONE]"


class Part(msgspec.Struct):
    text: str
    finish_reason: str | None


class Event(msgspec.Struct):
    """One chunk of an answer, or an error."""

    choices: list[Part] = []
    error: dict[str, str | None] | None = None


@contextmanager
def open_way(order: ClientOrder) -> Iterator[Handlers]:
    yield {Come: lambda question: asyncio.run(load(order, question))}


async def load(order: ClientOrder, question: Come) -> Came:
    """Over new connections, which stay open from one prompt to the next."""
    limits = httpx.Limits(max_connections=question.connections, max_keepalive_connections=question.connections)
    async with httpx.AsyncClient(base_url=order.url, limits=limits, timeout=PATIENCE, trust_env=False) as client:

        async def ask(prompt: Prompt, tokens: int) -> Heard:
            return await ask_server(client, prompt, tokens)

        before = await read_settled(client)
        loop, own = read_main_thread_seconds(order.process), time.process_time()
        heard, seconds = await come_when_due(ask, question)
        own, loop = time.process_time() - own, read_main_thread_seconds(order.process) - loop
        after = await read_settled(client)
    work = Work(
        rounds=int(after["dflash:rounds"] - before["dflash:rounds"]),
        host_seconds=after["dflash:host_seconds"] - before["dflash:host_seconds"],
        compile_events=int(after["dflash:compile_events"]),  # of all times: there are to be none at all
    )
    return Came(heard, seconds, loop, own, work)


async def ask_server(client: httpx.AsyncClient, prompt: Prompt, tokens: int) -> Heard:
    """A stream of one greedy completion that no text ends."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stop_token_ids": [], "stream": True}
    try:
        content = msgspec.json.encode(asked)
        async with client.stream("POST", "/v1/completions", content=content, headers=HEADERS) as response:
            if response.status_code != 200:
                await response.aread()  # so that the connection can be used again
                return Heard(response.status_code)
            return await listen(response.aiter_raw())
    except httpx.HTTPError as error:
        return Heard(0, lost=f"{type(error).__name__}: {error}")


async def listen(parts: AsyncIterable[bytes]) -> Heard:
    """An answer in server-sent events, however they are cut on their way."""
    rest, text, arrivals, reason, done, error = b"", "", [], None, False, None
    async for part in parts:
        now = time.perf_counter()
        *events, rest = (rest + part).split(b"\n\n")
        for data in (one.removeprefix(b"data: ") for one in events):
            done = data == DONE
            event = Event() if done else msgspec.json.decode(data, type=Event)
            error = event.error or error
            for choice in event.choices:
                text += choice.text
                arrivals.append(now)
                reason = choice.finish_reason
    if error or not done or reason != "length":
        why = error["message"] if error else f"it ended as {reason}, {'with' if done else 'without'} [DONE]"
        return Heard(0, text, arrivals, lost=why or "")
    return Heard(200, text, arrivals)


async def read_settled(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's metrics that have no further labels, once nothing is on its way."""
    while True:
        earlier, now = await read_metrics(client), await read_metrics(client)
        if now["dflash:rounds"] == earlier["dflash:rounds"] and not now["vllm:num_requests_running"]:
            return now


async def read_metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """By the name of the family."""
    response = await client.get("/metrics")
    response.raise_for_status()
    return {
        family.name: family.samples[0].value
        for family in text_string_to_metric_families(response.text)
        if len(family.samples) == 1
    }


if __name__ == "__main__":
    run_peer(ClientOrder, open_way)
