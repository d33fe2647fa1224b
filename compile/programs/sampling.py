"""Which token is chosen of logits, as a slot's sampling state says: pure functions, in the order in which vLLM applies
them (v1/sample/sampler.py): bias, penalties, temperature, min_p, top_k, top_p, a draw.

Nothing is sorted: what a limit keeps are all logits from a threshold on, which is found by bisection.
B rows · T positions of a block, of which row i chooses the token behind it · V vocabulary, or this device's share of it
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from dflash_aot.compile.models.tensor_parallel import TensorParallel

SamplingColumns = Mapping[str, jax.Array]  # a column of `sampling` by name, float32 [B, 1]
TOTAL_MASS = 1 << 30  # of all probability, in integers: their sum is the same in whatever order it is taken
INT32_MIN, INT32_BITS = -(1 << 31), 32  # of int32
BITS_PER_PASS = 4  # bits found in one pass over the logits: the memory is read eight times, not 32
# What devices exchange beside the choice of a token, each once: of all logits the largest and the sum of their odds,
# the chosen one, the likeliest; of penalised ones the largest, the sum of odds, of mass, and two bisections.
SAMPLING_EXCHANGES = 9
INT32_MAX = (1 << 31) - 1  # so many tokens, or so much mass, there never is


def choose_tokens(
    logits: jax.Array,
    positions: jax.Array,
    drafted: jax.Array,
    active: jax.Array,
    state: Mapping[str, jax.Array],
    tp: TensorParallel,
) -> jax.Array:
    """The token behind each of a block's rows, int32 [B, T].

    logits float32 [B, T, V], positions of the tokens to choose int32 [B, T], drafted int32 [B, T-1], active bool [B];
    `state` holds the batch's rows of `sampling`, `seeds`, `bias`, `prompted` and `counts`. Rows that are not active
    choose anything.
    """
    asked = {name: state["sampling"][:, column, None] for column, name in enumerate(SAMPLING_COLUMNS)}
    logits = logits + state["bias"][:, None]
    logits = jax.lax.cond(
        _any_differs(asked, active, "repetition_penalty", "presence_penalty", "frequency_penalty"),
        lambda: penalise(logits, asked, state["prompted"], _count_seen(state["counts"], drafted, tp)),
        lambda: logits,
    )
    greedy = asked["temperature"] < jnp.finfo(jnp.float32).tiny  # smaller numbers are zero to most devices
    temperature = jnp.where(greedy, 1.0, asked["temperature"])
    top = tp.max(logits.max(axis=-1))
    floor = find_floor(logits, top, temperature, asked, active, tp)
    noise = draw_gumbel(state["seeds"], positions, tp.own_tokens(logits.shape[-1]))
    drawn = jnp.where(logits >= floor[..., None], _scale(logits, top, temperature) + noise, -jnp.inf)
    return tp.argmax(jnp.where(greedy[..., None], logits, drawn))


def penalise(logits: jax.Array, asked: SamplingColumns, prompted: jax.Array, counts: jax.Array) -> jax.Array:
    """logits float32 [B, T, V] → the same without the penalties of what stands in prompt or output.

    prompted bool [B, V]; counts int32 [B, T, V] is how often each token stands in the output that a row sees.
    Repetition is that of Keskar et al. 2019, the others are OpenAI's.
    """
    repetition, presence, frequency = (
        asked[f"{kind}_penalty"][..., None] for kind in ("repetition", "presence", "frequency")
    )
    said = counts > 0
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(prompted[:, None] | said, repeated, logits)
    return logits - frequency * counts - presence * said


def find_floor(
    logits: jax.Array,
    top: jax.Array,
    temperature: jax.Array,
    asked: SamplingColumns,
    active: jax.Array,
    tp: TensorParallel,
) -> jax.Array:
    """The lowest logit that min_p, top_k and top_p keep, float32 [B, T]; `top` [B, T] is the highest.

    Logits that are equal are kept or dropped together, so top_k and top_p may keep more than they say.
    """
    floor = top + temperature * jnp.log(asked["min_p"])

    def limit_count() -> jax.Array:
        count = asked["top_k"].astype(jnp.int32)
        return find_threshold(logits, jnp.int32(1), jnp.where(count > 0, count, INT32_MAX), tp)

    def limit_mass() -> jax.Array:
        odds = jnp.where(logits >= floor[..., None], jnp.exp(_scale(logits, top, temperature)), 0.0)
        whole = tp.sum(odds.sum(axis=-1, keepdims=True))
        mass = jnp.round(odds * (TOTAL_MASS / whole)).astype(jnp.int32)
        wanted = jnp.ceil(asked["top_p"] * tp.sum(mass.sum(axis=-1))).astype(jnp.int32)
        return find_threshold(logits, mass, jnp.where(asked["top_p"] < 1, wanted, INT32_MAX), tp)

    anything = jnp.full(top.shape, -jnp.inf)
    floor = jnp.maximum(floor, jax.lax.cond(_any_differs(asked, active, "top_k"), limit_count, lambda: anything))
    return jnp.maximum(floor, jax.lax.cond(_any_differs(asked, active, "top_p"), limit_mass, lambda: anything))


def find_threshold(logits: jax.Array, weights: jax.Array, wanted: jax.Array, tp: TensorParallel) -> jax.Array:
    """The largest number from which on the logits weigh at least `wanted` together; -inf where all weigh less.

    logits float32 [.., V], weights int32 that broadcast to them, wanted int32 [..]. A bisection by several bits at a
    time over the integers that have the order of float32: exact, and the logits are read few times.
    """
    parts = range(1, 1 << BITS_PER_PASS)

    def weigh(threshold: jax.Array) -> jax.Array:
        return jnp.where(logits >= _as_float(threshold)[..., None], weights, 0).sum(axis=-1)

    def find_bits(step: jax.Array, found: jax.Array) -> jax.Array:
        shift = INT32_BITS - BITS_PER_PASS * (step + 1)
        # Additions wrap, from the lowest number up. What weighs enough from some part on does so from all below it.
        weighed = tp.sum_each([weigh(found + (jnp.int32(part) << shift)) for part in parts])
        heavy = sum((weight >= wanted).astype(jnp.int32) for weight in weighed)
        return found + (heavy << shift)

    lowest = jnp.full(logits.shape[:-1], INT32_MIN, jnp.int32)
    return _as_float(jax.lax.fori_loop(0, INT32_BITS // BITS_PER_PASS, find_bits, lowest))


def _as_float(order: jax.Array) -> jax.Array:
    """The float32 at this place in their order, int32; -inf for what lies below, which would be NaN.

    Numbers that are not normal are zero: most devices compare them so.
    """
    lowest = jnp.int32(INT32_MIN + (1 << 23) - 1)  # the place of -inf
    number = jax.lax.bitcast_convert_type(jnp.where(order < 0, order ^ INT32_MAX, order), jnp.float32)
    number = jnp.where(jnp.abs(number) < jnp.finfo(jnp.float32).tiny, 0.0, number)
    return jnp.where(order < lowest, -jnp.inf, number)


def draw_gumbel(seeds: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gumbel noise float32 [B, T, V], of seeds int32 [B, 2], positions int32 [B, T] and tokens int32 [V] alone.

    The token of which logit and noise sum up to most is a draw from the logits' softmax (Gumbel 1954).
    """
    return make_gumbel(draw_bits(seeds, positions, tokens))


