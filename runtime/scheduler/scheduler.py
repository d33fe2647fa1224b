"""The scheduler: continuous batching of queued requests in slots. No JAX and no clock: testable without a device.

Each step of the engine loop asks the scheduler which requests end, which requests get a slot, which prompt chunk is
prefilled next and which round runs next. The answers are plain data that the dispatcher turns into calls.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dflash_aot.cache.grid import Bucket, Chunk, Grid
from dflash_aot.cache.sampling_state import (
    SAMPLING_MODES,
    SamplingKind,
    SamplingMode,
    find_serving_mode,
)
from dflash_aot.cache.signature import MAX_STOP_TOKENS, ROUNDS
from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.scheduler.kv_pages import (
    KvPages,
    OffloadCosts,
    PageTable,
    PoolFull,
    SlotCopy,
    Transfer,
)
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from dflash_aot.runtime.speculation.controller import (
    AcceptanceEstimate,
    CostModel,
    SpeculationController,
)


@dataclass(eq=False)
class TokensInFlight:
    """What was dispatched for a request and not read yet.

    Attributes:
        tokens: the most tokens that the rounds may commit: the sum of their K + 1.
        rounds: rounds that are certain to come. Each commits at least one token, or was not needed.
        first_token: whether the prefill that gives the first token was dispatched.
    """

    tokens: int = 0
    rounds: int = 0
    first_token: bool = False


@dataclass(eq=False)
class PrefillProgress:
    """How much of a text is prefilled.

    Attributes:
        end: tokens of the text that are prefilled: all, or all but the last one.
        done: tokens whose prefill was dispatched, or whose kv was there already.
        turn: order among equal priorities for the next prefill chunk; lower is earlier.
        branch: of a hybrid, the end of the pages that were present when the request got its slot, beyond the
            latest saved state; 0 for none. A chunk ends there, and its state is saved.
    """

    end: int
    done: int = 0
    turn: int = 0
    branch: int = 0


@dataclass(eq=False)
class RunningRequest:
    """A request that holds a slot.

    Attributes:
        request: what was asked, and the tokens committed so far.
        acceptance: the acceptance estimate of this request's drafts.
        mode: the simplest verification of the bundle that can choose its tokens, apart from masks.
        masked: all of its tokens, or the first tokens, are chosen under masks of allowed tokens.
        has_sampling_state: the device holds this request's sampling parameters.
        length: kv positions that the host knows to be committed.
        table: its kv pages.
        in_flight: what was dispatched and not read yet.
        text: the prompt, and after a preemption the answer so far, as of when the request got the slot.
        sampled: all of its tokens come from rounds: the first round starts at the last token of the text.
        prefill: how much of the text is prefilled.
        ends: tokens at which the device stops; the host finds other end tokens later.
    """

    request: Request
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    mode: SamplingMode = "greedy"
    masked: bool = False
    has_sampling_state: bool = False
    length: int = 0
    table: PageTable = field(default_factory=PageTable)
    in_flight: TokensInFlight = field(default_factory=TokensInFlight)
    text: Sequence[int] = field(init=False)
    sampled: bool = field(init=False)
    prefill: PrefillProgress = field(init=False)
    ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.text = [*self.request.prompt, *self.request.output.token_ids]
        self.sampled = (self.masked or self.mode != "greedy") and self.request.limit > 0
        self.prefill = PrefillProgress(end=len(self.text) - self.sampled)
        ends = self.request.stop_token_ids
        # The device stops a row whose anchor is an end token. The first anchor may be one of the prompt's.
        starts_at_end = self.sampled and self.text[-1] in ends
        self.ends = frozenset(() if starts_at_end else sorted(ends)[:MAX_STOP_TOKENS])

    @property
    def requested_k(self) -> int | None:
        """The request's own K; None where the speculation controller chooses."""
        return self.request.params.k

    @property
    def round_mode(self) -> SamplingMode:
        """The verification that the next round needs."""
        return "constrain" if self.masked and self.request.needs_mask else self.mode

    @property
    def is_scored(self) -> bool:
        """Whether the prompt's log-probabilities are still to be computed. A preempted answer has them."""
        return self.request.params.prompt_logprobs is not None and not self.request.output.token_ids

    @property
    def is_prefilled(self) -> bool:
        return self.prefill.done == self.prefill.end

    @property
    def tokens_to_prefill(self) -> int:
        """Tokens of the text whose prefill is still to be dispatched."""
        return self.prefill.end - self.prefill.done

    @property
    def tokens_outstanding(self) -> int:
        """Tokens wanted beyond those certain to come from what was dispatched."""
        certain = (
            len(self.request.output.token_ids) + self.in_flight.rounds + self.in_flight.first_token
        )
        return self.request.limit - certain

    @property
    def wants_round(self) -> bool:
        request = self.request  # for every request in every step: without calls of other properties
        certain = len(request.output.token_ids) + self.in_flight.rounds + self.in_flight.first_token
        return certain < request.limit and self.prefill.done == self.prefill.end

    @property
    def precedence(self) -> tuple[int, int]:
        """The order among running requests, lower first: by priority, then by arrival."""
        return self.request.priority, self.request.progress.arrival or 0

    @property
    def key(self) -> tuple[int, int]:
        """Identifies one stay in a slot, without a reference to the request: its arrival and preemptions."""
        return self.request.progress.arrival or 0, self.request.progress.preemptions

    @property
    def length_bound(self) -> int:
        """Upper bound of the length on the device."""
        return self.length + self.in_flight.tokens

    def finish_rounds(self, plan: "RoundPlan", committed: int) -> None:
        """The outcome of these rounds was read; together they committed `committed` tokens on the device."""
        self.in_flight.rounds -= plan.certain_rounds
        self.in_flight.tokens -= plan.most_tokens
        self.length += committed


