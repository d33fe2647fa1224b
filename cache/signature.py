"""The catalogue of programs, and signatures: inputs and outputs of every program at every bucket, as data.

Lowering, allocation, checks, cache keys, the manifest and what a step calls are derived from the catalogue. The other
half of a program, its function and its estimates, is its module in `compile/programs`.
B rows · K drafted tokens · P prompt tokens of a chunk
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from dflash_aot.cache.arrays import (
    BOOL,
    CHOOSING_STATE,
    DRAFT_STATE,
    FLOAT,
    INT,
    KV_POOLS,
    RECURRENT_STATE,
    SAMPLING_STATE,
    ArraySpec,
    PairShapes,
    state_arrays,
)
from dflash_aot.cache.grid import Bucket, Chunk, Grid
from dflash_aot.cache.sampling_state import (
    SAMPLING_COLUMNS,
    SamplingKind,
    SamplingMode,
    count_mask_words,
    count_top_logprobs,
    list_modes,
    needs_sampling_state,
)

ProgramName = Literal[
    "prefill",
    "scored_prefill",
    "draft",
    "verify",
    "sampled_verify",
    "constrained_verify",
    "kv_write",
    "rounds",
    "sampled_rounds",
    "packed_prefill",
    "mixed",
    "sampled_mixed",
    "constrained_mixed",
    "move",
    "admit",
    "read_page",
    "write_page",
    "read_state",
    "write_state",
]
# Per row, checked on the device in multi-round steps, and in rounds with saved states; the host checks all.
MAX_STOP_TOKENS = 8
Sizes = tuple[int, ...]  # of a bucket, in the order of a program's axes
ExecutableId = tuple[str, Sizes]  # program and the sizes of its bucket


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs and outputs of one program at one bucket.

    Inputs in order: weights, state, arguments. Outputs in order: donated state, results.

    Attributes:
        program: name of the program.
        bucket: its sizes by axis.
        weights: names of the weight arguments.
        state: names of the state arrays, the donated ones first.
        donated: names of the state arrays that the program consumes and returns.
        arguments, results: the other inputs and outputs.
    """

    program: ProgramName
    bucket: dict[str, int]
    weights: tuple[str, ...]
    state: tuple[str, ...]
    donated: tuple[str, ...]
    arguments: tuple[ArraySpec, ...]
    results: tuple[ArraySpec, ...]

    @property
    def label(self) -> str:
        """Program and sizes for people, for example "verify batch=1 length=256 k=7"."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.bucket.items())
        return f"{self.program} {sizes}".rstrip()

    @property
    def executable_id(self) -> ExecutableId:
        """Program and sizes; unique in a bundle."""
        return self.program, tuple(self.bucket.values())


class ProgramWeights(msgspec.Struct, frozen=True):
    """Names of weight arguments, in order: of the target forward, the draft forward and the context kv write.

    Attributes:
        target: of prefill and verify.
        draft: of draft.
        context: of kv_write.
    """

    target: tuple[str, ...]
    draft: tuple[str, ...]
    context: tuple[str, ...]


# -- steps: what the engine does at once

# How a round verifies, or "prompt_logprobs" for a chunk that scores the prompt; None for all other steps.
Mode = SamplingKind | None
RoundShape = tuple[Bucket, SamplingMode]  # the bucket of a round, and how it verifies


class Step(NamedTuple):
    """A step of the engine. It calls its executables in the order of the catalogue.

    Attributes:
        kind: "chunk": of a prompt. "packed": short chunks of several prompts. "round": a single round. "rounds":
            several rounds in one dispatch. "mixed": the verification of a round together with a chunk. "admit": the
            write of a slot's sampling state. "move": the copy of a slot or a saved state. "offload_page",
            "offload_state": the copy of a kv page or a recurrent state to the host, or from it.
        sizes: of the chunks or the bucket; with several rounds their number, with a chunk its width.
        mode: how a round verifies; "prompt_logprobs" where a chunk scores the prompt.
        drafts: whether the draft's kv is kept.
    """

    kind: Literal[
        "chunk",
        "packed",
        "round",
        "rounds",
        "mixed",
        "admit",
        "move",
        "offload_page",
        "offload_state",
    ]
    sizes: Sizes = ()
    mode: Mode = None
    drafts: bool = True


def chunk_step(chunk: Chunk, scored: bool = False, drafts: bool = True) -> Step:
    """The step of a prefill chunk. scored: whether its tokens get log-probabilities."""
    return Step("chunk", chunk.sizes, "prompt_logprobs" if scored else None, drafts)


def packed_step(sizes: Sizes) -> Step:
    """The step of short chunks of several prompts; sizes: see `Grid.fit_packed`."""
    return Step("packed", sizes)


def round_step(bucket: Bucket, mode: Mode, drafts: bool = True) -> Step:
    """The step of a single round."""
    return Step("round", bucket.sizes, mode, drafts)


def multi_round_step(bucket: Bucket, mode: Mode, grid: Grid) -> Step:
    """The step of several rounds in one dispatch."""
    return Step("rounds", (*bucket.sizes, grid.rounds), mode)


def mixed_step(sizes: Sizes, mode: Mode) -> Step:
    """The step of the verification of a round together with a chunk; sizes: see `Grid.fit_mixed`."""
    return Step("mixed", sizes, mode)


def list_steps(grid: Grid, sampling: tuple[SamplingKind, ...]) -> list[Step]:
    """All steps of a grid."""
    scorings = (False, True) if "prompt_logprobs" in sampling else (False,)
    shapes = [(bucket, mode) for mode in list_modes(sampling) for bucket in grid.buckets()]
    return [
        *(chunk_step(chunk, scored) for scored in scorings for chunk in grid.chunks()),
        *map(packed_step, grid.list_packed()),
        *(round_step(bucket, mode) for bucket, mode in shapes),
        *(multi_round_step(bucket, mode, grid) for bucket, mode in shapes if grid.rounds > 1),
        *(mixed_step(sizes, mode) for mode in list_modes(sampling) for sizes in grid.list_mixed()),
        *([Step("move")] if grid.slots > 1 or grid.saved_states else []),
        *([Step("admit")] if needs_sampling_state(sampling) else []),
        *list_offload_steps(grid),
    ]


def list_offload_steps(grid: Grid) -> list[Step]:
    """The steps that copy kv pages and saved states to the host, or from it."""
    pages = [Step("offload_page")] if grid.offload else []
    return [*pages, *([Step("offload_state")] if grid.offload and grid.saved_states else [])]


# -- programs


class ProgramCall(NamedTuple):
    """What the arrays of a program depend on.

    Attributes:
        pair: shapes of both models.
        weights: names of their weights.
        sizes: of the bucket, by axis.
        mode: of the program.
        grid: of the bundle.
    """

    pair: PairShapes
    weights: ProgramWeights
    sizes: Mapping[str, int]
    mode: Mode
    grid: Grid


class ProgramArrays(NamedTuple):
    """The arrays of a program at a bucket.

    Attributes:
        weights: names of the weights.
        donated: names of the state arrays that the program consumes and returns.
        read: names of the state arrays that it only reads.
        arguments, results: the other inputs and outputs, without the page tables.
    """

    weights: tuple[str, ...]
    donated: tuple[str, ...]
    read: tuple[str, ...]
    arguments: tuple[ArraySpec, ...]
    results: tuple[ArraySpec, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A program of the catalogue, in all its modes.

    Attributes:
        names: its name in each mode; None stands for every mode without a name.
        axes: of its bucket.
        find_sizes: the sizes with which a step calls it; None if the step does not call it.
        declare: its arrays.
        runs_model: whether it runs all layers of a model.
        has_tables: whether it finds kv by page tables.
    """

    names: Mapping[Mode, ProgramName]
    axes: tuple[str, ...]
    find_sizes: Callable[[Step], Sizes | None]
    declare: Callable[[ProgramCall], ProgramArrays]
    runs_model: bool = False
    has_tables: bool = True

    def name(self, mode: Mode = None) -> ProgramName:
        """Its name in a mode. Raises KeyError if it has none."""
        return self.names[mode if mode in self.names else None]


