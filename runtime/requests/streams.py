"""Streams: the deltas of one request as they are committed, for threads and for event loops."""

import asyncio
import os
import queue
from collections.abc import Iterator

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.runtime.requests.request import Delta, Request, Result


class Stream:
    """The deltas of one request, for a thread. Can be iterated once.

    Closing the stream, leaving the iteration early, or dropping the last reference to the stream frees the slot.
    Unread deltas are kept, at most one per token of the request, so a slow reader delays no other request.
    """

    def __init__(self, request: Request, deltas: "queue.SimpleQueue[Delta]"):
        self._request, self._deltas, self._ended = request, deltas, False
        self._process = os.getpid()

    def __iter__(self) -> Iterator[Delta]:
        try:
            while not self._ended:
                yield self._next()
        finally:
            self.close()

    def _next(self) -> Delta:
        check_process(self._process)
        try:
            delta = self._deltas.get()
        except BaseException:  # a signal's; its traceback keeps this frame alive, and the stream in it
            self.close()
            raise
        self._ended = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """Cancels what has not been generated yet."""
        self._request.cancel()

    def __del__(self) -> None:
        self.close()

    def result(self) -> Result:
        """Waits for the end. Raises EngineFailed for an answer that ends in an error, from our error behind it."""
        while not self._ended:
            self._next()
        return _finish(self._request)


class AsyncStream:
    """The deltas of one request, for one task of the event loop that submitted it. Can be iterated once.

    Unread deltas are kept, at most one per token of the request. Dropping the stream does not free the slot: close it.
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
        """Waits for the end. Raises EngineFailed for an answer that ends in an error, from our error behind it."""
        async for _ in self:
            pass
        return _finish(self._request)


def _finish(request: Request) -> Result:
    if request.finish_reason == "error":
        raise EngineFailed(request.error) from request.cause
    return request.result()


def check_process(process: int) -> None:
    """Raises EngineFailed in a fork of the process with this id."""
    if os.getpid() != process:
        raise EngineFailed(
            f"the engine was opened in process {process}, and this is its fork {os.getpid()}: threads and "
            "devices do not survive a fork. Open the engine in the process that uses it (multiprocessing: 'spawn')"
        )
