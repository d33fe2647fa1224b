"""Streaming: submits the choices of a request, merges their deltas, sends events, stops when the client disconnects."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.requests.request import AsyncStream, Delta
from dflash_aot.server.request_parsing import ParsedRequest

T = TypeVar("T")


class Generation:
    """The running choices of one request. `close` frees their slots and their places in the limit of the key."""

    def __init__(self, request: ParsedRequest, streams: Sequence[AsyncStream], close: Callable[[], None]):
        self.request, self._streams, self.close = request, streams, close

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yields (index of the choice, delta) in the order of commits, until all choices have ended."""
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield 0, delta
            return
        pending = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(self._streams)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=pending.__getitem__):
                    index, delta = pending.pop(future), future.result()
                    if delta.finish_reason is None:
                        pending[asyncio.ensure_future(anext(self._streams[index]))] = index
                    yield index, delta
        finally:
            for future in pending:
                future.cancel()


async def start_generation(
    engine: Engine,
    admission: AbstractContextManager[None],
    parse: Callable[[], Awaitable[ParsedRequest]],
    ends: float,
) -> Generation:
    """Submits all choices of a request, or none.

    admission: entered before `parse`, left when the generation is closed. ends: when the request is cancelled, in
    monotonic seconds. Raises what `admission` and `parse` raise, TimeoutError where parsing takes until `ends`,
    QueueFull, EngineFailed.
    """
    with ExitStack() as stack:
        stack.enter_context(admission)
        async with asyncio.timeout(ends - time.monotonic()):
            request = await parse()
        streams = []
        for prompt, params in request.list_choices():
            stream = await engine.asubmit(prompt, params, deadline=max(ends - time.monotonic(), 0.001))
            stack.callback(stream.close)
            streams.append(stream)
        return Generation(request, streams, stack.pop_all().close)


class ClientDisconnected(Exception):
    """The client has closed the connection."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises ClientDisconnected, and what `work` raises.
    """
    working, disconnecting = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events; `close` is called when they end, and when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None]):
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
            await self._events.aclose()
