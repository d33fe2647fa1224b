"""A device in plain Python with the interface of LoadedBundle and DeviceState, whose answers can be worked out by hand.

The toy's kv is the text: each position of a page holds the token that was written there, or STALE. So the toy detects
what a real device executes silently: a read of an unwritten position, a write to a page that others read, a host array
as an argument, state that a failed call has spent. Two clocks, of device and host, give latencies.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_aot.cache.arrays import KV_POOLS, KvShape, PairShapes, RecurrentShape
from dflash_aot.cache.grid import Bucket, Chunk, Grid, parse_grid
from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_COLUMNS, count_top_logprobs
from dflash_aot.cache.signature import (
    KV_WRITE,
    MIXED,
    ROUNDS,
    VERIFY,
    Mode,
    Program,
    ProgramWeights,
    RoundShape,
    Signature,
    Sizes,
    list_signatures,
)
from dflash_aot.runtime.engine_loop import EngineLoop
from dflash_aot.runtime.executables.executable import join_features
from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.runtime.requests.request import Delta, Request, RequestProgress
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.kv_pages import OffloadCosts
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from dflash_aot.runtime.scheduler.scheduler import Scheduler
from dflash_aot.runtime.speculation.controller import FixedK, SpeculationController

VOCAB = 97
STALE = -1  # written by no request
PAGE = 4
GRID = f"batch=1,2,4,8 length=16,64 k=0,3,7 prefill=4,16 page={PAGE}"
BLOCK = 8
FEATURES = 3  # numbers of a position, see make_features
NO_KV = KvShape(1, 1, 1)
RECURRENT = RecurrentShape(1, 1, 1, 1, 1, 1)
NO_COSTS: Mapping[str, float] = {}
COPYING = ("move", "read_page", "write_page", "read_state", "write_state")
GREEDY = SamplingParams()


class Misuse(BaseException):
    """A wrong call, which a real device would execute silently. Not an Exception: the loop recovers from those."""


class Fault(Exception):
    """The failure of a program that a test told to fail."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Misuse(what)


# -- the models


@dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters of a slot. forced: the one token that has a bias."""

    temperature: float = 0.0
    seed: int = 0
    frequency: float = 0.0
    repetition: float = 1.0
    prompted: int = 0  # different tokens of the prompt
    forced: int | None = None
    tops: bool = False


def next_token(text: Sequence[int]) -> int:
    """The target's choice, 1 + Σ place · token modulo VOCAB: every token counts, and where it stands."""
    return (1 + sum(place * token for place, token in enumerate(text, 1))) % VOCAB


def pick(text: Sequence[int], sampling: SlotSampling, said: int) -> int:
    """The next token under `sampling` after `said` tokens of output; neutral parameters: the target's choice."""
    if sampling.forced is not None:
        return sampling.forced
    token = next_token(text)
    if sampling.temperature and (len(text) + sampling.seed) % 3 == 0:
        token += round(10 * sampling.temperature) + sampling.seed
    if sampling.frequency:
        token += said
    if sampling.repetition != 1:
        token += sampling.prompted
    return token % VOCAB


def continue_alone(prompt: Sequence[int], count: int, params: SamplingParams = GREEDY) -> list[int]:
    """The slow, obvious path: one request, one token at a time."""
    sampling = SlotSampling(
        params.temperature,
        (params.seed or 0) % (1 << 64),
        params.frequency_penalty,
        params.repetition_penalty,
        len(set(prompt)),
        next(iter(params.logit_bias or ()), None),
    )
    text = [*prompt]
    for said in range(count):
        text.append(pick(text, sampling, said))
    return text[len(prompt) :]


def guess(text: Sequence[int], right: int, k: int) -> list[int]:
    """The draft: `right` greedy tokens, then wrong ones."""
    guessed = [*text]
    for place in range(k):
        guessed.append((next_token(guessed) + (place >= right)) % VOCAB)
    return guessed[len(text) :]


Right = Callable[[Sequence[int]], int]  # of a text, how many tokens the draft gets right


def always(count: int) -> Right:
    """A draft that is right for `count` tokens, whatever the text."""
    return lambda text: count


ALL_RIGHT = always(BLOCK)


def by_first_token(text: Sequence[int]) -> int:
    """A draft that is right for as many tokens as the text's first one says."""
    return text[0]


