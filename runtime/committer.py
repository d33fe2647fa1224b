"""The committer: reads what was dispatched, one step late, and commits its tokens to requests, counters and streams."""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from dflash_aot.cache.errors import DflashError
from dflash_aot.runtime.diagnostics import ROUNDS_TO_DIAGNOSE, diagnose_acceptance
from dflash_aot.runtime.dispatcher import PrefillInFlight, RoundInFlight
from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.runtime.requests.request import (
    GRAMMAR_FAILURE,
    Delta,
    FinishReason,
    Request,
    RoundOutcome,
    TokenLogprob,
)
from dflash_aot.runtime.scheduler.scheduler import (
    PackedPlan,
    PrefillPlan,
    RoundPlan,
    RunningRequest,
    Scheduler,
)
from dflash_aot.runtime.speculation.controller import AcceptanceEstimate

logger = logging.getLogger(__name__)


class Committer:
    """Owns what is in flight, the counters, and the deltas that callers have not been sent yet.

    Attributes:
        lock: held while counters and requests change; not while the device is waited for, and not
            while deltas are sent.
        successes: results read that prove the executables work: rounds, and first tokens of
            one-token requests.
    """

    def __init__(self, scheduler: Scheduler, counters: Counters):
        self.lock = threading.Lock()
        self.counters = counters
        self.successes = 0
        self._scheduler = scheduler
        self._in_flight: deque[tuple[PrefillInFlight | RoundInFlight, bool]] = deque()
        self._deltas: deque[tuple[Request, Delta]] = deque()
        self._last_read = 0.0
        self._greedy_rounds = 0  # with drafts, for the diagnosis
        self._greedy_accepted = 0  # of these, the rounds that accepted their first drafted token

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight."""
        return not self._in_flight

    def add_prefill(
        self, plan: PrefillPlan, in_flight: PrefillInFlight | None, mixed_width: int = 0
    ) -> None:
        """A prefill chunk was dispatched. mixed_width: that of the chunk in the call of a round; 0 in its own call."""
        with self.lock:
            self.counters.mixed_chunks += mixed_width > 0
        self._add_chunk(plan, in_flight, mixed_width or plan.chunk.prefill)

    def add_packed(self, plan: PackedPlan, in_flight: Sequence[PrefillInFlight | None]) -> None:
        """Chunks of several prompts were dispatched in one call. in_flight: what the host reads of each."""
        _, width, _ = plan.sizes
        with self.lock:
            self.counters.packed_chunks += len(plan.chunks)
            self.counters.padded_prefill += plan.empty_rows * width
        for chunk, one in zip(plan.chunks, in_flight, strict=True):
            self._add_chunk(chunk, one, width)

    def _add_chunk(self, plan: PrefillPlan, in_flight: PrefillInFlight | None, width: int) -> None:
        end = plan.start + len(plan.tokens)
        with self.lock:
            self.counters.note_chunk(
                width, len(plan.tokens), plan.running.request.note_computed(plan.start, end)
            )
        if in_flight:
            self._in_flight.append((in_flight, False))

    def add_round(self, in_flight: RoundInFlight) -> None:
        """A round was dispatched."""
        plan = in_flight.plan
        if not plan.multi_round:  # the rounds of a multi-round step are counted when they are read
            with self.lock:
                self.counters.note_rounds(
                    plan.bucket, plan.batch.mode != "greedy", [len(plan.batch.requests)]
                )
                for running in plan.new_sampling_states:
                    if running.sampled:  # its first round computes the last token of its prompt
                        end = len(running.text)
                        self.counters.prompt_tokens += running.request.note_computed(end - 1, end)
        # A constrained round was planned after the commit of the one before it, and waited for drafts and masks.
        follows = bool(self._in_flight) or plan.batch.mode == "constrain"
        back_to_back = in_flight.follows_round and follows
        self._in_flight.append((in_flight, back_to_back))

    def commit(self, keep: int = 0) -> None:
        """Reads and commits what is in flight, oldest first, all but the newest `keep`."""
        while len(self._in_flight) > keep:
            in_flight, back_to_back = self._in_flight.popleft()
            if isinstance(in_flight, PrefillInFlight):
                self._commit_prefill(in_flight)
            else:
                self._commit_round(in_flight, back_to_back)
            self.send_deltas()

    def drop_in_flight(self) -> None:
        """Forgets what was dispatched, after a failure."""
        self._in_flight.clear()

    # -- requests that end without a token. The caller holds the lock.

    def finish(self, request: Request, reason: FinishReason, error: str | None) -> None:
        """Ends a request where it stands."""
        try:
            delta = request.end(reason, error)
        except Exception as failure:  # of the detokenizer, which still held text back
            delta = _end_without_text(request, failure)
        self._deltas.append((request, delta))
        self.counters.note_end(request)

    def send_deltas(self) -> None:
        """Tells callers what was committed, after it was counted."""
        while self._deltas:
            request, delta = self._deltas[0]
            request.emit(delta)
            self._deltas.popleft()  # not before: without memory `emit` raises, and the next call sends the delta

    # -- one outcome

    def _commit_prefill(self, in_flight: PrefillInFlight) -> None:
        token, *scores = self._fetch([in_flight.token, *in_flight.scores])
        running = in_flight.plan.running
        plan = in_flight.plan
        if plan.gives_first_token and running.request.limit <= 1:  # the request has no round
            self.successes += 1
        with self.lock:
            if scores and (wanted := running.request.params.prompt_logprobs) is not None:
                logprobs, *tops = scores
                running.request.output.prompt_logprobs += _list_logprobs(
                    0, plan.next_tokens, wanted, logprobs, tops
                )
            if plan.gives_first_token:
                running.in_flight.first_token = False
                self._add_tokens(running, [int(token[in_flight.row])])
                self._scheduler.note_tokens([running])

    def _commit_round(self, in_flight: RoundInFlight, back_to_back: bool) -> None:
        plan = in_flight.plan
        outcomes, *top_logprobs = self._fetch([in_flight.outcomes, *in_flight.top_logprobs])
        if not plan.multi_round:
            self._note_time(in_flight, back_to_back, 1)
            with self.lock:
                self._commit_rows(
                    plan, [[row] for row in outcomes.tolist()], outcomes, top_logprobs
                )
            return
        # Of each slot the rounds in which it took part: they come first.
        by_slot = [
            [row for row in rows if row[0] >= 0] for rows in outcomes.swapaxes(0, 1).tolist()
        ]
        counts = [len(rows) for rows in by_slot]
        self._note_time(in_flight, back_to_back, max(counts))
        with self.lock:
            if rows_by_round := [
                sum([count > number for count in counts]) for number in range(max(counts))
            ]:
                self.counters.note_rounds(plan.bucket, plan.batch.mode != "greedy", rows_by_round)
            self._commit_rows(plan, by_slot)

    def _commit_rows(
        self,
        plan: RoundPlan,
        by_slot: Sequence[Sequence[Sequence[int]]],
        outcomes: np.ndarray | None = None,
        top_logprobs: Sequence[np.ndarray] = (),
    ) -> None:
        """Commits each request's rounds together. by_slot: of each slot, and round: accepted, drafted, choices.

        outcomes: of a single round, with the log-probabilities that requests may want.
        """
        k = plan.bucket.k
        without_drafts = _list_outcomes(plan.bucket.k)
        outcomes_read = []
        for slot, (running, rows) in enumerate(zip(plan.batch.by_slot, by_slot, strict=False)):
            if running is None:
                continue
            chosen: list[int] = []
            for row in rows:
                chosen += row[k + 1 : k + 2 + row[0]]
            running.finish_rounds(plan, len(chosen))
            if running.request.output.finish_reason or not rows:
                continue  # the request ended while these rounds were in flight
            params = running.request.params
            logprobs: Sequence[TokenLogprob] = ()
            if params.logprobs is not None and outcomes is not None:
                values = outcomes[:, 2 * k + 2 :].view(np.float32)
                logprobs = _list_logprobs(slot, chosen, params.logprobs, values, top_logprobs)
            if params.trace:
                rounds = [RoundOutcome(k, row[0], tuple(row[1 : k + 1])) for row in rows]
            else:
                rounds = [without_drafts[row[0]] for row in rows]
            used = self._add_tokens(running, chosen, logprobs, rounds)
            outcomes_read += [(running.acceptance, one.accepted) for one in used]
            if k and self._greedy_rounds < ROUNDS_TO_DIAGNOSE:
                self._diagnose_acceptance(running, used)
        if outcomes_read:
            self._count_outcomes(k, outcomes_read)
        self._scheduler.note_tokens(plan.batch.requests)

    def _add_tokens(
        self,
        running: RunningRequest,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        rounds: Sequence[RoundOutcome] = (),
    ) -> Sequence[RoundOutcome]:
        """Commits tokens to a request, unless it has ended; frees its slot where they end it. Returns the used rounds.

        For requests that go on, `Scheduler.note_tokens` comes after it.
        """
        request = running.request
        if request.output.finish_reason:
            return ()
        is_first = request.output.first_token is None
        before = len(request.output.token_ids)
        try:
            delta = request.take(tokens, logprobs, rounds)
        except Exception as failure:
            delta = _end_without_text(request, failure)
        self._deltas.append((request, delta))
        self.counters.output_tokens += len(request.output.token_ids) - before
        if is_first:
            self.counters.note_first_token(request)
        if request.output.finish_reason:
            self.counters.note_end(request)
            self._scheduler.note_tokens([running])
            self._scheduler.end(running)
        return delta.rounds

    def _count_outcomes(self, k: int, outcomes: Sequence[tuple[AcceptanceEstimate, int]]) -> None:
        """outcomes: the request's estimate, and how many of `k` drafted tokens were accepted, of each round."""
        self.counters.note_rows(k, [accepted for _, accepted in outcomes])
        for acceptance, accepted in outcomes:
            acceptance.update(k, accepted)

    def _diagnose_acceptance(self, running: RunningRequest, rounds: Sequence[RoundOutcome]) -> None:
        """Counts rounds of a greedy request; warns once, when there are enough, if they accepted little."""
        if running.masked or not running.request.params.is_greedy:
            return
        self._greedy_rounds += len(rounds)
        self._greedy_accepted += sum([one.accepted > 0 for one in rounds])
        if warning := diagnose_acceptance(self._greedy_rounds, self._greedy_accepted):
            logger.warning(warning)

    # -- the device

    def _fetch(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """Waits for arrays. The engine's thread waits only here, and for the drafts of constrained rounds."""
        began = time.perf_counter()
        values = [np.asarray(array) for array in arrays]
        self.counters.wait_seconds += time.perf_counter() - began
        return values

    def _note_time(self, in_flight: RoundInFlight, back_to_back: bool, rounds: int) -> None:
        """Times rounds that ran back to back."""
        self.successes += 1
        now = time.perf_counter()
        if back_to_back and rounds:
            self._scheduler.note_round_time(in_flight.plan, (now - self._last_read) / rounds)
        self._last_read = now


@functools.cache
def _list_outcomes(k: int) -> Sequence[RoundOutcome]:
    """The outcomes of a round for requests without `trace`, by the number of accepted tokens."""
    return [RoundOutcome(k, accepted) for accepted in range(k + 1)]


def _list_logprobs(
    slot: int,
    chosen: Sequence[int],
    count: int,
    logprobs: np.ndarray,
    top_logprobs: Sequence[np.ndarray],
) -> list[TokenLogprob]:
    """Log-probabilities of tokens in one row of a result, each with the `count` likeliest tokens.

    logprobs: float32 [B, T]. top_logprobs: ids and log-probabilities, [B, T, n], or nothing.
    """
    tops: Sequence[Sequence[tuple[int, float]]] = [()] * len(chosen)
    if count:
        ids, values = (array[slot, : len(chosen), :count].tolist() for array in top_logprobs)
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    values = logprobs[slot, : len(chosen)].tolist()
    return [
        TokenLogprob(token, value, tuple(top))
        for token, value, top in zip(chosen, values, tops, strict=True)
    ]


def _end_without_text(request: Request, failure: Exception) -> Delta:
    """Ends only the request in which the detokenizer or the grammar failed."""
    request.detokenizer = None
    message = str(failure)
    if not message.startswith(GRAMMAR_FAILURE):
        message = f"this request cannot go on: {type(failure).__name__}: {failure}"
    return request.end("error", message)


def copy_error(error: Exception) -> DflashError | None:
    """A copy of an error of ours, for callers to raise as a cause; None for other errors."""
    return type(error)(*error.args) if isinstance(error, DflashError) else None
