"""The engine's loop: schedule → draft → verify → kv_write → commit. It dispatches and reads; nothing else.

Everything a round decides stays on the device. The host reads one packed array per round, one step late, and
works with upper bounds of the lengths in between.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.advice import ROUNDS, advise_on_acceptance
from dflash_aot.runtime.bundle import Bundle
from dflash_aot.runtime.counters import Counters
from dflash_aot.runtime.executable import DeviceState
from dflash_aot.runtime.request import Request
from dflash_aot.runtime.slots import Row, Slots

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstToken:
    """The last prefill chunk of a row, enqueued."""

    row: Row
    token: jax.Array  # int32 [1]


@dataclass(frozen=True)
class Round:
    """A verification, enqueued; `rows` are those that took part, None for the others."""

    rows: Sequence[Row | None]
    k: int
    verdict: jax.Array  # int32 [B, 2K+2]


class Loop:
    """Serves the requests it is given. One thread calls it; `step` until it is `idle`."""

    def __init__(self, bundle: Bundle, state: DeviceState, counters: Counters):
        self._bundle, self._state, self._k, self._counters = bundle, state, bundle.k, counters
        self._grid = bundle.manifest.grid
        self._slots = Slots(self._grid.slots)
        self._waiting: deque[Request] = deque()
        self._unread: deque[FirstToken | Round] = deque()
        self._place = place = state.place
        # By the mask of active rows. The loop's own, and nothing of the loop in it: an engine that is closed is gone.
        self._active = functools.lru_cache(maxsize=256)(lambda mask: place(np.array(mask)))
        self._slot_ranges = {batch: self._place(np.arange(batch, dtype=np.int32)) for batch in self._grid.batch}

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._slots and not self._unread

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> None:
        """One prefill chunk, one round, and what the step before has decided."""
        counters = self._counters
        began, worked, waited = time.perf_counter(), time.thread_time(), counters.wait_seconds
        self._drop_cancelled()
        self._schedule()
        news = self._prefill() + self._decode()
        self._read(keep=news)
        counters.host_seconds += time.thread_time() - worked
        counters.host_wall_seconds += time.perf_counter() - began - (counters.wait_seconds - waited)

    def fail(self, error: str) -> None:
        """Ends every request that is here with `error`."""
        for request in [*(row.request for row in self._slots), *self._waiting]:
            request.end("error", error)
        self._slots, self._unread = Slots(self._grid.slots), deque()
        self._waiting.clear()

    # -- schedule

    def _drop_cancelled(self) -> None:
        for row in list(self._slots):
            if row.request.cancelled.is_set():
                row.request.end("cancelled")
                self._slots.free(row)
        for request in [request for request in self._waiting if request.cancelled.is_set()]:
            request.end("cancelled")
            self._waiting.remove(request)

    def _schedule(self) -> None:
        """Waiting requests into free slots; then the rows together, if a smaller batch holds them."""
        while self._waiting and not self._slots.full:
            self._slots.add(self._waiting.popleft())
        while self._slots and self._batch(self._slots.span) > self._batch(len(self._slots)):
            move = self._slots.take_move()
            assert move is not None
            source, destination = (self._place(np.array([slot], np.int32)) for slot in move)
            self._bundle.move()(self._state, source, destination)
            self._counters.moves += 1

    def _batch(self, rows: int) -> int:
        return self._grid.fit(rows, 1, 0).batch

    # -- enqueue

    def _prefill(self) -> int:
        """The next chunk of the oldest prompt that is not in yet. Returns how many tokens it will tell of."""
        row = self._slots.next_prefill()
        if row is None:
            return 0
        prompt = row.request.prompt
        chunk = self._grid.fit_chunk(row.written, len(prompt) - row.written)
        part = prompt[row.written : row.written + chunk.prefill]
        tokens = np.zeros((1, chunk.prefill), np.int32)
        tokens[0, : len(part)] = part
        numbers = (self._slots.slot_of(row), row.written, len(part))
        slots, starts, counts = (self._place(np.array([number], np.int32)) for number in numbers)
        features, first = self._bundle.prefill(chunk)(self._state, self._place(tokens), slots, starts, counts)
        if self._k:
            self._bundle.kv_write(1, chunk.prefill)(self._state, features, slots, starts)
        row.written += len(part)
        self._counters.prefill_chunks += 1
        if not row.prefilled:
            return 0
        row.length, row.first_in_flight = row.written, True
        first.copy_to_host_async()
        self._unread.append(FirstToken(row, first))
        return 1

    def _decode(self) -> int:
        """One round of all rows that want tokens. Returns how many verdicts it will give."""
        rows = self._slots.decoding(self._slots.span)
        if not any(rows):
            return 0
        bucket = self._fit(rows)
        if bucket is None:  # the bounds are too loose for another round: read what is in flight, then see
            self._read(keep=0)
            rows = self._slots.decoding(self._slots.span)
            if not any(rows):
                return 0
            bucket = self._fit(rows)
            assert bucket is not None, "a row that wants tokens has room for one"
        rows = [*rows, *[None] * (bucket.batch - len(rows))]
        verdict = self._enqueue_round(bucket, rows)
        for row in filter(None, rows):
            row.in_flight += bucket.k + 1
            row.rounds_in_flight += 1
        self._unread.append(Round(rows, bucket.k, verdict))
        return 1

    def _fit(self, rows: Sequence[Row | None]) -> Bucket | None:
        """The smallest bucket for these rows, K shrunk near the end of the grid; None if not even K = 0 fits."""
        longest = max(row.longest for row in rows if row)
        for k in reversed(self._grid.k):
            if k <= self._k and longest + k + 1 <= self._grid.capacity:
                return self._grid.fit(len(rows), longest + k + 1, k)
        return None

    def _enqueue_round(self, bucket: Bucket, rows: Sequence[Row | None]) -> jax.Array:
        active = self._active(tuple(row is not None for row in rows))
        block = self._bundle.draft(bucket)(self._state) if bucket.k else ()
        features, starts, verdict = self._bundle.verify(bucket)(self._state, *block, active)
        verdict.copy_to_host_async()
        if self._k:
            write = self._bundle.kv_write(bucket.batch, bucket.k + 1)
            write(self._state, features, self._slot_ranges[bucket.batch], starts)
        self._counters.rounds += 1
        return verdict

    # -- commit

    def _read(self, keep: int) -> None:
        """Reads what was enqueued, oldest first, all but the last `keep`."""
        while len(self._unread) > keep:
            news = self._unread.popleft()
            if isinstance(news, FirstToken):
                self._commit_first(news)
            else:
                self._commit_round(news)

    def _fetch(self, array: jax.Array) -> np.ndarray:
        """The one blocking wait."""
        began = time.perf_counter()
        values = np.asarray(array)
        self._counters.wait_seconds += time.perf_counter() - began
        return values

    def _commit_first(self, news: FirstToken) -> None:
        row, token = news.row, int(self._fetch(news.token)[0])
        row.first_in_flight = False
        self._take(row, [token])

    def _commit_round(self, news: Round) -> None:
        verdict = self._fetch(news.verdict).tolist()
        for row, (accepted, *tokens) in zip(news.rows, verdict, strict=True):
            if row is None:
                continue
            row.in_flight -= news.k + 1
            row.rounds_in_flight -= 1
            row.length += accepted + 1
            if row.request.finish_reason:
                continue  # it ended a round ago: this one was on its way already
            self._counters.note_row(news.k, accepted)
            if news.k:
                self._watch_acceptance()
            row.request.accepted.append(accepted)
            if row.request.params.trace:
                row.request.drafted.append(tokens[: news.k])
            chosen = tokens[news.k :]
            self._take(row, chosen[: accepted + 1])

    def _watch_acceptance(self) -> None:
        """One look, when there is enough to see."""
        if self._counters.verified_at[0] == ROUNDS and (advice := advise_on_acceptance(self._counters)):
            logger.warning(advice)

    def _take(self, row: Row, tokens: Sequence[int]) -> None:
        if row.request.finish_reason:
            return
        row.request.take(tokens)
        if row.request.finish_reason:
            self._slots.free(row)
