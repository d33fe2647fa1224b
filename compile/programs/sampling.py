"""Sampling and acceptance: chooses tokens from logits by each slot's sampling state, and what a round commits.

The order is that of vLLM (v1/sample/sampler.py): bias, penalties, temperature, min_p, top_k, top_p, draw. Nothing is
sorted: each limit keeps all logits from a threshold on, and bisection finds the threshold.

B rows · T positions of a block, each of which chooses the token after it · V vocabulary, or this device's part of it
".." stands for any leading axes.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from dflash_aot.cache.arrays import RECURRENT_STATE
from dflash_aot.cache.sampling_state import MASK_BITS, NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from dflash_aot.compile.kernels.kernel_device import DeltaUpdates
from dflash_aot.compile.models.recurrent_state import RecurrentState, commit_updates
from dflash_aot.compile.models.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from dflash_aot.compile.kernels.gated_delta import DeltaBlocks

# -- acceptance: how many drafted tokens a verification keeps, and what a round commits to the state
#
# B rows · K drafted tokens · V vocabulary, or this device's part of it · F width of the features


class TargetForward(NamedTuple):
    """The target's forward pass over the blocks of a round.

    Attributes:
        lengths: int32 [B], tokens in the kv arrays before the round.
        anchors: int32 [B], the anchors before the round.
        block: int32 [B, K+1], the anchor and the drafted tokens.
        positions: int32 [B, K+1], the absolute positions of the block.
        logits: float32 [B, K+1, V], of the token after each token of the block.
        features: [B, K+1, F], the aux hidden states of the block.
        kv: the target's kv pools by name, with the block written.
        pending: what the block adds to a hybrid's recurrent state; None for other targets.
        delta: the kernels that commit it, None where XLA's operations do.
    """

    lengths: jax.Array
    anchors: jax.Array
    block: jax.Array
    positions: jax.Array
    logits: jax.Array
    features: jax.Array
    kv: dict[str, jax.Array]
    pending: DeltaUpdates | None = None
    delta: "DeltaBlocks | None" = None


def accept(block: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many drafted tokens are accepted, 0 … K, and the target's own token after them: both int32 [B].

    block [B, K+1] is the anchor and the drafted tokens; chosen [B, K+1] the target's choice after each of them. The
    accepted tokens are the longest prefix of drafted tokens that the target chose too.
    """
    matches = block[:, 1:] == chosen[:, :-1]
    accepted = jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    bonus = jnp.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
    return accepted, bonus


def find_ends(tokens: jax.Array, ends: jax.Array) -> jax.Array:
    """Which of the tokens [B, T] are among the row's `ends` [B, E]: bool [B, T]."""
    return jnp.any(tokens[:, :, None] == ends[:, None], axis=2)


