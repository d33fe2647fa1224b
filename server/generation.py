"""The choices of one request on their way, told in the order in which they are committed."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.requests.request import Delta
from dflash_aot.runtime.requests.streams import AsyncStream
from dflash_aot.server.request_parsing import Asking


class Answer:
    """Closing it, at whatever point, frees its slots and its places among what the caller has under way."""

    def __init__(self, asking: Asking, streams: Sequence[AsyncStream], close: Callable[[], None]):
        self.asking, self._streams, self.close = asking, streams, close

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Each with the index of its choice, until all have ended."""
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield 0, delta
            return
        pending = {asyncio.ensure_future(anext(stream)): at for at, stream in enumerate(self._streams)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=pending.__getitem__):
                    at, delta = pending.pop(future), future.result()
                    if delta.finish_reason is None:
                        pending[asyncio.ensure_future(anext(self._streams[at]))] = at
                    yield at, delta
        finally:
            for future in pending:
                future.cancel()


async def start_answer(
    engine: Engine, admission: AbstractContextManager[None], read: Callable[[], Awaitable[Asking]], deadline: float
) -> Answer:
    """Every choice is on its way when this returns, or none is.

    admission: entered before `read`, and left when the answer is closed. deadline: see `Engine.stream`.
    Raises what these raise, and QueueFull, EngineFailed.
    """
    with ExitStack() as stack:
        stack.enter_context(admission)
        asking = await read()
        streams = []
        for prompt, params in asking.each():
            stream = await engine.asubmit(prompt, params, deadline=deadline)
            stack.callback(stream.close)
            streams.append(stream)
        return Answer(asking, streams, stack.pop_all().close)
