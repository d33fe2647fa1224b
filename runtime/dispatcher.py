"""The dispatcher: turns planned prefills and rounds into calls of executables, and defers writes of the draft's kv.

It waits only for the drafted tokens of a constrained round, because its masks depend on them.
"""

import functools
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dflash_aot.cache.arrays import RECURRENT_STATE, TRANSFER_BYTES
from dflash_aot.cache.sampling_state import (
    ALL_ALLOWED,
    MASK_BITS,
    SAMPLING_COLUMNS,
    count_mask_words,
    needs_sampling_state,
)
from dflash_aot.cache.signature import (
    ADMIT,
    COPY,
    DRAFT,
    KV_WRITE,
    MAX_STOP_TOKENS,
    MIXED,
    MOVE,
    PACKED_PREFILL,
    PREFILL,
    READ_PAGE,
    READ_STATE,
    ROUNDS,
    VERIFY,
    WRITE_PAGE,
    WRITE_STATE,
    Mode,
)
from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.kv_pages import SlotCopy, Transfer
from dflash_aot.runtime.scheduler.scheduler import (
    MixedPlan,
    PackedPlan,
    PrefillPlan,
    RoundPlan,
    RunningRequest,
)

# -- writes of the draft's kv, after prefills and rounds
#
# Rounds with K = 0 defer the write until a draft needs the kv. So an engine that stays at K = 0 calls kv_write once for
# many rounds. A call's time depends more on the weights that it reads than on the number of positions.

# The key of the request in a row, see `RunningRequest.key`; None for an empty row.
RowKey = tuple[int, int] | None
MAX_JOINED_BYTES = 4 * 2**20  # of features that the host joins in one step: about a millisecond