def make_gumbel(bits: jax.Array) -> jax.Array:
    """Random uint32 → float32 -2.8 … 22.9, as -log of an exponential variate.

    From all 32 bits: `jax.random.gumbel` takes 23, ends at 15.9 and so loses most of the tokens rarer than 1e-7.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def draw_bits(seeds: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """Random uint32 [B, T, V]: for each token what `jax.random.bits` draws for all of them, by its hash alone."""
    keys = jax.random.wrap_key_data(jax.lax.bitcast_convert_type(seeds, jnp.uint32), impl="threefry2x32")
    folded = jax.random.key_data(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, positions))
    shape = (*positions.shape, tokens.size)
    high, low = (jnp.broadcast_to(folded[..., half, None], shape) for half in (0, 1))
    index = jnp.broadcast_to(tokens.astype(jnp.uint32), shape)
    first, second = threefry2x32_p.bind(high, low, jnp.zeros_like(index), index)
    return first ^ second


def compute_logprobs(
    logits: jax.Array, chosen: jax.Array, wanted: jax.Array, tops: int, tp: TensorParallel
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of what was chosen, float32 [B, T]; the likeliest `tops` tokens and theirs, [B, T, tops].

    logits float32 [B, T, V] as the target gives them, chosen int32 [B, T]. The likeliest are zeros unless `wanted`,
    bool.
    """
    top = tp.max(logits.max(axis=-1))
    total = top + jnp.log(tp.sum(jnp.exp(logits - top[..., None]).sum(axis=-1)))

    def list_tops() -> tuple[jax.Array, jax.Array]:
        values, tokens = tp.top_values(logits, tops)
        return tokens, values - total[..., None]

    shape = (*chosen.shape, tops)
    nothing = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    return tp.take_logits(logits, chosen) - total, *jax.lax.cond(wanted, list_tops, lambda: nothing)


def count_tokens(tokens: jax.Array, counted: jax.Array, share: jax.Array) -> jax.Array:
    """How often each token of a `share` [V] of the vocabulary is among those `counted`: int32 [.., V].

    tokens int32 and counted bool [.., n] broadcast against each other. Compared, not scattered: it melts into what
    reads it.
    """
    shape = jnp.broadcast_shapes(tokens.shape, counted.shape)
    found = jnp.zeros((*shape[:-1], share.size), jnp.int32)
    for column in range(shape[-1]):
        found += (tokens[..., column, None] == share) & counted[..., column, None]
    return found


def _count_seen(counts: jax.Array, drafted: jax.Array, tp: TensorParallel) -> jax.Array:
    """Counts int32 [B, V] of the state, and for row i the first i drafted tokens: [B, T, V]."""
    rows, columns = jnp.arange(drafted.shape[1] + 1)[:, None], jnp.arange(drafted.shape[1])
    seen = count_tokens(drafted[:, None], columns < rows, tp.own_tokens(counts.shape[-1]))
    return counts[:, None] + seen


def _scale(logits: jax.Array, top: jax.Array, temperature: jax.Array) -> jax.Array:
    """Not above 0, so that the smallest temperature makes -inf of it, never NaN."""
    return (logits - top[..., None]) / temperature[..., None]


def _any_differs(asked: SamplingColumns, active: jax.Array, *names: str) -> jax.Array:
    """Whether an active row asks for one of these."""
    return jnp.any(active[:, None] & jnp.concatenate([asked[name] != NEUTRAL_SAMPLING[name] for name in names], axis=1))
