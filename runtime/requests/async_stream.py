"""The deltas of one request, for a task of an event loop."""

import asyncio

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.runtime.requests.request import Delta, Request, Result


class AsyncStream:
    """What `Stream` is for threads: to be iterated once, by one task of the loop that asked for it.

    Deltas that nobody reads wait here, no more than the request has tokens.
    """

    def __init__(self, request: Request, deltas: asyncio.Queue[Delta]):
        self._request, self._deltas, self._ended = request, deltas, False

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._ended = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """Cancels what has not been generated yet."""
        self._request.cancel()

    async def result(self) -> Result:
        """Waits for the end. Raises EngineFailed if it ends in an error; its cause is of ours, or None."""
        async for _ in self:
            pass
        if self._request.finish_reason == "error":
            raise EngineFailed(self._request.error) from self._request.cause
        return self._request.result()