PENALISED = ArraySpec("penalised", (1,), BOOL)


def _declare_prefill(call: ProgramCall) -> ProgramArrays:
    """Target forward over `counts` of P prompt tokens of one slot, or of several; sets the lengths of these slots.

    With `gives_first` it chooses the token after the chunk: `first`, which becomes the slot's anchor. Without it no
    logits are computed, `first` is 0 and the anchor stays. The scored prefill also gives the log-probability of each of
    `next_tokens` after its position, and the likeliest tokens. A row of several whose count is 0 has no slot.
    """
    P = call.sizes["prefill"]
    rows = call.sizes.get("rows", 1)
    tops = (1, P, count_top_logprobs(call.pair.vocab))
    scored = call.mode == "prompt_logprobs"
    wanted = (ArraySpec("next_tokens", (1, P), INT),)
    scores = (
        ArraySpec("logprobs", (1, P), FLOAT),
        ArraySpec("top_tokens", tops, INT),
        ArraySpec("top_logprobs", tops, FLOAT),
    )
    return ProgramArrays(
        weights=call.weights.target,
        donated=call.pair.target_state,
        read=(),
        arguments=(
            ArraySpec("tokens", (rows, P), INT),
            ArraySpec("slots", (rows,), INT),
            ArraySpec("starts", (rows,), INT),
            ArraySpec("counts", (rows,), INT),
            ArraySpec("gives_first", (rows,), BOOL),
            *(wanted if scored else ()),
        ),
        results=(
            ArraySpec("features", (rows, P, call.pair.feature_width), call.pair.dtype),
            ArraySpec("first", (rows,), INT),
            *(scores if scored else ()),
        ),
    )