class DraftKvWriter:
    """Calls kv_write, and keeps the features of rounds with K = 0 whose kv is not written yet.

    These rounds follow one another with the same rows, and each advances every row by one position. `catch_up` must be
    called before any other call that reads or writes draft kv: pages of a request that has ended may have a new owner.

    The host joins the features of older rounds, which are done because outcomes are read one step late. Features of
    newer rounds stay on the device. So nothing waits for the device.
    """

    def __init__(self, bundle: LoadedBundle, state: DeviceState):
        self._bundle = bundle
        self._state = state
        self._widths = [k + 1 for k in bundle.manifest.grid.k if k <= bundle.k]
        self._rows: Sequence[RowKey] = []  # of the latest round
        # The page tables of the latest round; its rows keep the pages of the rounds before it.
        self._pages: jax.Array | None = None
        # Features [B, 1, F] and starts [B], oldest first.
        self._deferred: list[tuple[jax.Array, jax.Array]] = []

    def write(self, pages: jax.Array, features: jax.Array, starts: jax.Array) -> None:
        """Dispatches the write of features [B, T, F] at positions from `starts` on; nothing if no round drafts."""
        if self._bundle.k:
            rows, width, _ = features.shape
            run = self._bundle.find(KV_WRITE, (rows, width))
            run(self._state, pages=pages, features=features, starts=starts)

    def defer(
        self, rows: Sequence[RowKey], pages: jax.Array, features: jax.Array, starts: jax.Array
    ) -> None:
        """Keeps features [B, 1, F] of a round with K = 0 that was just dispatched. rows: see `RoundBatch.keys`."""
        if not self._bundle.k:
            return
        if rows != self._rows:
            self.catch_up()
        if 1 not in (widths := self._list_widths(features)):
            # The first call of kv_write takes longer. Rounds with first calls are not timed.
            self.write(pages, features, starts)
            return
        features.copy_to_host_async()
        self._rows, self._pages = rows, pages
        self._deferred.append((features, starts))
        if len(self._deferred) > widths[-1] + 1:  # the newest two rounds may be running
            self._write_oldest(widths[-1])

    def catch_up(self) -> None:
        """Dispatches the deferred writes. The newest round may be running."""
        if len(self._deferred) > 1:
            self._write_oldest(len(self._deferred) - 1)
        if self._deferred:
            self._write_oldest(1)

    def _list_widths(self, features: jax.Array) -> list[int]:
        """Widths for features [B, 1, F] whose executables were called before: a first call takes longer."""
        widest = max(1, MAX_JOINED_BYTES // features.nbytes)
        rows = features.shape[0]
        return [
            one
            for one in self._widths
            if one <= widest and self._bundle.has_run_kv_write(rows, one)
        ]

    def _write_oldest(self, count: int) -> None:
        """Makes a call, with zeros after the features: the kv of the zeros is overwritten before it is read."""
        oldest = self._deferred[:count]
        self._deferred = self._deferred[count:]
        features, starts = oldest[0]
        if count > 1:
            width = next(width for width in self._list_widths(features) if width >= count)
            features = self._state.join([one for one, _ in oldest], width)
        assert self._pages is not None
        self.write(self._pages, features, starts)


# -- the dispatcher

MAX_PAGE_TABLES = 64  # kept on the device; the oldest are evicted
# Results of a sampled verification, and of a scored prefill, in the order in which the host reads them.
TOP_LOGPROBS = ("top_tokens", "top_logprobs")
SCORES = ("logprobs", *TOP_LOGPROBS)
_NO_ENDS: frozenset[int] = frozenset()
PLACES = ("source", "destination")  # the arguments of `move` where no states are saved
STATE_COPIES = tuple(name + COPY for name in RECURRENT_STATE)
OFFLOADS_KEPT = 2  # steps whose copies to the host may be on their way
KEEP_ANCHOR = -1  # as the anchor of a sampling state: the slot keeps its anchor and its length


@dataclass(frozen=True)
class PrefillInFlight:
    """A dispatched prefill chunk whose results the host reads.

    Attributes:
        token: int32 [R], first tokens of answers, 0 where the chunk does not give it.
        scores: of a scored chunk, the log-probabilities [1, P] of the tokens after its positions,
            and the likeliest tokens [1, P, n] and their log-probabilities [1, P, n].
        row: of the chunk in its call.
    """

    plan: PrefillPlan
    token: jax.Array
    scores: Sequence[jax.Array] = ()
    row: int = 0


@dataclass(frozen=True)
class RoundInFlight:
    """A dispatched round, or multi-round step.

    Attributes:
        outcomes: int32 [B, 2K+2]: per slot the number of accepted tokens, the K drafted tokens,
            the target's K+1 choices. A sampled round appends the choices' log-probabilities,
            float32 bits: [B, 3K+3]. A multi-round step has [R, B, 2K+2], of each round, -1 for
            slots that took no part in it.
        top_logprobs: ids int32 and log-probabilities float32 [B, K+1, n]; empty where no request
            wants them.
        follows_round: nothing was dispatched between the previous round and this round, apart
            from writes of draft kv.
        waited: seconds that dispatching waited for drafted tokens.
    """

    plan: RoundPlan
    outcomes: jax.Array
    top_logprobs: Sequence[jax.Array]
    follows_round: bool
    waited: float = 0.0


class Dispatcher:
    """Calls a bundle's executables on one device state.

    Owns the small device arrays that calls take in addition to the state, and what the last multi-round step left over.
    """

    def __init__(self, bundle: LoadedBundle, state: DeviceState):
        self._bundle = bundle
        self._state = state
        self._to_device = state.to_device
        self._draft_kv = DraftKvWriter(bundle, state)
        manifest = bundle.manifest
        to_device = state.to_device
        # The caches hold nothing of an engine, so that a closed engine can be collected.
        self._active = functools.lru_cache(maxsize=256)(lambda mask: to_device(np.array(mask)))
        self._counts = functools.lru_cache(maxsize=256)(
            lambda count: to_device(np.array([count], np.int32))
        )
        self._ends = functools.lru_cache(maxsize=256)(
            lambda rows: to_device(np.stack([*map(_make_end_tokens, rows)]))
        )
        self._row_pages = manifest.grid.row_pages
        self._max_rounds = manifest.grid.rounds
        self._saves_states = manifest.grid.saved_states > 0
        self._pages: dict[tuple[int, ...], jax.Array] = {}  # by the versions of the rows' tables
        # The latest page tables by number of rows: versions and tables.
        self._latest: dict[int, tuple[Sequence[int], np.ndarray]] = {}
        self._flags = {flag: to_device(np.array([flag])) for flag in (False, True)}
        vocab = manifest.target.facts.decoder.vocab
        has_sampling = needs_sampling_state(manifest.sampling)
        self._sampling = SamplingStateWriter(bundle, state, vocab) if has_sampling else None
        self._mask_words = count_mask_words(vocab)
        self._waited = 0.0
        self._last_was_round = False
        # Of the last multi-round step: its rows, and how many tokens each has left to generate.
        self._left_over: tuple[Sequence[RunningRequest | None], jax.Array] | None = None
        self._offloads: deque[Sequence[Transfer]] = deque()  # of the latest steps
        self._restoring_bytes = 0  # of copies to the device since the last wait for it

    def reset(self) -> None:
        """Starts again with an empty device state, after a failure."""
        self._state.reset()
        self._forget_pending()
        self._left_over = None

    def release(self) -> None:
        """Frees the device state and the features that wait for the draft's kv; no call may follow."""
        self._state.release()
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._draft_kv = DraftKvWriter(self._bundle, self._state)
        self._offloads.clear()
        self._restoring_bytes = 0

    def has_run_prefill(self, plan: PrefillPlan) -> bool:
        """Whether every executable of a prefill chunk was called before: a first call takes longer."""
        return self._bundle.has_run_chunk(plan.chunk, plan.scored)

    def has_run_round(self, plan: RoundPlan) -> bool:
        """Whether every executable of a planned round was called before."""
        return self._bundle.has_run((plan.bucket, plan.batch.mode), plan.multi_round)

    def has_run_packed(self, plan: PackedPlan) -> bool:
        """Whether every executable of chunks of several prompts was called before."""
        return self._bundle.has_run_packed(plan.sizes)

    def has_run_mixed(self, plan: MixedPlan) -> bool:
        """Whether every executable of a round with a chunk was called before."""
        return self._bundle.has_run_mixed(plan.sizes, (plan.round.bucket, plan.round.batch.mode))

    def move(self, copy: SlotCopy) -> None:
        """Copies everything of one slot except its pages to another slot; or saves or restores its state."""
        if self._saves_states:
            self._draft_kv.catch_up()  # the page that is copied may lack draft kv, or be another request's soon
        numbers = copy._asdict() if self._saves_states else dict(zip(PLACES, copy[:2], strict=True))
        arguments = {name: self._number(number) for name, number in numbers.items()}
        self._bundle.find(MOVE)(self._state, **arguments)
        self._last_was_round = False

    @property
    def is_offloading(self) -> bool:
        """Whether copies are on their way to the host."""
        return any(self._offloads)

    def offload(self, transfers: Sequence[Transfer]) -> None:
        """Starts to copy pages and states to the host, and takes the copies that were started OFFLOADS_KEPT steps ago.

        Nothing waits: the device has finished these by now.
        """
        if len(self._offloads) == OFFLOADS_KEPT:
            for sent in self._offloads.popleft():
                copied = sent.copy.arrays.items()
                sent.copy.arrays = {name: np.asarray(array) for name, array in copied}
        if transfers:
            self._draft_kv.catch_up()
            self._last_was_round = False
        for copy, page, slot in transfers:
            arrays = (
                self._bundle.find(READ_PAGE)(self._state, index=self._number(page)) if page else {}
            )
            if slot is not None:
                arrays |= self._bundle.find(READ_STATE)(self._state, index=self._number(slot))
            for array in arrays.values():
                array.copy_to_host_async()
            copy.arrays = arrays
        self._offloads.append(transfers)

    def restore(self, transfer: Transfer) -> None:
        """Copies a page, or the state of a slot and its last page, from the host to the device."""
        self._draft_kv.catch_up()  # of the rows that had the page before
        copy, page, slot = transfer
        if self._restoring_bytes > 2 * TRANSFER_BYTES:
            self._state.wait()  # until the copies are in place: bounds their memory on the device
            self._restoring_bytes = 0
        arrays = {name: self._state.place(name, array) for name, array in copy.arrays.items()}
        self._restoring_bytes += copy.bytes
        states = {name: arrays.pop(name) for name in [*arrays] if name in STATE_COPIES}
        if page:
            self._bundle.find(WRITE_PAGE)(self._state, index=self._number(page), **arrays)
        if slot is not None:
            index = self._number(slot)
            length = self._number(copy.position)
            self._bundle.find(WRITE_STATE)(self._state, index=index, length=length, **states)
        self._last_was_round = False

    def prefill(self, plan: PrefillPlan) -> PrefillInFlight | None:
        """Prefills one chunk. Returns what the host reads of it: None without first token and scores."""
        self._draft_kv.catch_up()
        arguments = {
            "pages": self._find_pages((plan.running,)),
            "starts": self._number(plan.start),
            "counts": self._number(len(plan.tokens)),
            **self._make_chunk_arguments(plan, plan.chunk.prefill),
        }
        if plan.scored:
            arguments["next_tokens"] = self._pad(plan.next_tokens, plan.chunk.prefill)
        mode: Mode = "prompt_logprobs" if plan.scored else None
        results = self._bundle.find(PREFILL, plan.chunk.sizes, mode)(self._state, **arguments)
        self._draft_kv.write(arguments["pages"], results["features"], arguments["starts"])
        self._last_was_round = False
        return self._send_first_token(plan, results)

    def prefill_packed(self, plan: PackedPlan) -> list[PrefillInFlight | None]:
        """Prefills chunks of several prompts in one call. Returns of each what the host reads."""
        self._draft_kv.catch_up()
        rows, width, _ = plan.sizes
        chunks = plan.chunks
        pages = self._find_pages((*[one.running for one in chunks], *[None] * plan.empty_rows))
        tokens = np.zeros((rows, width), np.int32)
        places = np.zeros((3, rows), np.int32)
        gives_first = np.zeros(rows, np.bool_)
        for row, one in enumerate(chunks):
            tokens[row, : len(one.tokens)] = one.tokens
            places[:, row] = one.slot, one.start, len(one.tokens)
            gives_first[row] = one.gives_first_token
        slots, starts, counts = map(self._to_device, places)
        results = self._bundle.find(PACKED_PREFILL, plan.sizes)(
            self._state,
            pages=pages,
            tokens=self._to_device(tokens),
            slots=slots,
            starts=starts,
            counts=counts,
            gives_first=self._to_device(gives_first),
        )
        self._draft_kv.write(pages, results["features"], starts)
        self._last_was_round = False
        return [self._send_first_token(one, results, row) for row, one in enumerate(chunks)]

    def _make_chunk_arguments(self, plan: PrefillPlan, width: int) -> dict[str, jax.Array]:
        """The arguments that `prefill` and `mixed` have in common."""
        return {
            "tokens": self._pad(plan.tokens, width),
            "slots": self._number(plan.slot),
            "gives_first": self._flags[plan.gives_first_token],
        }

    def _send_first_token(
        self, plan: PrefillPlan, results: Mapping[str, jax.Array], row: int = 0
    ) -> PrefillInFlight | None:
        if not plan.gives_first_token and not plan.scored:
            return None
        token = results["first"]
        scores = [results[name] for name in SCORES] if plan.scored else []
        for array in (token, *scores):
            array.copy_to_host_async()
        return PrefillInFlight(plan, token, scores, row)

    def _pad(self, tokens: Sequence[int], width: int) -> jax.Array:
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(tokens)] = tokens
        return self._to_device(padded)

    def run_round(self, plan: RoundPlan) -> RoundInFlight:
        """Runs draft, verify and kv_write, or the rounds of a multi-round step; then sends the outcome to the host."""
        self._waited = 0.0
        outcomes, top_logprobs = (
            self._run_multi_round(plan) if plan.multi_round else self._run_single_round(plan)
        )
        follows_round = self._last_was_round
        self._last_was_round = True
        return self._send_outcomes(plan, outcomes, top_logprobs, follows_round)

    def run_mixed(self, plan: MixedPlan) -> tuple[PrefillInFlight | None, RoundInFlight]:
        """Runs draft, the verification with a chunk, and both kv_writes. Such a round is not timed as a round."""
        self._waited = 0.0
        self._draft_kv.catch_up()
        chunk = plan.chunk
        pages = self._find_pages((chunk.running,))
        starts = self._number(chunk.start)
        results = self._bundle.find(MIXED, plan.sizes, plan.round.batch.mode)(
            self._state,
            **self._prepare_round(plan.round),
            chunk_pages=pages,
            chunk_starts=starts,
            chunk_counts=self._number(len(chunk.tokens)),
            **self._make_chunk_arguments(chunk, plan.sizes[-1]),
        )
        self._draft_kv.write(pages, results["chunk_features"], starts)
        outcomes = self._finish_round(plan.round, results)
        self._last_was_round = False
        first = self._send_first_token(chunk, results)
        return first, self._send_outcomes(plan.round, *outcomes, follows_round=False)

    def _send_outcomes(
        self,
        plan: RoundPlan,
        outcomes: jax.Array,
        top_logprobs: Sequence[jax.Array],
        follows_round: bool,
    ) -> RoundInFlight:
        for array in (outcomes, *top_logprobs):
            array.copy_to_host_async()
        return RoundInFlight(plan, outcomes, top_logprobs, follows_round, self._waited)

    def _run_single_round(self, plan: RoundPlan) -> tuple[jax.Array, Sequence[jax.Array]]:
        arguments = self._prepare_round(plan)
        verify = self._bundle.find(VERIFY, plan.bucket.sizes, plan.batch.mode)
        return self._finish_round(plan, verify(self._state, **arguments))

    def _prepare_round(self, plan: RoundPlan) -> dict[str, jax.Array]:
        """Drafts. Returns what the verification of a single round takes."""
        self._left_over = None
        self._write_sampling_states(plan)
        bucket = plan.bucket
        batch = plan.batch
        pages = self._find_pages(plan.rows)
        arguments = {"pages": pages, "active": self._active(plan.active)}
        if bucket.k:
            self._draft_kv.catch_up()
            drafting = {"pages": pages}
            if self._sampling is not None:
                drafting["sampled"] = self._flags[batch.mode != "greedy"]
                drafting["penalised"] = self._flags[batch.is_penalised]
            arguments |= self._bundle.find(DRAFT, bucket.sizes)(self._state, **drafting)
        if self._saves_states:
            arguments["ends"] = self._find_ends(plan.rows)
        if batch.mode == "constrain":
            arguments |= self._make_masks(plan, arguments.get("block"))
        return arguments

    def _finish_round(
        self, plan: RoundPlan, results: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Sequence[jax.Array]]:
        """Writes or defers the draft's kv. Returns the outcomes and the likeliest tokens."""
        batch = plan.batch
        pages = self._find_pages(plan.rows)
        features = results["features"]
        starts = results["starts"]
        if plan.bucket.k:
            self._draft_kv.write(pages, features, starts)
        else:
            self._draft_kv.defer(batch.keys, pages, features, starts)
        wanted = TOP_LOGPROBS if batch.logprobs and batch.mode != "greedy" else ()
        return results["verdict"], [results[name] for name in wanted]

    def _make_masks(self, plan: RoundPlan, drafted: jax.Array | None) -> dict[str, jax.Array]:
        """The block to verify and the mask of allowed tokens, by the grammars and the min_tokens of the requests."""
        bucket = plan.bucket
        began = time.perf_counter()
        block = None if drafted is None else np.array(drafted)  # waits
        self._waited = time.perf_counter() - began
        masks = np.full((bucket.batch, bucket.k + 1, self._mask_words), ALL_ALLOWED, np.int32)
        for slot, running in enumerate(plan.batch.by_slot):
            if running is None or running.request.output.finish_reason:
                continue
            if matcher := running.request.matcher:
                guesses = [] if block is None else block[slot, 1:].tolist()
                tokens, masks[slot] = matcher.mask_block(guesses)
                if block is not None:
                    block[slot, 1:] = tokens
            if count := running.request.tokens_to_stop:
                forbid_tokens(masks[slot, :count], running.request.ending_token_ids)
        masked = {"allowed": self._to_device(masks)}
        return masked if block is None else {**masked, "block": self._to_device(block)}

    def _run_multi_round(self, plan: RoundPlan) -> tuple[jax.Array, Sequence[jax.Array]]:
        """Up to `plan.rounds` rounds of each request, until it has its tokens or an end token came.

        Only the device knows exactly how many tokens are left after the last multi-round step. If other requests take
        part now, the host's upper bounds are used: a request that is done costs a wasted row until its outcome is read.
        """
        self._draft_kv.catch_up()
        rows = plan.rows
        if self._left_over and self._left_over[0] == rows:
            left = self._left_over[1]
        else:
            left = self._to_device(np.array(plan.tokens_outstanding, np.int32))
        arguments = {
            "pages": self._find_pages(rows),
            "count": self._counts(plan.rounds),
            "left": left,
            "ends": self._find_ends(rows),
            "active": self._active(plan.active),
            "stop_early": self._flags[plan.stop_early],
        }
        if plan.bucket.k and plan.batch.mode != "greedy":
            arguments["penalised"] = self._flags[plan.batch.is_penalised]
        sizes = (*plan.bucket.sizes, self._max_rounds)
        results = self._bundle.find(ROUNDS, sizes, plan.batch.mode)(self._state, **arguments)
        self._left_over = rows, results["left_over"]
        return results["verdicts"], ()

    def _find_ends(self, rows: Sequence[RunningRequest | None]) -> jax.Array:
        return self._ends(tuple([running.ends if running else _NO_ENDS for running in rows]))

    def _write_sampling_states(self, plan: RoundPlan) -> None:
        for running in plan.new_sampling_states:
            assert self._sampling is not None, (
                "the request builder refuses sampling where nothing samples"
            )
            self._sampling.write(running, plan.batch.by_slot.index(running))
            self._last_was_round = False

    def _find_pages(self, by_row: Sequence[RunningRequest | None]) -> jax.Array:
        """The page tables of a call with these rows. Rows without a request have no pages: they write to page 0."""
        versions = tuple([running.table.version if running else 0 for running in by_row])
        if (tables := self._pages.get(versions)) is None:
            if len(self._pages) >= MAX_PAGE_TABLES:
                del self._pages[next(iter(self._pages))]
            tables = self._pages[versions] = self._to_device(self._make_tables(by_row, versions))
        return tables

    def _make_tables(
        self, by_row: Sequence[RunningRequest | None], versions: tuple[int, ...]
    ) -> np.ndarray:
        """int32 [rows, row_pages]: the pages of each row, then 0. Few rows differ from the latest tables."""
        rows = len(by_row)
        before, latest = self._latest.get(rows) or (
            [0] * rows,
            np.zeros((rows, self._row_pages), np.int32),
        )
        tables = latest.copy()  # the device may read the latest tables in place
        for row, running in enumerate(by_row):
            if versions[row] != before[row]:
                pages = running.table.pages if running else ()
                tables[row, : len(pages)], tables[row, len(pages) :] = pages, 0
        self._latest[rows] = versions, tables
        return tables

    def _number(self, number: int) -> jax.Array:
        return self._to_device(np.array([number], np.int32))


