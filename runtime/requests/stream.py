"""The deltas of one request, for a caller that may wait."""

import os
import queue
from collections.abc import Iterator

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.runtime.requests.request import Delta, Request, Result


class Stream:
    """The deltas of one request, to be iterated once.

    Closing it, leaving the loop early, or dropping the last reference to it frees the slot. Deltas that nobody reads
    wait here, no more than the request has tokens: who reads slowly holds nothing up.
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
        except BaseException:  # a signal's; whoever keeps it keeps its frames, and this in them
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
        """Waits for the end. Raises EngineFailed if it ends in an error; its cause is of ours, or None."""
        while not self._ended:
            self._next()
        if self._request.finish_reason == "error":
            raise EngineFailed(self._request.error) from self._request.cause
        return self._request.result()


def check_process(process: int) -> None:
    """Raises EngineFailed in a fork of it."""
    if os.getpid() != process:
        raise EngineFailed(
            f"the engine was opened in process {process}, and this is its fork {os.getpid()}: threads and "
            "devices do not survive a fork. Open it in the process that uses it (multiprocessing: 'spawn')"
        )