def _declare_draft(call: ProgramCall) -> ProgramArrays:
    """Draft forward over a block of the trained width; returns the anchor and K drafted tokens of each row.

    Where the programs sample, `sampled` tells whether each slot's sampling state counts; otherwise drafting is greedy.
    `penalised` tells whether a row has a bias or penalties; without it they are not looked up.
    """
    choosing = ("counts", *CHOOSING_STATE) if call.pair.samples else ()
    return ProgramArrays(
        weights=call.weights.draft,
        donated=(),
        read=(*DRAFT_STATE, "lengths", "anchors", *choosing),
        arguments=(ArraySpec("sampled", (1,), BOOL), PENALISED) if call.pair.samples else (),
        results=(ArraySpec("block", (call.sizes["batch"], call.sizes["k"] + 1), INT),),
    )


def _declare_verify(call: ProgramCall) -> ProgramArrays:
    """Target forward over the block, choice of tokens, acceptance, new lengths and anchors of the active rows.

    `verdict` is the round outcome, the only array that the host reads: [accepted, K drafted tokens, K+1 chosen tokens]
    per row. `starts` are the lengths before the round. With K = 0 there is no `block`: only the anchor is verified.

    A sampled verification chooses by the sampling state of the slots, and counts committed tokens in it. Its `verdict`
    has K+1 more columns: the log-probabilities of the chosen tokens, float32 with its bits as int32. `top_tokens` and
    `top_logprobs` are the likeliest tokens, zeros if no row of the batch requests them. All log-probabilities are of
    the target's distribution before temperature, penalties and filters.

    A constrained verification is a sampled one that chooses among the `allowed` tokens of each position. `allowed` has
    a bit per token of the vocabulary, the lowest bit of a word first. At least one is set per position.

    With saved states a row stops at the first of its `ends` (padded with -1): of this round it keeps the tokens before
    it, and later rounds leave it unchanged. So its state is that of the whole answer, which can be saved.
    """
    B = call.sizes["batch"]
    K = call.sizes["k"]
    sampled = call.mode != "greedy"
    tops = (B, K + 1, count_top_logprobs(call.pair.vocab))
    block = (ArraySpec("block", (B, K + 1), INT),) if K else ()
    allowed = ArraySpec("allowed", (B, K + 1, count_mask_words(call.pair.vocab)), INT)
    scores = (ArraySpec("top_tokens", tops, INT), ArraySpec("top_logprobs", tops, FLOAT))
    return ProgramArrays(
        weights=call.weights.target,
        donated=(*call.pair.target_state, *(("counts",) if sampled else ())),
        read=tuple(name for name in SAMPLING_STATE if name != "counts") if sampled else (),
        arguments=(
            *block,
            ArraySpec("active", (B,), BOOL),
            *((allowed,) if call.mode == "constrain" else ()),
            *((_declare_ends(B),) if call.grid.saved_states else ()),
        ),
        results=(
            ArraySpec("features", (B, K + 1, call.pair.feature_width), call.pair.dtype),
            ArraySpec("starts", (B,), INT),
            ArraySpec("verdict", (B, 3 * K + 3 if sampled else 2 * K + 2), INT),
            *(scores if sampled else ()),
        ),
    )