class Slots:
    """Slots 0 … N-1. Requests move to lower slots when a smaller batch bucket then holds them all.

    Attributes:
        span: number of slots up to the last occupied slot.
    """

    def __init__(self, count: int):
        self._slots: list[RunningRequest | None] = [None] * count
        self._running: list[RunningRequest] = []  # of the occupied slots, in order
        self._turns = itertools.count()
        self.span = 0

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._running)

    def __len__(self) -> int:
        """Occupied slots."""
        return len(self._running)

    @property
    def count(self) -> int:
        """Slots, occupied or not."""
        return len(self._slots)

    @property
    def is_full(self) -> bool:
        return len(self._running) == len(self._slots)

    def add(self, running: RunningRequest) -> None:
        """Takes the first free slot; the request's prefill comes after all other prefills."""
        running.prefill.turn = next(self._turns)
        self._put(self._slots.index(None), running)

    def free(self, running: RunningRequest) -> None:
        self._put(self._slots.index(running), None)

    def _put(self, slot: int, running: RunningRequest | None) -> None:
        self._slots[slot] = running
        self._running = [one for one in self._slots if one]
        self.span = self._slots.index(self._running[-1]) + 1 if self._running else 0

    def slot_of(self, running: RunningRequest) -> int:
        return self._slots.index(running)

    def take_move(self) -> tuple[int, int] | None:
        """Moves the last request into the first free slot before it.

        Returns (source, destination), or None where no free slot lies before an occupied slot.
        """
        source = self.span - 1
        free = source + 1 if self.is_full else self._slots.index(None)
        if free > source:
            return None
        moved = self._slots[source]
        self._put(source, None)
        self._put(free, moved)
        return source, free

    def wanting_round(self) -> list[RunningRequest | None]:
        """By slot the requests that want a round, None for other slots; ends at the last request that does."""
        members = [
            running if running and running.wants_round else None
            for running in self._slots[: self.span]
        ]
        while members and members[-1] is None:
            members.pop()
        return members

    def list_prefilling(self) -> list[RunningRequest]:
        """The requests whose prompts are not completely prefilled."""
        return [running for running in self._running if running.prefill.done < running.prefill.end]

    def take_prefill(self) -> RunningRequest | None:
        """The request whose next prompt chunk is to be prefilled; None where every prompt is prefilled.

        Requests of the best priority take turns, so that a long prompt delays another request by a chunk at a time.
        """
        if not (waiting := self.list_turns()):
            return None
        waiting[0].prefill.turn = next(self._turns)
        return waiting[0]

    def list_turns(self) -> list[RunningRequest]:
        """The requests whose prompts are not completely prefilled, in the order in which they take turns."""
        waiting = self.list_prefilling()
        return sorted(waiting, key=lambda one: (one.request.priority, one.prefill.turn))


