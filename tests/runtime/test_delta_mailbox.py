"""Deltas cross from the engine's thread to an event loop: each once, in order, with one wake-up for many."""

import asyncio
import gc
import threading
from typing import Any

from dflash_aot.runtime.engine import DeltaMailbox, Mailboxes, find_mailbox
from dflash_aot.runtime.requests.request import Delta


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often other threads wake it."""

    woken = 0

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        self.woken += 1
        return super().call_soon_threadsafe(*arguments, **options)


def post_from_a_thread(mailbox: DeltaMailbox, queues: list[asyncio.Queue[Delta]], tokens: range) -> None:
    def post() -> None:
        for token in tokens:
            for queue in queues:
                mailbox.post(queue, Delta((token,), ""))

    thread = threading.Thread(target=post)
    thread.start()
    thread.join()  # the event loop stands still meanwhile


def take(queue: asyncio.Queue[Delta]) -> list[int]:
    return [token for _ in range(queue.qsize()) for token in queue.get_nowait().token_ids]


def test_deltas_of_many_streams_wake_the_event_loop_once():
    async def serve() -> tuple[int, list[list[int]]]:
        mailbox, queues = DeltaMailbox(loop), [asyncio.Queue[Delta]() for _ in range(8)]
        post_from_a_thread(mailbox, queues, range(3))
        woken = loop.woken
        await asyncio.sleep(0)
        post_from_a_thread(mailbox, queues, range(3, 5))
        assert loop.woken == woken + 1, "the second round wakes the loop again"
        await asyncio.sleep(0)
        return woken, [take(queue) for queue in queues]

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        assert runner.run(serve()) == (1, [[0, 1, 2, 3, 4]] * 8)


def test_full_queue_delays_no_delta_of_other_streams():
    async def serve() -> tuple[list[type], list[list[int]]]:
        loop, failures = asyncio.get_running_loop(), list[type]()
        loop.set_exception_handler(lambda _, context: failures.append(type(context["exception"])))
        mailbox, full, other = DeltaMailbox(loop), asyncio.Queue[Delta](maxsize=1), asyncio.Queue[Delta]()
        post_from_a_thread(mailbox, [full, other], range(3))
        await asyncio.sleep(0)  # the second delta of `full` raises
        post_from_a_thread(mailbox, [other], range(3, 5))
        for _ in range(3):
            await asyncio.sleep(0)
        return failures, [take(queue) for queue in (full, other)]

    assert asyncio.run(serve()) == ([asyncio.QueueFull] * 2, [[0], [0, 1, 2, 3, 4]])


def test_event_loop_has_one_mailbox_while_in_use():
    mailboxes = Mailboxes()

    async def find() -> DeltaMailbox:
        return find_mailbox(mailboxes)

    async def find_one() -> list[DeltaMailbox]:
        kept = find_mailbox(mailboxes)
        return [kept, await find()]

    first, again = asyncio.run(find_one())
    assert first is again and first is not asyncio.run(find())
    del first, again
    gc.collect()
    assert not mailboxes, "closed event loops are not kept"