def _declare_ends(rows: int) -> ArraySpec:
    return ArraySpec("ends", (rows, MAX_STOP_TOKENS), INT)


def _declare_kv_write(call: ProgramCall) -> ProgramArrays:
    """Writes the draft's context kv of each row for `width` positions from `starts`, computed from target features."""
    rows = call.sizes["rows"]
    return ProgramArrays(
        weights=call.weights.context,
        donated=DRAFT_STATE,
        read=(),
        arguments=(
            ArraySpec(
                "features", (rows, call.sizes["width"], call.pair.feature_width), call.pair.dtype
            ),
            ArraySpec("starts", (rows,), INT),
        ),
        results=(),
    )


def _declare_rounds(call: ProgramCall) -> ProgramArrays:
    """Multi-round step: up to `count` rounds (draft, verify, kv_write) of the active rows in one dispatch.

    A row takes part until it has `left` tokens, or one of its `ends` (padded with -1). The step stops when no row is
    left, and with `stop_early` after the first round that completes an active row. `verdicts` has the outcome of
    `verify` per round and row, -1 where the row did not take part. `left_over` is what remains of `left`.

    Sampled rounds verify as `sampled_verify` does, and draft with `penalised` as `draft`. They report no
    log-probabilities.
    """
    B = call.sizes["batch"]
    K = call.sizes["k"]
    sampled = call.mode != "greedy"
    used = (*call.weights.target, *(call.weights.draft if K else ()), *call.weights.context)
    return ProgramArrays(
        weights=tuple(dict.fromkeys(used)),
        donated=(*call.pair.target_state, *DRAFT_STATE, *(("counts",) if sampled else ())),
        read=CHOOSING_STATE if sampled else (),
        arguments=(
            ArraySpec("count", (1,), INT),
            ArraySpec("left", (B,), INT),
            _declare_ends(B),
            ArraySpec("active", (B,), BOOL),
            ArraySpec("stop_early", (1,), BOOL),
            *((PENALISED,) if sampled and K else ()),
        ),
        results=(
            ArraySpec("verdicts", (call.sizes["rounds"], B, 2 * K + 2), INT),
            ArraySpec("left_over", (B,), INT),
        ),
    )


def _declare_mixed(call: ProgramCall) -> ProgramArrays:
    """`verify` of the active rows, and `prefill` of a chunk of a prompt, in one pass over the target's weights.

    The chunk's slot is no active row. Page table, start, count and features of the chunk have the prefix `chunk_`; its
    other arrays have the names of `prefill`. There is one chunk width: the grid's largest.
    """
    verified = _declare_verify(call)
    chunk = _declare_prefill(call._replace(mode=None))
    pages = ArraySpec("chunk_pages", (1, call.grid.row_pages), INT)
    renamed = {one: f"chunk_{one}" for one in ("starts", "counts", "features")}

    def rename(arrays: tuple[ArraySpec, ...]) -> list[ArraySpec]:
        return [
            msgspec.structs.replace(one, name=renamed.get(one.name, one.name)) for one in arrays
        ]

    return ProgramArrays(
        weights=verified.weights,
        donated=verified.donated,
        read=verified.read,
        arguments=(*verified.arguments, pages, *rename(chunk.arguments)),
        results=(*verified.results, *rename(chunk.results)),
    )


def _declare_move(call: ProgramCall) -> ProgramArrays:
    """Copies all but kv pages of slot `source` to slot `destination`: a request keeps its pages, but not its ring.

    With saved states, which are counted after the slots, it also saves and restores: of these only the recurrent state
    is copied, and `source_page` of the kv pools to `destination_page`. A slot whose state is restored gets `length`. A
    move of a slot copies page 0 to itself.
    """
    sampling = SAMPLING_STATE if call.pair.samples else ()
    copied = ["source", "destination"]
    if call.grid.saved_states:
        copied += ["source_page", "destination_page", "length"]
    pools = KV_POOLS if call.grid.saved_states else ()
    return ProgramArrays(
        weights=(),
        donated=("lengths", "anchors", *call.pair.slot_state, *sampling, *pools),
        read=(),
        arguments=tuple(ArraySpec(name, (1,), INT) for name in copied),
        results=(),
    )