def forbid_tokens(masks: np.ndarray, tokens: Iterable[int]) -> None:
    """Clears the bits of `tokens` in masks int32 [n, words], except at positions that allow nothing else."""
    forbidden = np.zeros(masks.shape[-1], np.uint32)
    for token in tokens:
        word, bit = divmod(token, MASK_BITS)
        forbidden[word] |= np.uint32(1 << bit)
    left = masks & ~forbidden.view(np.int32)
    masks[...] = np.where(left.any(axis=-1, keepdims=True), left, masks)


def _make_end_tokens(ends: frozenset[int]) -> np.ndarray:
    """int32 [MAX_STOP_TOKENS]: end tokens that the device looks for."""
    listed = np.full(MAX_STOP_TOKENS, -1, np.int32)
    listed[: len(ends)] = sorted(ends)
    return listed


class SamplingStateWriter:
    """Writes sampling parameters to slots by the `admit` executable.

    Most requests have no bias and need no prompt mask: those arrays are placed on the device once.
    """

    def __init__(self, bundle: LoadedBundle, state: DeviceState, vocab: int):
        self._bundle = bundle
        self._state = state
        self._vocab = vocab
        self._no_bias = state.to_device(np.zeros((1, vocab), np.float32))
        self._no_mask = state.to_device(np.zeros((1, vocab), np.bool_))
        self._no_counts = state.to_device(np.zeros((1, vocab), np.int32))

    def write(self, running: RunningRequest, slot: int) -> None:
        """Dispatches the write. A sampled request starts at the last token of its text; others keep their anchor."""
        params = running.request.params
        prompt = running.request.prompt
        anchor = running.text[-1] if running.sampled else KEEP_ANCHOR
        to_device = self._state.to_device
        seed = secrets.randbits(64) if params.seed is None else params.seed
        counts_prompt = params.repetition_penalty != 1
        self._bundle.find(ADMIT)(
            self._state,
            slots=to_device(np.array([slot], np.int32)),
            starts=to_device(np.array([len(running.text) - 1], np.int32)),
            anchor=to_device(np.array([anchor], np.int32)),
            slot_sampling=to_device(self._make_columns(params)),
            slot_seeds=to_device(split_seed(seed)),
            slot_bias=self._make_bias(params),
            slot_prompted=self._make_prompt_mask(prompt) if counts_prompt else self._no_mask,
            slot_counts=self._make_counts(running.text[len(prompt) :]),
            slot_tops=to_device(np.array([bool(params.logprobs)], np.int32)),
        )

    def _make_columns(self, params: SamplingParams) -> np.ndarray:
        """float32 [1, columns]. A top_k of the whole vocabulary is no limit, and may be too large for a float."""
        asked = {name: getattr(params, name) for name in SAMPLING_COLUMNS}
        asked["top_k"] = 0 if params.top_k >= self._vocab else params.top_k
        return np.array([list(asked.values())], np.float32)

    def _make_bias(self, params: SamplingParams) -> jax.Array:
        if not params.logit_bias:
            return self._no_bias
        bias = np.zeros((1, self._vocab), np.float32)
        bias[0, list(params.logit_bias)] = list(params.logit_bias.values())
        return self._state.to_device(bias)

    def _make_counts(self, output: Sequence[int]) -> jax.Array:
        """How often each token is in the output that a preempted request has already."""
        if not output:
            return self._no_counts
        return self._state.to_device(
            np.bincount(output, minlength=self._vocab).astype(np.int32)[None]
        )

    def _make_prompt_mask(self, prompt: Sequence[int]) -> jax.Array:
        mask = np.zeros((1, self._vocab), np.bool_)
        mask[0, prompt] = True
        return self._state.to_device(mask)


def split_seed(seed: int) -> np.ndarray:
    """64 bits → int32 [1, 2]: the high half, the low half."""
    halves = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
    return np.array([halves], np.uint32).view(np.int32)