# -- the device


@dataclass(frozen=True)
class Call:
    """One call of a program, or "read PROGRAM" when the host read its result.

    `slots`: those that it was for, of a verification the active ones. `heads`: the first token of each one's text.
    `anchor`: of an admission.
    """

    program: str
    bucket: Bucket | Chunk | tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    anchor: int | None = None


@dataclass
class Clock:
    """Simulated seconds: what the host has waited for, and when the device is done with what is enqueued."""

    host: float = 0.0
    device: float = 0.0

    def enqueue(self, cost: float) -> float:
        """The time at which a call of this cost is done."""
        self.device = max(self.device, self.host) + cost
        return self.device


@dataclass(eq=False)
class ToyArray:
    """A device array: the host may read it only after it was sent."""

    values: Any
    on_read: Callable[[], None] = lambda: None
    sent: bool = False

    def copy_to_host_async(self) -> None:
        self.sent = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        require(self.sent, "an array is read that was not sent to the host when it was made")
        self.on_read()
        return np.array(self.values)


@dataclass
class Slot:
    """A slot: what the next round starts with, and the sampling parameters. head: the first token of its text.

    state: of a hybrid, which is a grid with saved states: the tokens that the recurrent state has read.
    """

    length: int = 0
    anchor: int = STALE
    sampling: SlotSampling | None = None
    said: int = 0
    head: int = STALE
    state: tuple[int, ...] | None = None

    def advance(self, text: Sequence[int], tokens: Sequence[int]) -> None:
        """The recurrent state reads `tokens` after `text`."""
        if self.state is not None:
            require(not text or self.state == tuple(text), f"the state of {self.state} goes on after {text}")
            self.state = (*text, *tokens)


@dataclass(frozen=True)
class Row:
    """A row of a call: its slot, and the pages of its table in both kv pools."""

    slot: Slot
    table: tuple[int, ...]
    pools: Mapping[str, list[list[int]]]

    def read(self, kv: str, length: int) -> list[int]:
        """The tokens at the first positions."""
        pool = self.pools[kv]
        return [token for page in self.table for token in pool[page]][:length]

    @property
    def text(self) -> list[int]:
        """The committed tokens, which attention sees."""
        text = self.read("target", self.slot.length)
        require(len(text) == self.slot.length, f"{self.slot.length} positions are read, and the table is shorter")
        require(STALE not in text, f"positions of {text} are read that were never written")
        return text

    def write(self, kv: str, start: int, tokens: Sequence[int]) -> None:
        """Writes as the device does: the next pages get what lies behind the tokens, page 0 what has no page."""
        pool, width = self.pools[kv], min(PAGE, len(tokens))
        entry, offset = divmod(start, PAGE)
        parts = 1 if len(tokens) == 1 else 2 + (len(tokens) - 2) // PAGE
        for part in range(parts):
            page = pool[self.table[entry + part]] if entry + part < len(self.table) else pool[0]
            for at in range(offset if part == 0 else 0, PAGE if part == 0 else width):
                token = part * PAGE - offset + at
                if part or token < len(tokens):
                    page[at] = tokens[token] if token < len(tokens) else STALE
        pool[0][:] = [STALE] * PAGE