def _declare_admit(call: ProgramCall) -> ProgramArrays:
    """Initialises the sampling state of one slot, with the counts of the output so far.

    With `anchor` ≥ 0 the slot also gets this anchor, and the length `starts`; below 0 both stay.
    """
    vocab = (1, call.pair.vocab)
    return ProgramArrays(
        weights=(),
        donated=("lengths", "anchors", *SAMPLING_STATE),
        read=(),
        arguments=(
            ArraySpec("slots", (1,), INT),
            ArraySpec("starts", (1,), INT),
            ArraySpec("anchor", (1,), INT),
            ArraySpec("slot_sampling", (1, len(SAMPLING_COLUMNS)), FLOAT),
            ArraySpec("slot_seeds", (1, 2), INT),
            ArraySpec("slot_bias", vocab, FLOAT),
            ArraySpec("slot_prompted", vocab, BOOL),
            ArraySpec("slot_counts", vocab, INT),
            ArraySpec("slot_tops", (1,), INT),
        ),
        results=(),
    )


COPY = "_copy"  # ends the name of what is in one page, or one state, of an array


def _list_copies(call: ProgramCall, names: tuple[str, ...]) -> list[ArraySpec]:
    """What one page, or one state, is in each of these state arrays, [L, 1, ..]."""
    return [
        msgspec.structs.replace(one, name=one.name + COPY, shape=(one.shape[0], 1, *one.shape[2:]))
        for one in state_arrays(call.pair, call.grid)
        if one.name in names
    ]


INDEX = ArraySpec("index", (1,), INT)


def _declare_reads(names: tuple[str, ...]) -> Callable[[ProgramCall], ProgramArrays]:
    """Returns copies of the page, or of the state, `index` of these arrays."""
    return lambda call: ProgramArrays((), (), names, (INDEX,), tuple(_list_copies(call, names)))


def _declare_write_page(call: ProgramCall) -> ProgramArrays:
    """Writes what `read_page` has returned to the page `index` of the kv pools."""
    return ProgramArrays((), KV_POOLS, (), (INDEX, *_list_copies(call, KV_POOLS)), ())


def _declare_write_state(call: ProgramCall) -> ProgramArrays:
    """Writes what `read_state` has returned to the slot `index`, which also gets `length`."""
    arguments = (INDEX, ArraySpec("length", (1,), INT), *_list_copies(call, RECURRENT_STATE))
    return ProgramArrays((), ("lengths", *RECURRENT_STATE), (), arguments, ())


def _find_sizes_of(kind: str) -> Callable[[Step], Sizes | None]:
    """The sizes of a program that only steps of one kind call, with their own sizes."""
    return lambda step: step.sizes if step.kind == kind else None


def _find_draft_sizes(step: Step) -> Sizes | None:
    return step.sizes if step.kind == "round" and step.sizes[2] else None


def _find_kv_write_sizes(step: Step) -> Sizes | None:
    """Rows and positions of the features of chunks or a round; several rounds write the kv themselves."""
    if step.drafts and step.kind == "chunk":
        return (1, step.sizes[0])
    if step.drafts and step.kind == "packed":
        return step.sizes[:2]
    if step.drafts and step.kind == "round":
        return (step.sizes[0], step.sizes[2] + 1)
    return None