def stop_at_end(
    accepted: jax.Array, chosen: jax.Array, ends: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accepted tokens up to the first end token, and the token after them, which then is the end token: int32 [B].

    The end token may be the target's own token. Where no end token is committed, nothing changes.
    """
    is_end = find_ends(chosen, ends)
    first = jnp.argmax(is_end, axis=1).astype(jnp.int32)
    kept = jnp.where(jnp.any(is_end, axis=1), jnp.minimum(accepted, first), accepted)
    return kept, jnp.take_along_axis(chosen, kept[:, None], axis=1)[:, 0]


def _saves_states(arrays: Mapping[str, jax.Array]) -> bool:
    """Whether recurrent states are saved: then there are more of them than slots."""
    states = arrays.get("recurrent_states")
    return states is not None and states.shape[1] > arrays["lengths"].shape[0]


def commit_round(
    arrays: Mapping[str, jax.Array], forward: TargetForward, chosen: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Accepts tokens and advances the active rows: accepted [B], and the outputs that all verifications share.

    `arrays` are the inputs of the program by name, chosen [B, K+1] is the target's choice after each token. With saved
    states a row keeps fewer tokens than it accepts where an end token is among them.
    """
    accepted, bonus = accept(forward.block, chosen)
    active = arrays["active"]
    kept = accepted
    if _saves_states(arrays):
        active &= ~find_ends(forward.anchors[:, None], arrays["ends"])[:, 0]
        kept, bonus = stop_at_end(accepted, chosen, arrays["ends"])
    origin = jnp.zeros((1,), jnp.int32)
    advanced = jnp.where(active, forward.lengths + kept + 1, forward.lengths)
    recurrent: dict[str, jax.Array] = {}
    if forward.pending is not None:
        before = RecurrentState(*(arrays[name] for name in RECURRENT_STATE))
        counts = jnp.where(active, kept + 1, 0)
        after = commit_updates(before, forward.pending, forward.lengths, counts, forward.delta)
        recurrent = dict(zip(RECURRENT_STATE, after, strict=True))
    return accepted, {
        **recurrent,
        **forward.kv,
        "lengths": jax.lax.dynamic_update_slice(arrays["lengths"], advanced, origin),
        "anchors": jax.lax.dynamic_update_slice(
            arrays["anchors"], jnp.where(active, bonus, forward.anchors), origin
        ),
        "features": forward.features,
        "starts": forward.lengths,
    }


# -- sampling

# The columns of the state array `sampling` by name, each float32 [B, 1].
SamplingColumns = Mapping[str, jax.Array]
TOTAL_MASS = 1 << 30  # all probability, in integers, whose sum does not depend on the order
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
INT32_MIN = -(1 << 31)
INT32_MAX = (1 << 31) - 1
INT32_BITS = 32
BITS_PER_PASS = 4  # bits of a threshold found per pass, so the logits are read 8 times and not 32
# Collectives of a sampled verification, without those of the choice of a token. Of the penalised logits: maximum,
# sum of odds, sum of mass, two bisections. Of the raw logits: sum of odds with the chosen logit, the largest logits.
# Each collective needs the result of the one before (see `TensorParallel.order_after`).
SAMPLING_EXCHANGES = 7
PENALTY_EXCHANGES = 1  # of the bias and the penalties of a draft's candidates
# of the scores of a prompt: sum of odds with the token's logit, the likeliest tokens
SCORING_EXCHANGES = 2
# Rows whose logits are in memory at a time while a prompt is scored: 39 MB for 152,000 tokens. The head's weights are
# read once for each such group of rows.
SCORED_ROWS = 64


def choose_tokens(
    logits: jax.Array,
    positions: jax.Array,
    drafted: jax.Array,
    active: jax.Array,
    state: Mapping[str, jax.Array],
    tp: TensorParallel,
) -> jax.Array:
    """Chooses the token after each position of the blocks: int32 [B, T].

    Args:
        logits: float32 [B, T, V].
        positions: int32 [B, T], absolute positions of the tokens to choose.
        drafted: int32 [B, T-1], the drafted tokens of the blocks.
        active: bool [B]; the choice of other rows is undefined.
        state: the batch's rows of `sampling`, `seeds`, `bias`, `prompted` and `counts`.
        tp: the devices that share the vocabulary.
    """
    asked = _read_columns(state["sampling"])
    logits = logits + state["bias"][:, None]
    logits = jax.lax.cond(
        _any_differs(asked, active, *PENALTIES),
        lambda: penalise(
            logits, asked, state["prompted"][:, None], _count_seen(state["counts"], drafted, tp)
        ),
        lambda: logits,
    )
    greedy, temperature = _read_temperature(asked)
    top = tp.max(logits.max(axis=-1))
    floor = find_floor(logits, top, temperature, asked, active, tp)
    noise = draw_gumbel(state["seeds"], positions, tp.own_tokens(logits.shape[-1]))
    drawn = jnp.where(
        logits >= floor[..., None], _scale(logits, top, temperature) + noise, -jnp.inf
    )
    return tp.argmax(jnp.where(greedy[..., None], logits, drawn))


def apply_mask(logits: jax.Array, allowed: jax.Array, tokens: jax.Array) -> jax.Array:
    """float32 logits [B, T, V], with -inf for each of `tokens` that is not in `allowed`, int32 [B, T, words].

    A row of the batch at a time: XLA writes the bits of a mask out as int32, as many bytes as the logits.
    """

    def mask_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.where(read_mask(row[1], tokens), row[0], -jnp.inf)

    return jax.lax.map(mask_row, (logits, allowed))


def read_mask(allowed: jax.Array, tokens: jax.Array) -> jax.Array:
    """Whether consecutive `tokens`, int32 [V], have their bits in `allowed`, int32 [.., words]: bool [.., V]."""
    bits = jnp.repeat(allowed, MASK_BITS, axis=-1)
    own = jax.lax.dynamic_slice_in_dim(bits, tokens[0], tokens.shape[0], axis=-1)
    return (own >> (tokens % MASK_BITS)) & 1 != 0


def draw_draft_scores(
    scores: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    sampled: jax.Array,
    penalised: jax.Array,
    state: Mapping[str, jax.Array],
    tp: TensorParallel,
) -> jax.Array:
    """Draft scores with the bias, the penalties and the noise of `choose_tokens` for the same seed, position and token.

    Both then take the largest sum, so a drafted token is more often the chosen one than if the draft took its likeliest
    token: the noise favours the same tokens. The choice itself does not depend on the draft. min_p, top_k and top_p
    limit the draft's tokens too, measured among the given ones. Penalties do not count tokens of the same draft.

    Args:
        scores: float32 [B, K, P, C] of C tokens, in P cases.
        tokens: int32 [B, K, C].
        positions: int32 [B, K], absolute positions of the tokens.
        sampled: bool [1]; if False, no row is drawn.
        penalised: bool [1]; if False, bias and penalties are left out, because no row has any.
        state: `sampling`, `seeds`, `bias`, `prompted` and `counts` of all slots; those of the batch are the first.
        tp: the devices that share the vocabulary.
    """
    batch = scores.shape[0]
    asked = _read_columns(state["sampling"][:batch])
    seeds = state["seeds"][:batch]
    scores = adjust_draft_scores(scores, tokens, penalised, asked, state, tp)
    greedy, temperature = _read_temperature(asked)
    asked = {name: column[..., None, None] for name, column in asked.items()}
    scaled = (scores - scores.max(axis=-1, keepdims=True)) / temperature[..., None, None]
    count = jnp.where(asked["top_k"] > 0, asked["top_k"], jnp.inf)
    kept = (scaled >= jnp.log(asked["min_p"])) & (sum_better(scaled, jnp.ones_like(scaled)) < count)
    odds = jnp.where(kept, jnp.exp(scaled), 0.0)
    mass = jnp.where(asked["top_p"] < 1, asked["top_p"] * odds.sum(axis=-1, keepdims=True), jnp.inf)
    kept &= sum_better(scaled, odds) < mass
    drawn = jnp.where(kept, scaled + draw_gumbel(seeds, positions, tokens)[:, :, None], -jnp.inf)
    return jnp.where((greedy | ~sampled)[..., None, None], scores, drawn)


def sum_better(scores: jax.Array, weights: jax.Array) -> jax.Array:
    """For each of C scores, the sum of the weights of all that are larger: float32 [.., C], like both arguments.

    The leading axes come last in the comparison of all pairs: they fill a TPU's lanes, which C scores do not.
    """
    columns = scores.reshape(-1, scores.shape[-1]).T  # [C, n]
    better = columns[:, None] > columns
    sums = jnp.where(better, weights.reshape(-1, scores.shape[-1]).T[:, None], 0.0).sum(axis=0)
    return sums.T.reshape(scores.shape)


def adjust_draft_scores(
    scores: jax.Array,
    tokens: jax.Array,
    penalised: jax.Array,
    asked: SamplingColumns,
    state: Mapping[str, jax.Array],
    tp: TensorParallel,
) -> jax.Array:
    """Draft scores with bias and penalties, unless `penalised` is False. Arguments are those of `draw_draft_scores`."""
    batch = tokens.shape[0]

    def find(name: str) -> jax.Array:
        values = tp.own_values(state[name], tokens.reshape(batch, -1))
        values = values.reshape(tokens.shape)[:, :, None]
        return (
            jax.lax.bitcast_convert_type(values, jnp.int32)
            if name == "bias"
            else values.astype(jnp.int32)
        )

    def adjust() -> jax.Array:
        # In one exchange, of integers: a sum with one term is exact.
        bits, prompted, counts = tp.sum_each(
            [find(name) for name in ("bias", "prompted", "counts")]
        )
        biased = scores + jax.lax.bitcast_convert_type(bits, jnp.float32)
        return penalise(biased, asked, prompted > 0, counts)

    return jax.lax.cond(penalised[0], adjust, lambda: scores)


def penalise(
    logits: jax.Array, asked: SamplingColumns, prompted: jax.Array, counts: jax.Array
) -> jax.Array:
    """Applies repetition, presence and frequency penalties to logits float32 [B, ..].

    prompted bool: whether a token is in the prompt. counts int32: how often it is in the output before its position.
    Both broadcast against the logits. The repetition penalty is that of Keskar et al. 2019, the others are OpenAI's.
    """
    each = (-1, *[1] * (logits.ndim - 1))
    repetition, presence, frequency = (asked[name].reshape(each) for name in PENALTIES)
    generated = counts > 0
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(prompted | generated, repeated, logits)
    return logits - frequency * counts - presence * generated


def find_floor(
    logits: jax.Array,
    top: jax.Array,
    temperature: jax.Array,
    asked: SamplingColumns,
    active: jax.Array,
    tp: TensorParallel,
) -> jax.Array:
    """The lowest logit that min_p, top_k and top_p keep, float32 [B, T]; `top` [B, T] is the largest logit.

    Equal logits are kept or dropped together, so top_k and top_p may keep more tokens than asked.
    """
    floor = top + temperature * jnp.log(asked["min_p"])

    def limit_count() -> jax.Array:
        count = asked["top_k"].astype(jnp.int32)
        wanted = tp.order_after(jnp.where(count > 0, count, INT32_MAX), top)
        return find_threshold(logits, jnp.int32(1), wanted, tp)

    def limit_mass() -> jax.Array:
        odds = jnp.where(logits >= floor[..., None], jnp.exp(_scale(logits, top, temperature)), 0.0)
        whole = tp.sum(odds.sum(axis=-1, keepdims=True))
        mass = jnp.round(odds * (TOTAL_MASS / whole)).astype(jnp.int32)
        wanted = jnp.ceil(asked["top_p"] * tp.sum(mass.sum(axis=-1))).astype(jnp.int32)
        return find_threshold(logits, mass, jnp.where(asked["top_p"] < 1, wanted, INT32_MAX), tp)

    anything = jnp.full(top.shape, -jnp.inf)
    floor = jnp.maximum(
        floor, jax.lax.cond(_any_differs(asked, active, "top_k"), limit_count, lambda: anything)
    )
    return jnp.maximum(
        floor, jax.lax.cond(_any_differs(asked, active, "top_p"), limit_mass, lambda: anything)
    )


def find_threshold(
    logits: jax.Array, weights: jax.Array, wanted: jax.Array, tp: TensorParallel
) -> jax.Array:
    """The largest threshold for which the weights of logits ≥ threshold sum to `wanted`: float32 [..].

    -inf if all weights sum to less. logits float32 [.., V]; weights int32, broadcast to them; wanted int32 [..].
    Bisects the integers that have the order of float32, several bits per pass, so the result is exact.
    """
    parts = range(1, 1 << BITS_PER_PASS)

    def weigh(threshold: jax.Array) -> jax.Array:
        return jnp.where(logits >= _as_float(threshold)[..., None], weights, 0).sum(axis=-1)

    def find_bits(step: jax.Array, found: jax.Array) -> jax.Array:
        shift = INT32_BITS - BITS_PER_PASS * (step + 1)
        # Additions wrap around from INT32_MIN. If one threshold reaches `wanted`, all lower ones do too.
        weighed = tp.sum_each([weigh(found + (jnp.int32(part) << shift)) for part in parts])
        heavy = sum((weight >= wanted).astype(jnp.int32) for weight in weighed)
        return found + (heavy << shift)

    lowest = jnp.full(logits.shape[:-1], INT32_MIN, jnp.int32)
    return _as_float(jax.lax.fori_loop(0, INT32_BITS // BITS_PER_PASS, find_bits, lowest))


def _as_float(order: jax.Array) -> jax.Array:
    """The float32 at place `order` (int32) among all float32 in ascending order; -inf for places that are NaN.

    Subnormal numbers become zero, as most devices compare them.
    """
    lowest = jnp.int32(INT32_MIN + (1 << 23) - 1)  # the place of -inf
    number = jax.lax.bitcast_convert_type(
        jnp.where(order < 0, order ^ INT32_MAX, order), jnp.float32
    )
    number = jnp.where(jnp.abs(number) < jnp.finfo(jnp.float32).tiny, 0.0, number)
    return jnp.where(order < lowest, -jnp.inf, number)


def draw_gumbel(seeds: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gumbel noise float32 [B, T, V], a function of seeds int32 [B, 2], positions int32 [B, T] and tokens.

    tokens int32 [V], or [B, T, V] for other ones at each position.

    The token with the largest sum of logit and noise is a draw from the logits' softmax (Gumbel 1954).
    """
    return make_gumbel(draw_bits(seeds, positions, tokens))


def make_gumbel(bits: jax.Array) -> jax.Array:
    """Random uint32 → Gumbel noise, float32 from -2.8 to 22.9: -log of an exponential variate.

    Uses all 32 bits. `jax.random.gumbel` uses 23 bits and ends at 15.9, so it never draws most tokens with a
    probability below 1e-7.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def draw_bits(seeds: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """Random uint32 [B, T, V], equal to `jax.random.bits`, but computed for each token without the others."""
    keys = jax.random.wrap_key_data(
        jax.lax.bitcast_convert_type(seeds, jnp.uint32), impl="threefry2x32"
    )
    folded = jax.random.key_data(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, positions))
    shape = (*positions.shape, tokens.shape[-1])
    high, low = (jnp.broadcast_to(folded[..., half, None], shape) for half in (0, 1))
    index = jnp.broadcast_to(tokens.astype(jnp.uint32), shape)
    first, second = threefry2x32_p.bind(high, low, jnp.zeros_like(index), index)
    return first ^ second


def compute_logprobs(
    logits: jax.Array, chosen: jax.Array, wanted: jax.Array, tops: int, tp: TensorParallel
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of the chosen tokens [B, T]; the `tops` likeliest tokens and their log-probabilities.

    logits float32 [B, T, V] are the target's own, chosen int32 [B, T]. The likeliest, each [B, T, tops], are computed
    if the scalar `wanted` is True, else zeros.
    """
    total, logit = tp.logsumexp_and_logits(logits, chosen)

    def list_tops() -> tuple[jax.Array, jax.Array]:
        values, tokens = tp.top_values(logits, tops)
        return tokens, values - total[..., None]

    shape = (*chosen.shape, tops)
    nothing = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    return logit - total, *jax.lax.cond(wanted, list_tops, lambda: nothing)


def score_tokens(
    hidden: jax.Array,
    tokens: jax.Array,
    compute_logits: Callable[[jax.Array], jax.Array],
    tops: int,
    tp: TensorParallel,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `compute_logprobs`, of the token after each position, in groups of rows.

    hidden [1, T, H]; tokens int32 [1, T]. `compute_logits` maps hidden states [1, n, H] to logits float32 [1, n, V].
    """
    width = hidden.shape[1]
    rows = min(SCORED_ROWS, width)
    padding = -width % rows
    groups = jnp.pad(hidden[0], ((0, padding), (0, 0))).reshape(-1, 1, rows, hidden.shape[-1])
    wanted = jnp.pad(tokens[0], (0, padding)).reshape(-1, 1, rows)

    def score(group: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        return compute_logprobs(compute_logits(group[0]), group[1], jnp.bool_(True), tops, tp)

    logprobs, found, values = jax.lax.map(score, (groups, wanted))
    return logprobs.reshape(1, -1)[:, :width], *(
        one.reshape(1, -1, tops)[:, :width] for one in (found, values)
    )


def count_tokens(tokens: jax.Array, counted: jax.Array, share: jax.Array) -> jax.Array:
    """How often each token id of `share` [V] is among the tokens whose `counted` flag is set: int32 [.., V].

    tokens int32 and counted bool [.., n] broadcast against each other. Comparisons instead of a scatter, so XLA fuses
    the result into its consumer.
    """
    shape = jnp.broadcast_shapes(tokens.shape, counted.shape)
    found = jnp.zeros((*shape[:-1], share.size), jnp.int32)
    for column in range(shape[-1]):
        found += (tokens[..., column, None] == share) & counted[..., column, None]
    return found


def _count_seen(counts: jax.Array, drafted: jax.Array, tp: TensorParallel) -> jax.Array:
    """Token counts before each position, int32 [B, T, V]: `counts` [B, V] plus the drafted tokens before."""
    rows = jnp.arange(drafted.shape[1] + 1)[:, None]
    columns = jnp.arange(drafted.shape[1])
    seen = count_tokens(drafted[:, None], columns < rows, tp.own_tokens(counts.shape[-1]))
    return counts[:, None] + seen


def _read_columns(sampling: jax.Array) -> SamplingColumns:
    """The columns of sampling states [B, columns] by name, each [B, 1]."""
    return {name: sampling[:, column, None] for column, name in enumerate(SAMPLING_COLUMNS)}


def _read_temperature(asked: SamplingColumns) -> tuple[jax.Array, jax.Array]:
    """Which rows are greedy, and the temperature, 1 for those: both [B, 1]."""
    # most devices flush smaller numbers to zero
    greedy = asked["temperature"] < jnp.finfo(jnp.float32).tiny
    return greedy, jnp.where(greedy, 1.0, asked["temperature"])


def _scale(logits: jax.Array, top: jax.Array, temperature: jax.Array) -> jax.Array:
    """Scaled logits relative to the largest: at most 0, so a tiny temperature gives -inf and never NaN."""
    return (logits - top[..., None]) / temperature[..., None]


def _any_differs(asked: SamplingColumns, active: jax.Array, *names: str) -> jax.Array:
    """Whether an active row sets one of these parameters to another value than its neutral one."""
    return jnp.any(
        active[:, None]
        & jnp.concatenate([asked[name] != NEUTRAL_SAMPLING[name] for name in names], axis=1)
    )