def make_features(rows: Sequence[Row], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """Features [B, T, 3], which tell where kv_write must write them: token + 1, position, first page of the row."""
    columns = [
        [(token + 1, start + at, row.table[0]) for at, token in enumerate(written)]
        for row, start, written in zip(rows, starts, tokens, strict=True)
    ]
    return np.array(columns, np.int32)


class ToyState:
    """Stands for DeviceState: a failed call spends it."""

    recovers = True

    def __init__(self, grid: Grid):
        self._grid = grid
        self.resets = -1
        self.reset()

    def reset(self) -> None:
        saved = self._grid.saved_states
        count = 1 + self._grid.pool_pages + saved
        self.pools = {kv: [[STALE] * PAGE for _ in range(count)] for kv in ("target", "draft")}
        self.slots = [Slot(state=() if saved else None) for _ in range(self._grid.slots + saved)]
        self._spent = False
        self.resets += 1

    def to_device(self, array: np.ndarray) -> ToyArray:
        """No copy: on a CPU a device may go on reading the host's own memory."""
        return ToyArray(array)

    def place(self, name: str, array: np.ndarray | ToyArray) -> ToyArray:
        return array if isinstance(array, ToyArray) else ToyArray(array)

    def join(self, features: Sequence[ToyArray], width: int) -> ToyArray:
        return self.to_device(join_features(features, width))

    @contextmanager
    def donate(self) -> Iterator[list[Slot]]:
        require(not self._spent, "state is used that a failed call has spent")
        self._spent = True
        yield self.slots
        self._spent = False


def make_bucket(signature: Signature) -> Bucket | Chunk | Sizes:
    """The sizes of a call as the tests name them."""
    match tuple(signature.bucket.items()):
        case (("batch", batch), ("length", length), ("k", k), *_):
            return Bucket(batch, length, k)
        case (("prefill", prefill), ("length", length)):
            return Chunk(prefill, length)
    return tuple(signature.bucket.values())


class ToyBundle:
    """Stands for LoadedBundle. costs: simulated seconds per program. cold: no executable was called yet."""

    def __init__(
        self,
        grid: Grid,
        k: int,
        sampling: Sequence[str] = ("greedy", "sample"),
        right: Right = ALL_RIGHT,
        costs: Mapping[str, float] = NO_COSTS,
        cold: bool = False,
    ):
        facts = SimpleNamespace(decoder=SimpleNamespace(vocab=VOCAB))
        self.manifest = SimpleNamespace(grid=grid, sampling=tuple(sampling), target=SimpleNamespace(facts=facts))
        self.k, self._right, self._costs, self._cold = k, right, costs, cold
        self.log: list[Call] = []
        self._drawn: bool | None = None  # whether the last call of a draft drew, until its block is verified
        self._penalised = False  # whether it looked penalties up
        self.ran = 0  # rounds of dispatches that run several
        self.clock = Clock()
        self.on_read: Callable[[], None] = lambda: None  # what happens meanwhile
        self._faults: Counter[str] = Counter()
        pair = PairShapes(
            NO_KV, NO_KV, FEATURES, BLOCK, VOCAB, "int32", tuple(sampling), RECURRENT if grid.saved_states else None
        )
        listed = list_signatures(pair, grid, ProgramWeights((), (), ()))
        self._signatures = {one.executable_id: one for one in listed}
        self._run = {
            "prefill": self._prefill,
            "scored_prefill": self._scored_prefill,
            "draft": self._draft,
            "verify": self._verify,
            "sampled_verify": self._sampled_verify,
            "kv_write": self._kv_write,
            "rounds": self._rounds,
            "sampled_rounds": partial(self._rounds, sampled=True),
            "packed_prefill": self._packed,
            "mixed": self._mixed,
            "sampled_mixed": partial(self._mixed, sampled=True),
            "move": self._move,
            "admit": self._admit,
            "read_page": self._read_page,
            "write_page": self._write_page,
            "read_state": self._read_state,
            "write_state": self._write_state,
        }

    def fail(self, program: str, times: int = 1) -> None:
        """Makes the next calls of `program` fail; "read verify" makes reading its results fail."""
        self._faults[program] += times

    def has_run(self, shape: RoundShape, multi_round: bool) -> bool:
        bucket, mode = shape
        return self._has_called((ROUNDS if multi_round else VERIFY).name(mode), bucket)

    def has_run_chunk(self, chunk: Chunk, scored: bool = False) -> bool:
        return self._has_called("scored_prefill" if scored else "prefill", chunk)

    def has_run_packed(self, sizes: Sizes) -> bool:
        return self._has_called("packed_prefill", sizes)

    def has_run_mixed(self, sizes: Sizes, shape: RoundShape) -> bool:
        return self._has_called(MIXED.name(shape[1]), Bucket(*sizes[:3]))

    def has_run_kv_write(self, rows: int, width: int) -> bool:
        return self._has_called("kv_write", (rows, width))

    def _has_called(self, program: str, bucket: Bucket | Chunk | tuple[int, ...]) -> bool:
        return not self._cold or any(call.program == program and call.bucket == bucket for call in self.log)

    def find(self, program: Program, sizes: Sizes = (), mode: Mode = None) -> Callable[..., dict[str, ToyArray]]:
        name = program.name(mode)
        require((name, sizes) in self._signatures, f"there is no {name} of {sizes}")
        signature = self._signatures[name, sizes]
        require(signature.bucket.get("k", 0) <= self.k, f"no round verifies {sizes}")
        require(self.k > 0 or program is not KV_WRITE, "no round drafts")
        return partial(self._call, signature)

    def _call(self, signature: Signature, state: ToyState, **arguments: ToyArray) -> dict[str, ToyArray]:
        """The function of a program takes bucket, slots and arguments; returns the slots for the log, and results."""
        program, bucket = signature.program, make_bucket(signature)
        require(all(isinstance(one, ToyArray) for one in arguments.values()), f"{program} is given a host array")
        expected = [array.name for array in signature.arguments]
        require(sorted(arguments) == sorted(expected), f"{program} takes {expected}, not {[*arguments]}")
        done = self.clock.enqueue(self._costs.get(program, 0.0))
        with state.donate() as slots:
            self._break(program)
            values, rows = {name: one.values for name, one in arguments.items()}, slots
            if "chunk_pages" in values:
                chunk = {"pages": values.pop("chunk_pages"), "slots": values["slots"]}
                values["chunk_rows"] = self._make_rows(program, state, chunk)
            if "pages" in values:
                rows = self._make_rows(program, state, values)
                del values["pages"]
            if program in COPYING:
                values["pools"] = state.pools
            used, results, *anchor = self._run[program](bucket, rows, **values)
            for row in rows if "target_k" in signature.donated and program not in COPYING else ():
                row.slot.head = row.read("target", 1)[0] if any(row.table) else row.slot.head
        heads = tuple(slots[slot].head for slot in used)
        self.log.append(Call(program, bucket, tuple(used), heads, *anchor))
        reads = partial(self._read, bucket=bucket, slots=tuple(used), heads=heads, done=done)
        names = [array.name for array in signature.results]
        return {
            name: ToyArray(result, partial(reads, f"{program} features" if name == "features" else program))
            for name, result in zip(names, results, strict=True)
        }

    def _make_rows(self, program: str, state: ToyState, values: Mapping[str, Any]) -> list[Row]:
        """The rows of a call: those of the first slots, of a prefill its slots; kv_write needs no slots."""
        grid, tables = self.manifest.grid, values["pages"]
        require(tables.shape[1] == grid.row_pages, f"page tables of {program} have the shape {tables.shape}")
        require(tables.min() >= 0 and tables.max() <= grid.pool_pages, f"{tables} names pages that do not exist")
        is_chunk = "slots" in values and "chunk_rows" not in values
        slots = [state.slots[slot] for slot in values["slots"]] if is_chunk else state.slots
        require(all(len(set(row[row > 0])) == sum(row > 0) for row in tables), f"{tables} names a page twice in a row")
        return [Row(slot, tuple(map(int, table)), state.pools) for slot, table in zip(slots, tables, strict=False)]

    def _read(self, program: str, bucket: Any, slots: tuple[int, ...], heads: tuple[int, ...], done: float) -> None:
        self.on_read()
        is_outcome = not program.endswith("features")
        require(is_outcome or done <= self.clock.host, f"{program} are read, and the device is not done")
        self.clock.host = max(self.clock.host, done)
        self._break(f"read {program}")
        self.log.append(Call(f"read {program}", bucket, slots, heads))

    def _break(self, what: str) -> None:
        if self._faults[what]:
            self._faults[what] -= 1
            self._drawn = None
            raise Fault(f"{what} was told to fail")

    # -- programs: of the bucket, the slots and the arguments

    def _prefill(
        self, chunk: Chunk, rows: list[Row], tokens: Any, slots: Any, starts: Any, counts: Any, gives_first: Any
    ) -> Any:
        (row,), start, count = rows, int(starts[0]), int(counts[0])
        require(0 < count <= chunk.prefill and start + count <= chunk.length, f"{count} at {start} are too many")
        part = [*map(int, tokens[0, :count])]
        padded = (*part, *[STALE] * (chunk.prefill - count))
        row.slot.length = start
        require(row.text == row.read("draft", start) or not self.k, f"a chunk starts behind {start} without their kv")
        row.slot.advance(row.text, part)
        row.write("target", start, padded)
        row.slot.length = start + count
        row.slot.anchor = next_token(row.text) if gives_first[0] else STALE
        return [int(slots[0])], (make_features(rows, (start,), (padded,)), [row.slot.anchor])

    def _scored_prefill(self, chunk: Chunk, rows: list[Row], next_tokens: Any, **arguments: Any) -> Any:
        used, results = self._prefill(chunk, rows, **arguments)
        tokens = (next_tokens[..., None] + np.arange(count_top_logprobs(VOCAB))) % VOCAB
        return used, (*results, logprob(next_tokens), tokens, logprob(tokens))

    def _packed(self, sizes: Sizes, rows: list[Row], **given: Any) -> Any:
        chunk = Chunk(*sizes[1:])
        counts = given["counts"].tolist()
        require(len(rows) == len(counts) == sizes[0], f"{len(rows)} page tables and {len(counts)} counts in {sizes}")
        used, features, first = [], np.zeros((*sizes[:2], 3), np.int32), [0] * sizes[0]
        for at, count in enumerate(counts):
            require(count > 0 or not any(rows[at].table), f"row {at} has pages and no tokens")
            if count:
                own = {name: array[at : at + 1] for name, array in given.items()}
                slot, (features[at : at + 1], (first[at],)) = self._prefill(chunk, [rows[at]], **own)
                used += slot
        require(len({*used}) == len(used), f"slots {used} in one call")
        return used, (features, first)

    def _mixed(
        self, bucket: Bucket, rows: list[Row], chunk_rows: list[Row], sampled: bool = False, **given: Any
    ) -> Any:
        names = ("tokens", "slots", "chunk_starts", "chunk_counts", "gives_first")
        chunk = {name.removeprefix("chunk_"): given.pop(name) for name in names}
        used, results = (self._sampled_verify if sampled else self._verify)(bucket, rows, **given)
        require(int(chunk["slots"][0]) not in used, "the slot of a chunk is a row of the round")
        width = Chunk(self.manifest.grid.prefill[-1], bucket.length)
        _, prefilled = self._prefill(width, chunk_rows, **chunk)
        return used, (*results, *prefilled)

    def _draft(self, bucket: Bucket, rows: list[Row], sampled: Any = (False,), penalised: Any = (False,)) -> Any:
        self._drawn, self._penalised = bool(sampled[0]), bool(penalised[0])
        require(len(rows) == bucket.batch, f"{len(rows)} page tables in {bucket}")
        return range(bucket.batch), ([[row.slot.anchor, *self._guess(row, bucket.k)] for row in rows],)

    def _guess(self, row: Row, k: int) -> list[int]:
        """An inactive row may hold anything; only the verification knows which rows are active."""
        text = row.read("target", row.slot.length)
        if STALE in (*text, row.slot.anchor) or row.read("draft", row.slot.length) != text:
            return [STALE] * k
        text = [*text, row.slot.anchor]
        return guess(text, self._right(text), k)

    def _verify(
        self, bucket: Bucket, rows: list[Row], active: Any, block: Any = None, ends: Any = None, sampled: bool = False
    ) -> Any:
        drawn, self._drawn = self._drawn, None
        require(drawn in (None, sampled), "the draft draws and the verification does not, or vice versa")
        if drawn:
            self._require_penalised([row.slot for row, on in zip(rows, active, strict=True) if on], self._penalised)
        block = block if bucket.k else [[row.slot.anchor] for row in rows]
        require(len(active) == len(block) == bucket.batch == len(rows), f"{len(block)} rows, {len(active)} flags")
        starts = tuple(row.slot.length for row in rows)
        samplinges = [row.slot.sampling if sampled else SlotSampling() for row in rows]
        stops = [()] * len(rows) if ends is None else ends.tolist()
        found = [_verify_row(bucket, *row) for row in zip(rows, block, active, samplinges, stops, strict=True)]
        written, outcome = zip(*found, strict=True)
        features = make_features(rows, starts, written)
        return [slot for slot, on in enumerate(active) if on], (features, starts, np.array(outcome, np.int32))

    def _require_penalised(self, slots: Sequence[Slot], flag: bool) -> None:
        asked = [one.sampling for one in slots if one.sampling is not None]
        found = any(one.frequency or one.repetition != 1 or one.forced is not None for one in asked)
        require(flag == found, f"the draft is told that penalties are {flag}, and they are {found}")

    def _sampled_verify(self, bucket: Bucket, rows: list[Row], **arguments: Any) -> Any:
        used, (features, starts, outcome) = self._verify(bucket, rows, **arguments, sampled=True)
        chosen, count = outcome[:, bucket.k + 1 :], count_top_logprobs(VOCAB)
        tokens = (chosen[..., None] + np.arange(count)) % VOCAB
        wanted = any(rows[slot].slot.sampling.tops for slot in used)
        tops = [array * wanted for array in (tokens, logprob(tokens))]
        bits = logprob(chosen).view(np.int32)
        return used, (features, starts, np.concatenate([outcome, bits], axis=1), *tops)

    def _rounds(
        self,
        bucket: Bucket,
        rows: list[Row],
        count: Any,
        left: Any,
        ends: Any,
        active: Any,
        stop_early: Any,
        penalised: Any = None,
        sampled: bool = False,
    ) -> Any:
        """Runs draft, verification and kv_write in turn, as long as a row has tokens left."""
        most, left = self.manifest.grid.rounds, [*map(int, left)]
        require(0 < count[0] <= most, f"{count[0]} rounds of {most}")
        require(len(rows) == len(left) == len(ends) == len(active) == bucket.batch, f"{len(left)} rows in {bucket}")
        outcomes = np.full((most, bucket.batch, 2 * bucket.k + 2), -1, np.int32)
        used = [slot for slot, on in enumerate(active) if on]
        if penalised is not None:
            self._require_penalised([rows[slot].slot for slot in used], bool(penalised[0]))
        for done in range(count[0]):
            running = [slot for slot in used if left[slot] > 0]
            if not running or (done and stop_early[0] and len(running) < len(used)):
                break
            self.ran += 1
            for slot, row in enumerate(rows):
                start, block = row.slot.length, [row.slot.anchor, *self._guess(row, bucket.k)]
                sampling = row.slot.sampling if sampled else SlotSampling()
                stops = ends[slot].tolist() if self.manifest.grid.saved_states else ()
                written, outcome = _verify_row(bucket, row, block, slot in running, sampling, stops)
                row.write("draft", start, written)
                if slot in running:
                    outcomes[done, slot], chosen = outcome, outcome[bucket.k + 1 :][: outcome[0] + 1]
                    left[slot] = 0 if set(chosen) & set(map(int, ends[slot])) else left[slot] - len(chosen)
        return used, (outcomes, np.array(left))

    def _kv_write(self, sizes: tuple[int, int], rows: list[Row], features: Any, starts: Any) -> Any:
        require(sizes == features.shape[:2] == (len(rows), sizes[1]), f"features of another shape than {sizes}")
        for row, start, columns in zip(rows, starts, features, strict=True):
            given = [column for column in columns.tolist() if any(column)]  # zeros are padding
            places = [(int(start) + at, row.table[0]) for at in range(len(given))]
            idle = not any(row.table) and not any(page for *_, page in given)  # a row without a request stays in place
            found = [(at, page) for _, at, page in given]
            if self.manifest.grid.saved_states:  # rows stop at end tokens
                found = [max(one, place) for one, place in zip(found, places, strict=True)]
            require(idle or found == places, f"features of {found} are written as those of {places}")
            row.write("draft", int(start), [token - 1 for token, *_ in columns.tolist()])
        return (), ()

    def _admit(self, _: Any, all_slots: list[Slot], slots: Any, starts: Any, anchor: Any, **given: Any) -> Any:
        slot = all_slots[slots[0]]
        asked = {name.removeprefix("slot_"): array[0] for name, array in given.items()}
        slot.said = int(asked.pop("counts").sum())
        slot.sampling = read_sampling(**asked)
        if anchor[0] >= 0:
            slot.length, slot.anchor = int(starts[0]), int(anchor[0])
        return [int(slots[0])], (), int(anchor[0])

    def _read_page(self, _: Any, slots: list[Slot], pools: Any, index: Any) -> Any:
        return (), [np.array(pools[name.split("_")[0]][index[0]]) for name in KV_POOLS]

    def _write_page(self, _: Any, slots: list[Slot], pools: Any, index: Any, **copies: Any) -> Any:
        require(index[0] > 0, "a page is copied over the page of no request")
        for name in KV_POOLS:
            pools[name.split("_")[0]][index[0]] = copies[f"{name}_copy"].tolist()
        return (), ()

    def _read_state(self, _: Any, slots: list[Slot], pools: Any, index: Any) -> Any:
        return (), [np.array(slots[index[0]].state), np.zeros(1)]

    def _write_state(
        self, _: Any, slots: list[Slot], pools: Any, index: Any, length: Any, recurrent_states_copy: Any, **rest: Any
    ) -> Any:
        slots[index[0]].state = tuple(recurrent_states_copy.tolist())
        slots[index[0]].length = int(length[0])
        return (), ()

    def _move(
        self, _: Any, all_slots: list[Slot], pools: Any, source: Any, destination: Any, length: Any = (), **pages: Any
    ) -> Any:
        at, to = int(source[0]), int(destination[0])
        if max(at, to) < self.manifest.grid.slots:
            all_slots[to] = replace(all_slots[at])
            return [at, to], ()
        all_slots[to].state = all_slots[at].state
        for pool in pools.values():
            pool[pages["destination_page"][0]] = [*pool[pages["source_page"][0]]]
        if to < self.manifest.grid.slots:
            all_slots[to].length = int(length[0])
        return [at, to], ()


def _verify_row(
    bucket: Bucket,
    row: Row,
    block: Sequence[int],
    active: bool,
    sampling: SlotSampling | None,
    stops: Sequence[int] = (),
) -> tuple[tuple[int, ...], list[int]]:
    """One row of a verification: the tokens it writes to the kv, and its outcome. Inactive rows give no text."""
    slot, start, width = row.slot, row.slot.length, bucket.k + 1
    stopped = slot.anchor != STALE and slot.anchor in stops
    if stopped or not active:
        written = (slot.anchor if stopped else STALE, *[STALE] * bucket.k)
        row.write("target", start, written)
        return written, [bucket.k, *[STALE] * (2 * bucket.k + 1)]
    require(start + width <= bucket.length, f"{width} positions behind {start} are not in {bucket}")
    require(0 not in row.table[: -(-(start + width) // PAGE)], f"{width} positions behind {start} have no page")
    text = row.text
    require(sampling is not None, "a row is sampled without a sampling state")
    require(STALE not in block, f"the draft of {block} has read what was never written")
    assert sampling is not None
    chosen = [pick([*text, *block[: place + 1]], sampling, slot.said + place) for place in range(width)]
    accepted = next((place for place in range(bucket.k) if block[place + 1] != chosen[place]), bucket.k)
    written = (*block[: accepted + 1], *[STALE] * (bucket.k - accepted))
    row.write("target", start, written)
    kept = next((place for place in range(accepted) if chosen[place] in stops), accepted)
    slot.advance(text, block[: kept + 1])
    slot.length, slot.anchor, slot.said = start + kept + 1, chosen[kept], slot.said + kept + 1
    return written, [accepted, *block[1:], *chosen]


def read_sampling(
    sampling: np.ndarray, seeds: np.ndarray, bias: np.ndarray, prompted: np.ndarray, tops: int
) -> SlotSampling:
    """The sampling parameters that an `admit` call wrote."""
    columns = {name: round(float(value), 5) for name, value in zip(SAMPLING_COLUMNS, sampling, strict=True)}
    require(columns.keys() == NEUTRAL_SAMPLING.keys(), "sampling has other columns")
    high, low = (int(half) & 0xFFFFFFFF for half in seeds)
    return SlotSampling(
        columns["temperature"],
        high << 32 | low,
        columns["frequency_penalty"],
        columns["repetition_penalty"],
        int(prompted.sum()),
        int(bias.argmax()) if bias.any() else None,
        bool(tops),
    )


def logprob(tokens: np.ndarray) -> np.ndarray:
    """-token / 4, exact in float32."""
    return (tokens / np.float32(-4)).astype(np.float32)


# -- the engine


class ToyEngine:
    """The engine loop on a toy device, step by step. pick: the engine's K, if less than the largest loaded one.

    host_bytes: of host memory for kv, where a position takes a byte, and a state 8. host_speed: bytes that are copied
    in the time of a chunk.
    """

    def __init__(
        self,
        buckets: str = GRID,
        k: int = BLOCK - 1,
        pick: int | None = None,
        controller: SpeculationController | None = None,
        max_waiting: int = 1024,
        prefix_caching: bool = True,
        host_bytes: int = 0,
        host_speed: float = 1e9,
        **device: Any,
    ):
        self.grid = parse_grid(buckets if "page=" in buckets else f"{buckets} page={PAGE}", BLOCK)
        self.bundle, self.state = ToyBundle(self.grid, k, **device), ToyState(self.grid)
        self.queue, self.counters = RequestQueue(max_waiting), Counters()
        controller = controller or FixedK(k if pick is None else pick)
        costs = dict.fromkeys(self.grid.chunks(), 1.0)
        offload = OffloadCosts(host_bytes, PAGE, 8, host_speed, costs, 0.0) if host_bytes else None
        kinds = self.bundle.manifest.sampling
        scheduler = Scheduler(self.grid, kinds, k, self.queue, controller, prefix_caching, offload)
        self.loop = EngineLoop(self.bundle, self.state, self.counters, self.queue, scheduler)
        self.deltas: dict[Request, list[tuple[float, Delta]]] = {}  # with the host's time
        self.requests: list[Request] = []
        self.steps: list[list[Call]] = []

    def submit(
        self,
        prompt: Sequence[int],
        tokens: int,
        priority: int = 0,
        deadline: float | None = None,
        stop_token_ids: Sequence[int] = (),
        **params: Any,
    ) -> Request:
        """Puts a request into the queue."""
        assert len(prompt) + tokens <= self.grid.capacity + 1, "the engine refuses it"
        deltas: list[tuple[float, Delta]] = []
        request = Request(
            [*prompt],
            SamplingParams(max_tokens=tokens, **params),
            tokens,
            frozenset(stop_token_ids),
            None,
            lambda delta: deltas.append((self.bundle.clock.host, delta)),
            priority=priority,
            deadline=deadline,
            progress=RequestProgress(on_cancel=self.queue.note_cancel),
        )
        self.queue.put(request)
        self.deltas[request] = deltas
        self.requests.append(request)
        return request

    def step(self) -> list[Call]:
        """Runs one step. Returns its calls and reads."""
        before = len(self.bundle.log)
        try:
            self.loop.step()
        finally:
            self.steps.append(self.bundle.log[before:])
        return self.steps[-1]

    def run(self, most: int = 1000) -> None:
        """Steps until the loop is idle, and checks every request."""
        for _ in range(most):
            if self.loop.is_idle:
                break
            self.step()
        assert self.loop.is_idle, f"after {most} steps there is still something to do"
        for request in self.requests:
            self.check(request)

    def calls(self, *programs: str) -> list[Call]:
        return [call for call in self.bundle.log if call.program in programs]

    @property
    def rounds(self) -> list[Call]:
        return self.calls("verify", "sampled_verify")

    def check(self, request: Request) -> None:
        """Asserts that the request has the tokens it gets alone: all, or a prefix where it was ended early."""
        alone = continue_alone(request.prompt, request.limit, request.params)
        stops = (place + 1 for place, token in enumerate(alone) if token in request.stop_token_ids)
        whole = alone[: next(stops, request.limit)]
        assert request.output.finish_reason is not None, "it has no end"
        ended = request.output.finish_reason in ("cancelled", "error")
        assert request.output.token_ids == (whole[: len(request.output.token_ids)] if ended else whole)
        assert request.output.token_ids == [token for _, delta in self.deltas[request] for token in delta.token_ids]
        assert [delta.finish_reason for _, delta in self.deltas[request]].count(None) == len(self.deltas[request]) - 1


SAMPLED: dict[str, Any] = {"temperature": 0.5, "seed": 3, "frequency_penalty": 1.0}
COSTS = {"prefill": 5.0, "draft": 1.0, "verify": 3.0, "sampled_verify": 3.0, "kv_write": 1.0}
ROUND, CHUNK = 5.0, 6.0  # with their kv_write
LONG = [7] * 40  # chunks of 16, 16 and 8


def programs(step: Sequence[Call]) -> list[str]:
    return [call.program for call in step]


def rounds_of(steps: Sequence[Sequence[Call]]) -> list[Call]:
    return [call for step in steps for call in step if call.program in ("verify", "sampled_verify")]


def gaps(engine: ToyEngine, request: Request) -> list[float]:
    """Simulated seconds between the deltas of one request."""
    times = [at for at, delta in engine.deltas[request] if delta.token_ids]
    return [later - earlier for earlier, later in itertools.pairwise(times)]
