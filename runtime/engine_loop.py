"""The engine's loop: schedule → draft → verify → kv_write → commit. It dispatches and reads; nothing else.

Everything a round decides stays on the device. The host reads one packed array per round, one step late, and
works with upper bounds of the lengths in between.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from dflash_aot.cache.errors import CorruptBundle, DflashError, EngineFailed
from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.diagnostics import ROUNDS_TO_DIAGNOSE, diagnose_acceptance
from dflash_aot.runtime.executables.dispatcher import Dispatcher
from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle
from dflash_aot.runtime.executables.sampling_state import SamplingStateWriter
from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.runtime.requests.logprobs import RoundLogprobs, TokenLogprob
from dflash_aot.runtime.requests.request import Delta, FinishReason, Request, RoundOutcome
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from dflash_aot.runtime.scheduler.slots import RunningRequest, Slots
from dflash_aot.runtime.speculation.burst_length import BurstLength
from dflash_aot.runtime.speculation.controller import SpeculationController

logger = logging.getLogger(__name__)
MOST_FAILURES = 3  # in a row: then the device, or what was loaded on it, is at fault


@dataclass(frozen=True)
class FirstToken:
    """The last prefill chunk of a row, enqueued."""

    row: RunningRequest
    token: jax.Array  # int32 [1]


@dataclass(frozen=True)
class Lineup:
    """Who takes part in a round: the row of each slot that does, None for the others."""

    rows: Sequence[RunningRequest | None]

    @cached_property
    def takers(self) -> list[RunningRequest]:
        return [row for row in self.rows if row]

    @cached_property
    def sampled(self) -> bool:
        """A round samples for all of its rows or for none."""
        return any(row.sampled for row in self.takers)


@dataclass(frozen=True)
class Round:
    """A verification, enqueued; `rows` are those that took part, None for the others.

    `verdict` is int32 [B, 2K+2], and of a sampled round [B, 3K+3]. `tops`: the likeliest tokens, [B, K+1, n] each,
    where a row wants them. `next_to`: nothing was enqueued between it and the round before, which was on its way still.
    """

    rows: Sequence[RunningRequest | None]
    bucket: Bucket
    sampled: bool
    verdict: jax.Array
    tops: Sequence[jax.Array]
    next_to: bool


@dataclass(frozen=True)
class Burst:
    """Up to `count` rounds of one row in one dispatch, enqueued.

    `verdicts` is int32 [N, 2K+2], -1 where a round was not needed; `next_to` as of a round.
    """

    row: RunningRequest
    bucket: Bucket
    count: int
    verdicts: jax.Array
    next_to: bool


class EngineLoop:
    """Serves the requests of a line. One thread calls it; `step` until it is `idle`."""

    def __init__(
        self,
        bundle: LoadedBundle,
        state: DeviceState,
        counters: Counters,
        line: RequestQueue,
        depth: SpeculationController,
    ):
        self._bundle, self._state, self._counters, self._line, self._depth = bundle, state, counters, line, depth
        self._grid, self._sampling = bundle.manifest.grid, bundle.manifest.sampling
        self._ks = tuple(k for k in self._grid.k if k <= bundle.k)
        self._slots = Slots(self._grid.slots)
        self._unread: deque[FirstToken | Round | Burst] = deque()
        self._pace = BurstLength(self._grid.rounds)
        self._last_k = -1
        self._failures = 0  # since something was read that all programs of a round had to run for
        self._between = True  # something else was enqueued since the last round
        self._last_verdict = 0.0
        self._dispatch = Dispatcher(bundle, state)
        vocab = bundle.manifest.target.facts.decoder.vocab
        self._admission = SamplingStateWriter(bundle.admit, state, vocab) if "sample" in self._sampling else None
        self._unsent: list[tuple[Request, Delta]] = []
        # Held while what is counted changes; not while the device is waited for, and not while callers are told.
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        return not self._line and not self._slots and not self._unread

    def step(self) -> None:
        """One prefill chunk, one round, and what the step before has decided.

        Raises EngineFailed when programs keep failing; a single failure ends the requests that were in a slot.
        """
        counters = self._counters
        began, worked, waited = time.perf_counter(), time.thread_time(), counters.wait_seconds
        try:
            self._advance()
        except Exception as error:  # whatever JAX or the device raises
            self._recover(error)
        counters.host_seconds += time.thread_time() - worked
        counters.host_wall_seconds += time.perf_counter() - began - (counters.wait_seconds - waited)

    def end_all(self, error: str) -> None:
        """Ends every request that is here with `error`."""
        with self._lock:
            self._end_slots(error)
            for request in self._line.empty():
                self._end(request, "error", error)
        self._send()

    def stats(self) -> Counters:
        """From any thread: what was counted, of whole commits; all that anybody was told of is in it."""
        with self._lock:
            copied = self._counters.copy()
            copied.running, copied.slots = len(self._slots), self._grid.slots
            copied.waiting, copied.refused = len(self._line), self._line.refused
        return copied

    def _advance(self) -> None:
        with self._lock:
            self._drop_ended()
            moves = self._schedule()
        self._send()
        self._move(moves)
        news = self._prefill() + self._decode()
        self._read(keep=news)

    # -- faults

    def _recover(self, error: Exception) -> None:
        """What was on its way is lost, the state with it; who waits in line has lost nothing.

        An executable that is none says nothing of the device: others may serve.
        """
        self._failures += not isinstance(error, CorruptBundle)
        why = f"a program failed in mid-round: {type(error).__name__}: {error}"
        logger.error(why)
        logger.debug("where it failed", exc_info=error)
        with self._lock:
            self._counters.failures += 1
            self._end_slots(why, type(error)(*error.args) if isinstance(error, DflashError) else None)
        self._send()
        if self._failures >= MOST_FAILURES:
            raise EngineFailed(f"{self._failures} rounds failed in a row; the last one: {why}") from error
        self._state.reset()

    def _end_slots(self, error: str, cause: DflashError | None = None) -> None:
        rows = list(self._slots)
        self._slots, self._unread = Slots(self._grid.slots), deque()
        for row in rows:
            row.request.cause = cause
            self._end(row.request, "error", error)

    def _end(self, request: Request, reason: FinishReason, error: str | None) -> None:
        try:
            delta = request.end(reason, error)
        except Exception as failure:  # of the text layer, which still held something back
            delta = self._end_without_text(request, failure)
        self._unsent.append((request, delta))
        self._counters.note_end(request)

    def _end_without_text(self, request: Request, failure: Exception) -> Delta:
        """The text layer's fault is that of one request alone."""
        request.text = None
        return request.end("error", f"the text of this request cannot be made: {type(failure).__name__}: {failure}")

    def _send(self) -> None:
        """Tells callers what happened, after it was counted."""
        unsent, self._unsent = self._unsent, []
        for request, delta in unsent:
            request.emit(delta)

    # -- schedule

    def _drop_ended(self) -> None:
        """Who was cancelled or has run out of time; their rows may be in a round that is on its way."""
        now = time.monotonic()
        for row in list(self._slots):
            if (why := row.request.find_end(now)) is not None:
                self._slots.free(row)
                self._end(row.request, "cancelled", why or None)
        for request, why in self._line.drop_ended(now):
            self._end(request, "cancelled", why or None)

    def _schedule(self) -> list[tuple[int, int]]:
        """Waiting requests into free slots; then the rows together, if a smaller batch holds them, by these moves."""
        moves = []
        while not self._slots.full and (request := self._line.take()):
            request.started = time.monotonic()
            self._counters.note_start(request)
            sampled = not request.params.plain or "greedy" not in self._sampling
            self._slots.add(RunningRequest(request, self._depth.start(), sampled))
        while self._slots and self._batch(self._slots.span) > self._batch(len(self._slots)):
            move = self._slots.take_move()
            assert move is not None
            moves.append(move)
        self._counters.moves += len(moves)
        return moves

    def _batch(self, rows: int) -> int:
        return self._grid.fit(rows, 1, 0).batch

    # -- enqueue

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        for move in moves:
            self._dispatch.move(*move)
            self._between = True

    def _prefill(self) -> int:
        """The next chunk of the prompt whose turn it is. Returns how many tokens it will tell of."""
        row = self._slots.take_prefill()
        if row is None:
            return 0
        chunk = self._grid.fit_chunk(row.written, row.unwritten)
        part = row.request.prompt[row.written : row.written + min(chunk.prefill, row.unwritten)]
        if not self._bundle.has_run_chunk(chunk):
            self._read(keep=0)  # it takes a while: nobody waits for what is there already
        first = self._dispatch.prefill(chunk, self._slots.slot_of(row), row.written, part)
        row.written = row.length = row.written + len(part)
        self._between = True
        with self._lock:
            self._counters.note_chunk(chunk.prefill, len(part))
        if row.sampled or not row.prefilled:
            return 0
        row.first_in_flight = True
        first.copy_to_host_async()
        self._unread.append(FirstToken(row, first))
        return 1

    def _decode(self) -> int:
        """One round of all rows that want tokens. Returns how many verdicts it will give."""
        lineup = Lineup(self._slots.decoding())
        if not lineup.rows:
            return 0
        bucket = self._fit(lineup)
        # The bounds are too loose for another round, or it takes a while: what is in flight is read, then we see.
        if bucket is None or not self._bundle.has_run(bucket, lineup.sampled, self._runs_alone(bucket, lineup)):
            self._read(keep=0)
            lineup = Lineup(self._slots.decoding())
            if not lineup.rows:
                return 0
            bucket = self._fit(lineup)
            assert bucket is not None, "a row that wants tokens has room for one"
        alone = self._runs_alone(bucket, lineup)
        count = self._count_rounds(bucket, lineup.takers[0]) if alone else 1
        enqueued = (
            self._enqueue_burst(bucket, lineup.takers[0], count) if alone else self._enqueue_round(bucket, lineup)
        )
        self._unread.append(enqueued)
        for row in lineup.takers:
            row.in_flight += count * (bucket.k + 1)
            row.rounds_in_flight += count
        return 1

    def _runs_alone(self, bucket: Bucket, lineup: Lineup) -> bool:
        """Whether several rounds in one dispatch suit it."""
        return self._grid.rounds > 1 and bucket.batch == 1 and len(self._slots) == 1 and not lineup.sampled

    def _count_rounds(self, bucket: Bucket, row: RunningRequest) -> int:
        """How many the device runs for a row that is alone; by another K than before, which may be a trial, one."""
        before, self._last_k = self._last_k, bucket.k
        if bucket.k != before:
            return 1
        count = self._pace.choose(bucket, (bucket.length - row.longest) // (bucket.k + 1))
        self._depth.repeat(count - 1)
        return count

    def _fit(self, lineup: Lineup) -> Bucket | None:
        """The smallest bucket for these rows with the K that suits them; None if not even K = 0 fits."""
        reach = max(row.longest for row in lineup.takers) + 1
        ks = [k for k in self._ks if reach + k <= self._grid.capacity]
        buckets = [self._grid.fit(len(lineup.rows), reach + k, k) for k in ks]
        return self._depth.choose(buckets, lineup.takers, lineup.sampled) if buckets else None

    def _enqueue_round(self, bucket: Bucket, lineup: Lineup) -> Round:
        takers, sampled = lineup.takers, lineup.sampled
        if sampled:
            self._admit(takers)
        rows = [*lineup.rows, *[None] * (bucket.batch - len(lineup.rows))]
        verdict, *tops = self._dispatch.round(bucket, [row is not None for row in rows], sampled)
        tops = tops if any(row.request.params.logprobs for row in takers) else []
        for array in (verdict, *tops):
            array.copy_to_host_async()
        with self._lock:
            self._counters.note_round(bucket, sampled, len(takers))
        for row in takers:
            row.left = None
        return Round(rows, bucket, sampled, verdict, tops, self._is_next_to())

    def _enqueue_burst(self, bucket: Bucket, row: RunningRequest, count: int) -> Burst:
        left = row.unsure if row.left is None else row.left
        verdicts, row.left = self._dispatch.rounds(bucket, count, left, row.request.stop_ids)
        verdicts.copy_to_host_async()
        return Burst(row, bucket, count, verdicts, self._is_next_to())

    def _is_next_to(self) -> bool:
        """Whether the round that was just enqueued follows another one, see `Round`."""
        next_to, self._between = not self._between and bool(self._unread), False
        return next_to

    def _admit(self, rows: Sequence[RunningRequest]) -> None:
        """Every row of a sampled round says what it asks, a greedy one too: the slot knows what its last one asked."""
        assert self._admission is not None, "refused where nothing samples"
        for row in rows:
            if not row.admitted:
                self._admission.admit(row, self._slots.slot_of(row))
                self._between = True
                with self._lock:
                    self._counters.prompt_tokens += row.sampled  # its last one, which its first round takes in

    # -- commit

    def _read(self, keep: int) -> None:
        """Reads what was enqueued, oldest first, all but the last `keep`."""
        while len(self._unread) > keep:
            news = self._unread.popleft()
            match news:
                case FirstToken(row, token):
                    (first,) = self._fetch([token])
                    if row.request.limit == 1:  # which has no round
                        self._failures = 0
                    with self._lock:
                        self._commit_first(news, first)
                case Round():
                    values = self._fetch([news.verdict, *news.tops])
                    self._time(news, 1)
                    with self._lock:
                        self._commit_round(news, *values)
                case Burst():
                    (verdicts,) = self._fetch([news.verdicts])
                    done = verdicts[: int((verdicts[:, 0] >= 0).sum())]
                    self._time(news, len(done))
                    with self._lock:
                        self._commit_burst(news, done)
            self._send()

    def _fetch(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """The one blocking wait."""
        began = time.perf_counter()
        values = [np.asarray(array) for array in arrays]
        self._counters.wait_seconds += time.perf_counter() - began
        return values

    def _time(self, news: Round | Burst, rounds: int) -> None:
        """Rounds that ran back to back show how long one takes. That there are any clears what failed before."""
        self._failures = 0
        now = time.perf_counter()
        if news.next_to and rounds:
            seconds = (now - self._last_verdict) / rounds
            self._depth.note_round(news.bucket, isinstance(news, Round) and news.sampled, seconds)
            self._pace.note(news.bucket, seconds)
        self._last_verdict = now

    def _commit_first(self, news: FirstToken, token: np.ndarray) -> None:
        news.row.first_in_flight = False
        self._take(news.row, token.tolist())

    def _commit_round(self, news: Round, verdict: np.ndarray, *tops: np.ndarray) -> None:
        k, width = news.bucket.k, news.bucket.k + 1
        logprobs = RoundLogprobs(verdict[:, 2 * width :].view(np.float32), tops)
        for slot, (row, (accepted, *tokens)) in enumerate(zip(news.rows, verdict.tolist(), strict=True)):
            if row is None:
                continue
            row.in_flight -= width
            row.rounds_in_flight -= 1
            row.length += accepted + 1
            if row.request.finish_reason:
                continue  # it ended a round ago: this one was on its way already
            chosen, wanted = tokens[k : k + accepted + 1], row.request.params.logprobs
            described = [] if wanted is None else logprobs.list_tokens(slot, chosen, wanted)
            self._take(row, chosen, described, [_describe_draft(row, k, accepted, tokens)])

    def _commit_burst(self, news: Burst, verdicts: np.ndarray) -> None:
        """verdicts [n, 2K+2] of the rounds that ran; its tokens are told of together."""
        row, k = news.row, news.bucket.k
        row.in_flight -= news.count * (k + 1)
        row.rounds_in_flight -= news.count
        for _ in verdicts:
            self._counters.note_round(news.bucket, False, 1)
        rounds = verdicts.tolist()
        row.length += sum(accepted + 1 for accepted, *_ in rounds)
        if row.request.finish_reason:
            return  # it ended while this was on its way
        committed = [token for accepted, *tokens in rounds for token in tokens[k : k + accepted + 1]]
        self._take(row, committed, [], [_describe_draft(row, k, accepted, tokens) for accepted, *tokens in rounds])

    def _note(self, row: RunningRequest, round_: RoundOutcome) -> None:
        self._counters.note_row(round_.k, round_.accepted)
        self._depth.note(row.acceptance, round_.k, round_.accepted)
        if round_.k:
            self._watch_acceptance()

    def _watch_acceptance(self) -> None:
        """One look, when there is enough to see."""
        if self._counters.verified_at[0] == ROUNDS_TO_DIAGNOSE and (advice := diagnose_acceptance(self._counters)):
            logger.warning(advice)

    def _take(
        self,
        row: RunningRequest,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        rounds: Sequence[RoundOutcome] = (),
    ) -> None:
        request = row.request
        if request.finish_reason:
            return
        before = len(request.token_ids)
        try:
            delta = request.take(tokens, logprobs, rounds)
        except Exception as failure:
            delta = self._end_without_text(request, failure)
        for one in delta.rounds:
            self._note(row, one)
        self._unsent.append((request, delta))
        self._counters.note_tokens(request, before)
        if request.finish_reason:
            self._counters.note_end(request)
            self._slots.free(row)


def _describe_draft(row: RunningRequest, k: int, accepted: int, tokens: Sequence[int]) -> RoundOutcome:
    """tokens: a verdict's, of which the first `k` were drafted."""
    return RoundOutcome(k, accepted, tuple(tokens[:k]) if row.request.params.trace else ())
