"""Mailbox: deltas on their way from the engine's thread to the streams of one event loop."""

import asyncio
import threading
from weakref import WeakValueDictionary

from dflash_aot.runtime.requests.request import Delta


class DeltaMailbox:
    """Hands deltas over to an event loop, in one call for all deltas that it has not taken yet.

    So the requests of a round that a server streams mostly cost one wake-up together: the event loop may take
    the first deltas while others are posted.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self._lock = loop, threading.Lock()
        self._posted: list[tuple[asyncio.Queue[Delta], Delta]] = []

    def post(self, deltas: asyncio.Queue[Delta], delta: Delta) -> None:
        """Puts a delta into the queue of its stream, from any thread. Raises RuntimeError where the loop is closed."""
        with self._lock:
            if not self._posted or self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._deliver)
            self._posted.append((deltas, delta))

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
        rest = iter(posted)
        try:
            for deltas, delta in rest:
                deltas.put_nowait(delta)
        finally:
            if left := [*rest]:  # one stream took no delta: the others get theirs
                with self._lock:
                    self._posted[:0] = left
                    self._loop.call_soon(self._deliver)


Mailboxes = WeakValueDictionary[asyncio.AbstractEventLoop, DeltaMailbox]  # kept as long as a request posts to it


def find_mailbox(mailboxes: Mailboxes) -> DeltaMailbox:
    """The mailbox of the running event loop, made at its first use."""
    loop = asyncio.get_running_loop()
    return mailboxes.setdefault(loop, DeltaMailbox(loop))