@dataclass(frozen=True)
class PrefillPlan:
    """One chunk of one request's prompt.

    Attributes:
        running: the request.
        slot: where it runs.
        chunk: the bucket of the prefill.
        start: position of the first token.
        tokens: the prompt tokens of this chunk.
        gives_first_token: the chunk ends a prompt whose first token is greedy, and picks that
            token.
        scored: log-probabilities of the prompt's tokens are wanted.
        next_tokens: of a scored chunk, for each position the token after it, as far as the text goes.
    """

    running: RunningRequest
    slot: int
    chunk: Chunk
    start: int
    tokens: Sequence[int]
    gives_first_token: bool
    scored: bool = False
    next_tokens: Sequence[int] = ()


@dataclass(frozen=True)
class RoundBatch:
    """The requests of a round. by_slot: the request of each slot that takes part, None for the other slots.

    Rounds of the same requests share a batch, so that its properties are computed once.
    """

    by_slot: Sequence[RunningRequest | None]

    @cached_property
    def requests(self) -> list[RunningRequest]:
        return [running for running in self.by_slot if running]

    @cached_property
    def mode(self) -> SamplingMode:
        """How the round verifies: what any of its requests needs is done for all of them."""
        return max((running.round_mode for running in self.requests), key=SAMPLING_MODES.index)

    @cached_property
    def keys(self) -> Sequence[tuple[int, int] | None]:
        """By slot the keys of the requests."""
        return [running.key if running else None for running in self.by_slot]

    @cached_property
    def is_masked(self) -> bool:
        """Whether the mode may change while the requests stay the same."""
        return any(running.masked for running in self.requests)

    @cached_property
    def is_penalised(self) -> bool:
        """Whether a request has a bias or penalties."""
        return any(running.request.params.is_penalised for running in self.requests)

    @cached_property
    def logprobs(self) -> int | None:
        """The most alternatives of each token whose log-probabilities a request wants; None where none wants any."""
        counts = (running.request.params.logprobs for running in self.requests)
        return max((count for count in counts if count is not None), default=None)

    @property
    def length_bound(self) -> int:
        """Upper bound of the longest length on the device."""
        return max([running.length + running.in_flight.tokens for running in self.requests])

    @property
    def needs_host(self) -> bool:
        """Whether the host must act between two rounds, so that no multi-round step can run them.

        It makes masks of allowed tokens, and writes the sampling parameters of a request before its first sampled
        round. A multi-round step reports no log-probabilities.
        """
        if self.logprobs is not None or self.mode not in ROUNDS.names:
            return True
        return self.mode != "greedy" and not all(
            [running.has_sampling_state for running in self.requests]
        )


@dataclass(frozen=True)
class RoundPlan:
    """One round of a batch, or several rounds in one dispatch (a multi-round step).

    Attributes:
        batch: the requests that take part.
        bucket: the shape.
        multi_round: the executable that runs several rounds is called.
        rounds: how many rounds that call runs at most; 1 otherwise.
        stop_early: of a multi-round step: it stops when a row is done, because another request
            waits for a slot.
        tokens_outstanding: of a multi-round step, by row: tokens that the request wants beyond
            those certain to come.
        new_sampling_states: requests whose sampling parameters must be written to the device
            first.
        resumes: this round drafts again after rounds with K = 0, whose draft kv may have to be
            written first.
    """

    batch: RoundBatch
    bucket: Bucket
    multi_round: bool = False
    rounds: int = 1
    stop_early: bool = False
    tokens_outstanding: Sequence[int] = ()
    new_sampling_states: Sequence[RunningRequest] = ()
    resumes: bool = False

    @cached_property
    def certain_rounds(self) -> int:
        """Rounds that are certain to run. If any row may stop early, only the first round is."""
        return 1 if self.stop_early else self.rounds

    @cached_property
    def rows(self) -> tuple[RunningRequest | None, ...]:
        """The request of every row of the bucket, None for empty rows."""
        return (*self.batch.by_slot, *[None] * (self.bucket.batch - len(self.batch.by_slot)))

    @cached_property
    def active(self) -> tuple[bool, ...]:
        """Which rows of the bucket have a request."""
        return tuple([running is not None for running in self.rows])

    @cached_property
    def most_tokens(self) -> int:
        """The most tokens that a row may commit."""
        return self.rounds * (self.bucket.k + 1)