PREFILL = Program(
    names={None: "prefill", "prompt_logprobs": "scored_prefill"},
    axes=("prefill", "length"),
    find_sizes=_find_sizes_of("chunk"),
    declare=_declare_prefill,
    runs_model=True,
)
PACKED_PREFILL = Program(
    names={None: "packed_prefill"},
    axes=("rows", "prefill", "length"),
    find_sizes=_find_sizes_of("packed"),
    declare=_declare_prefill,
    runs_model=True,
)
DRAFT = Program(
    names={None: "draft"},
    axes=("batch", "length", "k"),
    find_sizes=_find_draft_sizes,
    declare=_declare_draft,
    runs_model=True,
)
VERIFY = Program(
    names={"greedy": "verify", "sample": "sampled_verify", "constrain": "constrained_verify"},
    axes=("batch", "length", "k"),
    find_sizes=_find_sizes_of("round"),
    declare=_declare_verify,
    runs_model=True,
)
KV_WRITE = Program(
    names={None: "kv_write"},
    axes=("rows", "width"),
    find_sizes=_find_kv_write_sizes,
    declare=_declare_kv_write,
)
# A constrained round needs the host: its masks follow the tokens.
ROUNDS = Program(
    names={"greedy": "rounds", "sample": "sampled_rounds"},
    axes=("batch", "length", "k", "rounds"),
    find_sizes=_find_sizes_of("rounds"),
    declare=_declare_rounds,
    runs_model=True,
)
MIXED = Program(
    names={"greedy": "mixed", "sample": "sampled_mixed", "constrain": "constrained_mixed"},
    axes=("batch", "length", "k", "prefill"),
    find_sizes=_find_sizes_of("mixed"),
    declare=_declare_mixed,
    runs_model=True,
)
MOVE = Program(
    names={None: "move"},
    axes=(),
    find_sizes=_find_sizes_of("move"),
    declare=_declare_move,
    has_tables=False,
)
ADMIT = Program(
    names={None: "admit"}, axes=(), find_sizes=_find_sizes_of("admit"), declare=_declare_admit
)


def _make_copy_program(
    name: ProgramName, kind: str, declare: Callable[[ProgramCall], ProgramArrays]
) -> Program:
    return Program({None: name}, (), _find_sizes_of(kind), declare, has_tables=False)


READ_PAGE = _make_copy_program("read_page", "offload_page", _declare_reads(KV_POOLS))
WRITE_PAGE = _make_copy_program("write_page", "offload_page", _declare_write_page)
READ_STATE = _make_copy_program("read_state", "offload_state", _declare_reads(RECURRENT_STATE))
WRITE_STATE = _make_copy_program("write_state", "offload_state", _declare_write_state)
CATALOGUE = (
    *(PREFILL, PACKED_PREFILL, DRAFT, VERIFY, KV_WRITE, ROUNDS, MIXED, MOVE, ADMIT),
    *(READ_PAGE, WRITE_PAGE, READ_STATE, WRITE_STATE),
)
# Program and mode by name.
PROGRAMS: Mapping[str, tuple[Program, Mode]] = {
    name: (program, mode) for program in CATALOGUE for mode, name in program.names.items()
}


def list_executables(step: Step) -> list[ExecutableId]:
    """The executables that a step calls, in order; none for several rounds in a mode that has no program for them."""
    found: list[ExecutableId] = []
    for program in CATALOGUE:
        sizes = program.find_sizes(step)
        if sizes is not None and (step.mode in program.names or None in program.names):
            found.append((program.name(step.mode), sizes))
    return found


def list_signatures(pair: PairShapes, grid: Grid, weights: ProgramWeights) -> list[Signature]:
    """Returns the signatures of all executables of a grid."""
    needed: dict[str, set[Sizes]] = defaultdict(set)
    for step in list_steps(grid, pair.sampling):
        for name, sizes in list_executables(step):
            needed[name].add(sizes)
    return [
        _make_signature(name, dict(zip(program.axes, sizes, strict=True)), pair, weights, grid)
        for program in CATALOGUE
        for name in program.names.values()
        for sizes in sorted(needed[name])
    ]


def _make_signature(
    name: ProgramName, bucket: dict[str, int], pair: PairShapes, weights: ProgramWeights, grid: Grid
) -> Signature:
    """The signature of a program at a bucket.

    Programs that find kv by page tables take `pages` as their first argument, the page table of each row: pages of the
    pools in the order of the row's positions. Entry 0 stands for no page.
    """
    program, mode = PROGRAMS[name]
    call = ProgramCall(pair, weights, bucket, mode, grid)
    arrays = program.declare(call)
    state = (*arrays.donated, *arrays.read)
    rows = bucket.get("batch", bucket.get("rows", 1))
    finds_kv = program.has_tables and {"target_k", "draft_k"} & {*state}
    pages = (ArraySpec("pages", (rows, grid.row_pages), INT),) if finds_kv else ()
    return Signature(
        program=name,
        bucket=bucket,
        weights=arrays.weights,
        state=state,
        donated=arrays.donated,
        arguments=(*pages, *arrays.arguments),
        results=arrays.results,
    )