@dataclass(frozen=True)
class MixedPlan:
    """A round whose verification also prefills a chunk of another request's prompt.

    Attributes:
        round: the round.
        chunk: the chunk. Its call has the grid's largest chunk width.
        sizes: of the call, see `Grid.fit_mixed`.
    """

    round: RoundPlan
    chunk: PrefillPlan
    sizes: tuple[int, int, int, int]


@dataclass(frozen=True)
class PackedPlan:
    """The last chunks of several prompts, which one call prefills.

    Attributes:
        chunks: of different requests, fewer than or as many as rows.
        sizes: of the call, see `Grid.fit_packed`.
    """

    chunks: Sequence[PrefillPlan]
    sizes: tuple[int, int, int]

    @property
    def empty_rows(self) -> int:
        """Rows without a prompt."""
        return self.sizes[0] - len(self.chunks)


# While an answer grows, its state is saved after so many tokens, and pages: each time waits for all rounds in flight.
ANSWER_TOKENS = 128
ANSWER_PAGES = 2
# Only as long as so many states can be saved per request: otherwise growing answers would evict each other's.
STATES_PER_ANSWER = 2


class LengthBoundTooLoose(Exception):
    """The length bounds are too loose for any bucket: commit what is in flight, then plan again."""


class Scheduler:
    """Owns the slots, the choice of the next prefill chunk and of the next round. Takes requests from the queue."""

    def __init__(
        self,
        grid: Grid,
        sampling: Sequence[SamplingKind],
        k: int,
        queue: RequestQueue,
        controller: SpeculationController,
        prefix_caching: bool = True,
        offload: OffloadCosts | None = None,
    ):
        """grid, sampling: of the bundle. k: the largest K that is served. prefix_caching: see `Engine.open`.

        offload: see `KvPages`.
        """
        self.slots = Slots(grid.slots)
        self.kv = KvPages(grid, offload)
        self._prefix_caching = prefix_caching
        # The request that lacked pages, and the pool's changes then.
        self._lacking_pages: tuple[Request, int] | None = None
        self._grid = grid
        self._queue = queue
        self._controller = controller
        self._sampling = sampling
        self._ks = tuple(one for one in grid.k if one <= k)
        self._borders = sorted({length - k for length in grid.length for k in self._ks})
        self._buckets: dict[tuple[int, int], list[Bucket]] = {}
        self._costs = CostModel()  # of served rounds: how many fit into one dispatch
        self._last_k = -1
        self._plan: RoundPlan | None = None  # the latest one
        self._copies: list[SlotCopy | Transfer] = []  # planned, not dispatched

    # -- requests

    @property
    def is_idle(self) -> bool:
        """No request waits, and no slot is taken."""
        return not self._queue and not self.slots

    def drop_ended(self, now: float) -> list[tuple[Request, str]]:
        """Frees the slots of requests that were cancelled or whose deadline has passed; forgets such waiting requests.

        Returns each with the reason, "" for a cancelled request. Their rounds may still be in flight.
        """
        ended = []
        for running in self.slots:
            request = running.request
            if (request.progress.cancelled or request.deadline is not None) and (
                reason := request.find_end(now)
            ) is not None:
                self.end(running)
                ended.append((request, reason))
        return ended + self._queue.drop_ended(now)

    def end(self, running: RunningRequest) -> None:
        """Frees the slot and the pages of a request. Saves its state if the device has computed nothing beyond it."""
        self._plan = None
        length = self._find_stopped_length(running)
        if not (length or running.in_flight.tokens):
            length = self._find_savable_length(running)
        if length > running.table.saved:
            self._save_state(running, length, answers=True)
        self.slots.free(running)
        self.kv.close(running.table)

    def fill_slots(self) -> list[Request]:
        """Gives free slots, and pages for their text, to waiting requests. Returns those that got a slot.

        Where the next request lacks pages, the requests after it wait too.
        """
        started: list[Request] = []
        while (
            not self.slots.is_full
            and (request := self._queue.peek())
            and (running := self._open_table(request))
        ):
            self._queue.take(request)
            self.slots.add(running)
            self._restore_state(running)
            if running.table.cached and not request.progress.preemptions:
                self.kv.queries += len(request.prompt)
            started.append(request)
        return started

    def _open_table(self, request: Request) -> RunningRequest | None:
        """A request with pages for its text and a round; None, and no pages are taken, where too few are available.

        The same request is not tried again before pages of the pool have changed.
        """
        pool = self.kv.pool
        if self._lacking_pages == (request, pool.changes):
            return None
        mode = find_serving_mode(request.needed_mode, self._sampling)
        assert mode is not None, "the request builder refuses what no executable can do"
        # Log-probabilities of a prompt come from its prefill, so its kv is computed even if it is cached.
        params = request.params
        cached = self._prefix_caching and params.prefix_caching and params.prompt_logprobs is None
        table = PageTable(params.cache_salt, cached, keys=request.progress.page_keys)
        acceptance = self._controller.start_request(request.needs_mask)
        running = RunningRequest(request, acceptance, mode, request.needs_mask, table=table)
        # Without pages for a round the request would soon be preempted, after its prompt was computed.
        room = self._grid.capacity - len(running.text)
        further = min(self._ks[-1] + 1, room) if request.limit else 0
        try:
            self._skip_tokens(running, self.kv.open(table, running.text, further))
            running.prefill.branch = self._find_branch(running)
        except PoolFull:
            self._lacking_pages = request, pool.changes
            return None
        self._lacking_pages = None
        if not request.progress.preemptions:
            request.progress.cached_at_start = request.progress.cached_tokens
        return running

    def _skip_tokens(self, running: RunningRequest, end: int) -> None:
        """The kv before `end` is there already."""
        if not running.request.progress.preemptions:  # it counts the prompt's tokens, once
            running.request.progress.cached_tokens += end - running.prefill.done
            self.kv.hits += end - running.prefill.done
        running.prefill.done = running.length = end

    def make_room(self) -> tuple[list[Request], RoundPlan | None]:
        """Puts requests back into the queue until the pool holds the next round. Nothing may be in flight.

        The newest request of the lowest priority goes first. Preempted requests continue where they were: a
        given seed chooses the same tokens. Returns the preempted requests, and the next round.
        """
        preempted: list[Request] = []
        while True:
            try:
                return preempted, self.plan_round()
            except PoolFull:
                running = max(self.slots, key=lambda one: one.precedence)
                self.end(running)
                running.request.preempt()
                self._queue.put_back(running.request)
                preempted.append(running.request)

    def compact(self) -> list[tuple[int, int]]:
        """Moves requests to lower slots where a smaller batch bucket then holds them: (source, destination) each."""
        moves = []
        while (span := self.slots.span) > len(self.slots) > 0 and (
            self._batch_bucket(span) > self._batch_bucket(len(self.slots))
        ):
            move = self.slots.take_move()
            assert move is not None
            moves.append(move)
        return moves

    def clear_slots(self) -> list[Request]:
        """Frees every slot and its pages. Returns the requests that held a slot."""
        running = list(self.slots)
        self.slots = Slots(self._grid.slots)
        self._plan = None
        self._copies = []
        for one in running:
            self.kv.close(one.table)
        return [one.request for one in running]

    def _batch_bucket(self, slots: int) -> int:
        return self._grid.fit(slots, 1, 0).batch

    # -- saved states of hybrids: where prompts end, at borders in them, and while answers grow

    def take_copies(self) -> list[SlotCopy | Transfer]:
        """The planned copies of states, and from the host. They are dispatched before any other call."""
        copies = self._copies
        self._copies = []
        return copies

    @property
    def has_states_to_save(self) -> bool:
        """Whether the state of an answer is to be saved, as soon as nothing is in flight."""
        if not self.kv.states.count:
            return False
        slots = [*self.slots]
        if self.kv.states.count < STATES_PER_ANSWER * len(slots):
            return False
        step = self._answer_step
        return any([self._find_savable_length(one) - one.table.saved >= step for one in slots])

    @property
    def _answer_step(self) -> int:
        return max(ANSWER_PAGES * self.kv.page, ANSWER_TOKENS)

    def save_states(self) -> None:
        """Plans to save the states of answers that have grown by half a step. Nothing may be in flight."""
        step = self._answer_step // 2
        for running in self.slots:
            if self._find_savable_length(running) - running.table.saved >= step:
                self._save_state(running, running.length, answers=True)

    def _find_savable_length(self, running: RunningRequest) -> int:
        """The length of prompt and answer if their state can be saved while nothing is in flight; else 0."""
        request = running.request
        if not (self.kv.states.count and running.table.cached and running.is_prefilled):
            return 0
        # After `tokens_of_model`, and after an end token, the device may have other tokens than the answer.
        known = len(request.prompt) + request.output.tokens_of_model
        return running.length if running.length <= known else 0

    def _find_stopped_length(self, running: RunningRequest) -> int:
        """The length of prompt and answer without the end token, if the device has stopped at that token; else 0."""
        output = running.request.output
        if not (self.kv.states.count and running.table.cached and output.finish_reason == "stop"):
            return 0
        stopped = bool(output.token_ids) and output.token_ids[-1] in running.ends
        return len(running.request.prompt) + len(output.token_ids) - 1 if stopped else 0

    def _save_state(self, running: RunningRequest, position: int, answers: bool = False) -> None:
        """Plans to save the state of a request, which is that after `position` tokens."""
        text = [*running.request.prompt, *running.request.output.token_ids]
        slot = self.slots.slot_of(running)
        if copy := self.kv.plan_save(running.table, text, position, slot, answers):
            self._copies.append(copy)

    def _restore_state(self, running: RunningRequest) -> None:
        if copy := self.kv.plan_restore(running.table, self.slots.slot_of(running)):
            self._copies.append(copy)

    def _find_branch(self, running: RunningRequest) -> int:
        """See `PrefillProgress`. Only where at least a chunk of kv lies beyond the latest saved state; else 0."""
        done = running.prefill.done
        if not self.kv.states.count:
            return 0
        present = self.kv.find_present(running.table, running.text, done)
        return present if present - done >= self._grid.prefill[-1] else 0

    # -- prefill

    def plan_prefill(self) -> PrefillPlan | None:
        """The next prompt chunk; None where every prompt is prefilled, or where copies from the host are next."""
        while running := self.slots.take_prefill():
            if running.table.restores:
                self._plan_host_copies(running)
                return None
            self._share_prefix(running)
            if not running.is_prefilled:
                return self._plan_chunk(running)
        return None

    def _share_prefix(self, running: RunningRequest) -> None:
        """Skips what other requests have computed since this one got its slot."""
        self._skip_tokens(
            running, self.kv.share_prefix(running.table, running.text, running.prefill.done)
        )
        self._restore_state(running)

    def _plan_host_copies(self, running: RunningRequest) -> None:
        """Plans the next copies from the host. After the last of them the rest of the prompt is computed."""
        table = running.table
        self._copies += self.kv.plan_host_copies(table, self.slots.slot_of(running))
        if table.restores:
            return
        self._skip_tokens(running, table.restored)
        if not running.request.progress.preemptions:
            running.request.progress.cached_at_start = running.request.progress.cached_tokens

    def _plan_chunk(self, running: RunningRequest) -> PrefillPlan:
        start = running.prefill.done
        left = running.tokens_to_prefill
        if start < running.prefill.branch:
            left = min(left, running.prefill.branch - start)
        chunk = self._grid.fit_chunk(start, left)
        count = min(chunk.prefill, left)
        if self.kv.states.count and running.table.cached and count < left:
            border = (start + count) // self.kv.page * self.kv.page - start
            # The last border of the prompt, whose state is saved.
            count = border if border > 0 and left - count <= self._last_tokens else count
        text = running.text
        scored = running.is_scored
        return PrefillPlan(
            running=running,
            slot=self.slots.slot_of(running),
            chunk=chunk,
            start=start,
            tokens=text[start : start + count],
            gives_first_token=count == running.tokens_to_prefill and not running.sampled,
            scored=scored,
            next_tokens=text[start + 1 : start + count + 1] if scored else (),
        )

    @property
    def _last_tokens(self) -> int:
        """At most so many tokens of a prompt come after the border at which its state is saved."""
        return max(self._grid.prefill[-1], self.kv.page)

    def start_prefill(self, plan: PrefillPlan) -> None:
        """The chunk was dispatched: whatever is dispatched from now on finds its kv."""
        running = plan.running
        running.prefill.done = running.length = plan.start + len(plan.tokens)
        running.in_flight.first_token = plan.gives_first_token
        self.kv.index_full_pages(running.table, running.text, running.length)
        if self.kv.states.count and running.table.cached:
            left = running.tokens_to_prefill
            at_border = running.length % self.kv.page == 0 and left <= self._last_tokens
            if left == 0 or at_border or running.length == running.prefill.branch:
                self._save_state(running, running.length)

    # -- one chunk for several prompts

    def plan_packed(self, first: PrefillPlan) -> PackedPlan | None:
        """The chunk together with those of other prompts of its priority; None where they do not fill half of the rows.

        Only chunks that end their prompts share a call, so that a long prompt is computed in wide chunks.
        """
        rows = self._grid.packed
        if not rows or not self._fits_packed(first.running):
            return None
        chunks = [first]
        for running in self.slots.list_turns():
            if running is first.running or len(chunks) == rows or running.table.restores:
                continue
            if running.request.priority == first.running.request.priority:
                self._share_prefix(running)
                if not running.is_prefilled and self._fits_packed(running):
                    chunks.append(self._plan_chunk(running))
        if 2 * len(chunks) < max(rows, 4):
            return None
        return PackedPlan(
            chunks, self._grid.fit_packed(max(one.start + len(one.tokens) for one in chunks))
        )

    def _fits_packed(self, running: RunningRequest) -> bool:
        """Whether a row holds the rest of the prompt. The scores of a prompt have a program of their own."""
        return running.tokens_to_prefill <= self._grid.packed_width and not running.is_scored

    # -- rounds with a chunk

    def can_mix(self, chunk: PrefillPlan) -> bool:
        """Whether a round may prefill the chunk. The scores of a prompt have a program of their own."""
        return self._grid.mixed > 0 and not chunk.scored

    def holds(self, running: RunningRequest) -> bool:
        """Whether the request still has its slot."""
        return any(one is running for one in self.slots)

    def plan_mixed(self, chunk: PrefillPlan, plan: RoundPlan | None) -> MixedPlan | None:
        """The planned round together with the chunk; None without a round, and for a request that was preempted."""
        if plan is None or not self.holds(chunk.running):
            return None
        return MixedPlan(plan, chunk, self._grid.fit_mixed(plan.bucket, chunk.chunk.length))

    # -- rounds

    def plan_round(self) -> RoundPlan | None:
        """The next round of all requests that want tokens; None where none does.

        Raises LengthBoundTooLoose where no bucket is certain to hold the batch before outstanding rounds are committed,
        PoolFull where the batch lacks pages.
        """
        if not (by_slot := self.slots.wanting_round()):
            return None
        batch = self._find_batch(by_slot)
        bucket = self._choose_bucket(batch)
        multi_round = self._runs_multi_round(batch)
        self._take_pages(batch, bucket.k + 1)
        plan = self._plan
        if (
            plan is None
            or plan.batch is not batch
            or plan.bucket != bucket
            or plan.multi_round != multi_round
        ):
            self._plan = plan = RoundPlan(batch, bucket, multi_round)
        return plan

    def _find_batch(self, by_slot: Sequence[RunningRequest | None]) -> RoundBatch:
        """The batch of the latest plan, if it has the same requests and their mode cannot have changed."""
        batch = self._plan.batch if self._plan else None
        return (
            batch
            if batch and batch.by_slot == by_slot and not batch.is_masked
            else RoundBatch(by_slot)
        )

    def start_round(self, plan: RoundPlan) -> RoundPlan:
        """The planned round is about to be dispatched: counts it as in flight, and completes the plan."""
        requests = plan.batch.requests
        last_k = self._last_k
        self._last_k = plan.bucket.k
        if last_k == 0 < plan.bucket.k:
            plan = replace(plan, resumes=True)
        if plan.multi_round:
            outstanding = [running.tokens_outstanding if running else 0 for running in plan.rows]
            # A single round if K differs from that of the round before: it may be a trial of this K.
            rounds = self._count_rounds(plan, max(outstanding)) if plan.bucket.k == last_k else 1
            stop_early = bool(self._queue)
            plan = RoundPlan(
                plan.batch, plan.bucket, True, rounds, stop_early, outstanding, resumes=plan.resumes
            )
        elif plan.batch.mode != "greedy" and (
            new := [one for one in requests if not one.has_sampling_state]
        ):
            plan = replace(plan, new_sampling_states=new)
            for running in new:
                running.has_sampling_state = True
        self._controller.note_dispatch(plan.rounds)
        certain_rounds = plan.certain_rounds
        most_tokens = plan.most_tokens
        for running in requests:
            running.in_flight.rounds += certain_rounds
            running.in_flight.tokens += most_tokens
        return plan

    def note_round_time(self, plan: RoundPlan, seconds: float) -> None:
        """A round of this plan took `seconds` on the device."""
        shape = plan.bucket, plan.batch.mode
        self._controller.note_round_time(shape, seconds, plan.resumes)
        if self._grid.rounds > 1:
            self._costs.note_served(shape, seconds)

    def note_tokens(self, committed: Sequence[RunningRequest]) -> None:
        """Tokens were committed to these requests: full pages of those that have a slot are kept for others."""
        page = self.kv.page
        for running in committed:
            request = running.request
            table = running.table
            if table.version and table.cached and (table.keyed_pages + 1) * page <= running.length:
                # The kv after `tokens_of_model` is of tokens that a completion replaced.
                length = min(running.length, len(request.prompt) + request.output.tokens_of_model)
                self.kv.index_full_pages(
                    table, [*request.prompt, *request.output.token_ids], length
                )

    def _choose_bucket(self, batch: RoundBatch) -> Bucket:
        """The smallest bucket for the batch, with the K that the controller chooses of those that have room.

        Raises LengthBoundTooLoose, PoolFull.
        """
        buckets = self._fit_buckets(len(batch.by_slot), batch.length_bound + 1)
        if not buckets:
            raise LengthBoundTooLoose
        # Otherwise there are pages even for the largest K.
        if self._list_lacking(batch, buckets[-1].k + 1):
            available = self.kv.pool.available
            buckets = [
                bucket
                for bucket in buckets
                if self._count_missing_pages(batch, bucket.k) <= available
            ]
            if not buckets:
                raise PoolFull
        return self._controller.choose_bucket(buckets, batch.requests, batch.mode)

    def _fit_buckets(self, rows: int, positions: int) -> Sequence[Bucket]:
        """The smallest bucket of each K that has room for so many positions and K more; cached."""
        key = rows, bisect_left(self._borders, positions)
        if key not in self._buckets:
            ends = self._borders[key[1] :]
            ks = [k for k in self._ks if ends and ends[0] + k <= self._grid.capacity]
            self._buckets[key] = [self._grid.fit(rows, ends[0] + k, k) for k in ks]
        return self._buckets[key]

    def _count_missing_pages(self, batch: RoundBatch, k: int) -> int:
        """Pages that the requests lack for `k` + 1 more tokens, the most that a round with `k` drafted tokens adds."""
        lacking = self._list_lacking(batch, k + 1)
        return sum(
            self.kv.count_missing(running.table, running.length_bound + k + 1)
            for running in lacking
        )

    def _take_pages(self, batch: RoundBatch, tokens: int) -> None:
        """Takes the pages that the requests lack for so many tokens more."""
        for running in self._list_lacking(batch, tokens):
            self.kv.grow(running.table, running.length_bound + tokens)

    def _list_lacking(self, batch: RoundBatch, tokens: int) -> list[RunningRequest]:
        """The requests whose pages do not hold so many tokens more."""
        page = self.kv.page
        return [
            running
            for running in batch.requests
            if running.length + running.in_flight.tokens + tokens > len(running.table.pages) * page
        ]

    def _runs_multi_round(self, batch: RoundBatch) -> bool:
        """Whether a multi-round step runs the batch: not while prompts are prefilled, in chunks between the rounds."""
        if self._grid.rounds == 1 or batch.needs_host:
            return False
        return not self.slots.list_prefilling()

    def _count_rounds(self, plan: RoundPlan, wanted: int) -> int:
        """Rounds of a multi-round step. Takes the pages that they may need. wanted: the most tokens of a request."""
        batch = plan.batch
        bucket = plan.bucket
        width = plan.bucket.k + 1
        room = min(wanted, (bucket.length - batch.length_bound) // width)
        rounds = max(
            1, min(self._grid.rounds, room, self._costs.count_burst_rounds((bucket, batch.mode)))
        )
        available = self.kv.pool.available
        while rounds > 1 and self._count_missing_pages(batch, rounds * width - 1) > available:
            rounds -= 1
        self._take_pages(batch, rounds * width)
        return rounds
