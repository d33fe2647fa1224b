"""Sampling from logits, against numpy (sorting, counting, dividing)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from dflash_aot.compile.models.matmul import (
    LANES,
    find_best_in_tiles,
    find_largest,
    find_largest_in_tiles,
    find_largest_values,
    matmul_by_tile,
)
from dflash_aot.compile.models.tensor_parallel import ONE_DEVICE
from dflash_aot.compile.programs.sampling import (
    accept,
    choose_tokens,
    compute_logprobs,
    draw_bits,
    draw_draft_scores,
    find_threshold,
    make_gumbel,
)
from tests.compile.quick import jit_quickly

ROWS = 8_000  # draws of a distribution in one batch
SIGMAS = 3.1  # chance exceeds this once in a thousand times; the seeds are fixed

choose = jit_quickly(choose_tokens, static_argnames="tp")
# For calls that take longer than compiling.
choose_of_many = jax.jit(choose_tokens, static_argnames="tp", compiler_options={"xla_backend_optimization_level": 3})
draw_all_bits = jit_quickly(draw_bits)
list_largest = jit_quickly(find_largest_values, static_argnames="count")
bisect = jit_quickly(find_threshold, static_argnames="tp")


def make_state(rows, vocab, seed=0, **asked):
    """The sampling state of a batch. `asked`: for each column one number, or one per row."""
    columns = {**NEUTRAL_SAMPLING, **{name: asked.pop(name) for name in SAMPLING_COLUMNS if name in asked}}
    sampling = np.stack([np.broadcast_to(np.float32(columns[name]), rows) for name in SAMPLING_COLUMNS], axis=1)
    seeds = np.stack([np.full(rows, seed), np.arange(rows)], axis=1).astype(np.int32)
    nothing = {"bias": np.float32, "prompted": np.bool_, "counts": np.int32}
    rest = {name: asked.pop(name, np.zeros((rows, vocab), dtype)) for name, dtype in nothing.items()}
    assert not asked
    return {"sampling": sampling, "seeds": seeds, **rest}


def choose_all(logits, state, positions=None, drafted=None, choose=choose):
    B, T, _ = logits.shape
    positions = np.broadcast_to(1 + np.arange(T), (B, T)) if positions is None else positions
    drafted = np.zeros((B, T - 1), np.int32) if drafted is None else drafted
    active = np.ones(B, bool)
    return np.asarray(choose(np.float32(logits), np.int32(positions), drafted, active, state, tp=ONE_DEVICE))


def softmax(logits):
    odds = np.exp(np.float64(logits) - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def assert_drawn_from(tokens, probabilities):
    """Chi-square test (Pearson 1900), whose cube root is nearly normal (Wilson and Hilferty 1931).

    Also asserts that no token with probability zero was drawn.
    """
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected, freedom = probabilities[possible] * len(tokens), possible.sum() - 1
    if freedom:
        spread = 2 / (9 * freedom)
        score = ((counts[possible] - expected) ** 2 / expected).sum()
        assert ((score / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < SIGMAS


NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
VALUES = st.one_of(NUMBERS, st.sampled_from([0.0, -0.0, 1.0, 1.0, -np.inf, -2.5, 3e38, -3e38]))


def find_threshold_slowly(values, weights, wanted):
    for value in sorted(set(values), reverse=True):
        if weights[values >= value].sum() >= wanted:
            return value
    return -np.inf


@given(st.lists(st.tuples(VALUES, st.integers(0, 9)), min_size=12, max_size=12), st.integers(1, 60))
@settings(max_examples=150)
def test_find_threshold_equals_sorting(pairs, wanted):
    values, weights = np.float32([value for value, _ in pairs]), np.int32([weight for _, weight in pairs])
    found = bisect(values, weights, np.int32(wanted), tp=ONE_DEVICE)
    expected = find_threshold_slowly(values, weights, wanted)
    assert (values >= np.asarray(found)).tolist() == (values >= expected).tolist()
    assert found == expected


@given(st.lists(st.integers(-3, 3), min_size=12, max_size=12), st.sampled_from([1, 5, 12]))
def test_find_largest_values_equals_a_stable_sort(values, count):
    values = np.float32(values)
    found, places = list_largest(values[None], count)
    expected = np.argsort(-values, kind="stable")[:count]
    assert places[0].tolist() == expected.tolist()
    assert found[0].tolist() == values[expected].tolist()


def test_find_largest_equals_argmax():
    """Of ties the first, in one tile or in two; of a row without a finite value the first; and the first NaN."""
    for length in [7, LANES**2, LANES**2 + 1]:
        values = np.random.default_rng(0).integers(-3, 4, (2, 4, length)).astype(np.float32)
        values[0, 0, [5, length - 1]], values[0, 1], values[0, 2, [length - 1]] = 9, -np.inf, 9
        values[1, 0, [3, length // 2]], values[1, 1, :] = np.nan, 2
        found = jit_quickly(find_largest)(values)
        assert found.dtype == np.int32
        assert found.tolist() == values.argmax(axis=-1).tolist()


def test_largest_outputs_by_tile_equal_the_whole_product():
    for scaled in [False, True]:
        rng = np.random.default_rng(8)
        x, weight, scale = rng.standard_normal((10, 32), np.float32), rng.standard_normal((768, 32), np.float32), None
        if scaled:
            weight, scale = rng.integers(-127, 128, weight.shape, np.int8), rng.uniform(0.1, 1, 768).astype(np.float32)
        tiles = matmul_by_tile(weight, x, scale, 128)
        assert tiles.shape == (6, 16, 128)
        found, tokens = find_largest_in_tiles(tiles, 10, 3)
        logits = np.float64(x) @ np.float64(weight if scale is None else weight * scale[:, None]).T
        expected = np.argsort(-logits, axis=1)[:, :3]
        assert tokens.tolist() == expected.tolist()
        np.testing.assert_allclose(found, np.take_along_axis(logits, expected, axis=1), rtol=1e-5)
    tied = np.random.default_rng(3).integers(0, 2, (6, 16, 128)).astype(np.float32)
    value, index = find_best_in_tiles(jnp.asarray(tied), 10)
    assert value.tolist() == [1] * 10
    assert index.tolist() == np.moveaxis(tied, 0, 1).reshape(16, -1)[:10].argmax(axis=1).tolist()


def test_draw_bits_equals_jax_for_parts_of_the_vocabulary():
    seeds, positions = np.int32([[-5, 7], [1, -2]]), np.int32([[1, 2, 3], [7, 1 << 20, 9]])
    found = draw_all_bits(seeds, positions, jnp.arange(37))
    for row, of_row in enumerate(positions):
        key = jax.random.wrap_key_data(seeds[row].view(np.uint32), impl="threefry2x32")
        for column, position in enumerate(of_row):
            expected = jax.random.bits(jax.random.fold_in(key, position), (37,), jnp.uint32)
            np.testing.assert_array_equal(found[row, column], expected)
    np.testing.assert_array_equal(draw_all_bits(seeds, positions, jnp.arange(10, 20)), found[..., 10:20])


def test_gumbel_noise_is_finite_and_has_the_whole_range():
    lowest, highest = (float(make_gumbel(jnp.uint32(bits))) for bits in (2**32 - 1, 0))
    assert (lowest, highest) == pytest.approx((-np.log(24 * np.log(2)), 33 * np.log(2)), rel=1e-6)
    evenly = np.linspace(0, 2**32 - 1, 100_001).astype(np.uint32)
    falling = np.exp(-np.exp(-np.float64(make_gumbel(evenly))))  # its distribution function gives even steps
    np.testing.assert_allclose(falling, np.linspace(1, 0, 100_001), atol=1e-5)


def keep_slowly(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after min_p, top_k and top_p, by sorting. Logits must not be equal."""
    left = softmax(logits / temperature)
    left = np.where(left >= min_p * left.max(), left, 0)
    order = np.argsort(-left)
    if top_k:
        left[order[top_k:]] = 0
    left, mass, kept = left / left.sum(), 0.0, []
    for token in order:
        if mass < top_p:
            kept.append(token)
        mass += left[token]
    left = np.where(np.isin(np.arange(len(left)), kept), left, 0)
    return left / left.sum()


LIMITS = [
    {"top_k": 3},
    {"top_k": 100},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 4, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
]


def test_limits_keep_the_relative_probabilities():
    for asked in LIMITS:
        logits = np.float32([1.5, 0.0, -0.5, 1.0, -3.0, 0.5, -1.5, 0.8])
        tokens = choose_all(np.tile(logits, (ROWS, 1, 1)), make_state(ROWS, 8, seed=3, **{"temperature": 1, **asked}))
        assert_drawn_from(tokens[:, 0], keep_slowly(logits, **asked))


def test_limits_keep_equal_logits_together():
    logits = np.tile(np.float32([2, 2, 2, 0, -1]), (ROWS, 1, 1))
    for asked in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        tokens = choose_all(logits, make_state(ROWS, 5, temperature=1, **asked))
        assert_drawn_from(tokens[:, 0], np.float64([1, 1, 1, 0, 0]) / 3)


def test_top_p_is_exact_for_large_vocabularies():
    vocab = 100_000
    logits = np.zeros((1, 1, vocab), np.float32)
    logits[0, 0, :100] = np.log(999)  # half of the mass, in a thousandth of the tokens

    def draw(seed, **limits):
        return choose_all(logits, make_state(1, vocab, seed, temperature=1, **limits), choose=choose_of_many).item()

    assert abs(sum(draw(seed) < 100 for seed in range(200)) - 100) < SIGMAS * (200 / 4) ** 0.5
    for top_p, several in ((0.49, False), (0.51, True)):
        assert any(draw(seed, top_p=top_p) >= 100 for seed in range(60)) == several


TABLE = np.random.default_rng(5).normal(size=(4, 4)).astype(np.float32)  # a Markov chain: logits after each token
DRAFTS = {
    "right": lambda rng, anchors, ahead: ahead,
    "wrong": lambda rng, anchors, ahead: (ahead + 1) % 4,
    "mixed": lambda rng, anchors, ahead: rng.integers(0, 4, ahead.shape),
    "likely": lambda rng, anchors, ahead: np.tile(TABLE[anchors].argmax(axis=-1)[:, None], ahead.shape[1]),
}


def follow_chain(steps, k, draft, known):
    """Generates `steps` tokens of every row after token 0, in rounds that verify `k` drafted tokens.

    `known` [ROWS, ..] are the tokens to come, which a draft may use. Also returns how many tokens each round accepted
    in the rows that were not done.
    """
    state, rng, places = make_state(ROWS, 4, seed=11, temperature=1), np.random.default_rng(1), np.arange(k + 1)
    written = np.full((ROWS, steps + k), -1)
    anchors, lengths, history = np.zeros(ROWS, int), np.zeros(ROWS, int), []
    while (going := lengths < steps).any():
        ahead = np.take_along_axis(known, lengths[:, None] + places[:k], axis=1)
        block = np.concatenate([anchors[:, None], draft(rng, anchors, ahead)], axis=1).astype(np.int32)
        chosen = choose_all(TABLE[block], state, lengths[:, None] + 1 + places, block[:, 1:])
        accepted, bonus = (np.asarray(one) for one in accept(jnp.asarray(block), jnp.asarray(chosen)))
        rows, columns = np.nonzero(going[:, None] & (places <= accepted[:, None]))
        written[rows, lengths[rows] + columns] = chosen[rows, columns]
        anchors, lengths = np.where(going, bonus, anchors), np.where(going, lengths + accepted + 1, lengths)
        history.append(accepted[going])
    return written[:, :steps], np.concatenate(history)


@pytest.fixture(scope="module")
def plain():
    """Tokens of every row without speculation, as many as the widest block needs."""
    return follow_chain(20, 0, DRAFTS["right"], np.zeros((ROWS, 0), int))[0]


def test_tokens_without_speculation_follow_the_chain(plain):
    first, later = softmax(TABLE[0]), softmax(TABLE)
    joint = first[:, None, None] * later[:, :, None] * later[None]
    assert_drawn_from(np.ravel_multi_index(plain[:, :3].T, (4, 4, 4)), joint.ravel())


def test_draft_does_not_change_tokens(plain):
    for draft, k in [("right", 3), ("wrong", 1), ("mixed", 7), ("likely", 3)]:
        written, accepted = follow_chain(3, k, DRAFTS[draft], plain)
        np.testing.assert_array_equal(written, plain[:, :3])
        least, most = {"right": (k, k), "wrong": (0, 0)}.get(draft, (0, k))
        assert (accepted.min(), accepted.max() >= min(most, 3)) == (least, True) and accepted.max() <= most


def test_zero_temperature_chooses_the_first_of_the_largest():
    for temperature in [0.0, 1e-45, 1e-38, 1e-30, 1e-6]:
        logits = np.float32([[[1, 3, 2], [-5, -4, -3], [0, -1, 0.5]]])
        assert choose_all(logits, make_state(1, 3, temperature=temperature)).tolist() == [[1, 2, 2]]
        tied = np.float32([[[1, 3, 3], [0, 0, 0]]])
        greedy = choose_all(tied, make_state(1, 3, temperature=0, top_k=2, top_p=0.5, min_p=0.3))
        assert greedy.tolist() == [[1, 0]] == np.asarray(ONE_DEVICE.argmax(jnp.asarray(tied))).tolist()


def test_inactive_row_may_hold_zeros():
    logits = np.float32([[[1, 2, 0]], [[1, 2, 0]]])
    state = make_state(2, 3, temperature=0, counts=np.ones((2, 3), np.int32))
    state["sampling"][1] = 0
    active = np.array([True, False])
    tokens = choose(logits, np.ones((2, 1), np.int32), np.zeros((2, 0), np.int32), active, state, tp=ONE_DEVICE)
    assert tokens[0].tolist() == [1]


def penalise_slowly(logits, prompt, output, bias, repetition, presence, frequency):
    found = np.float64(logits) + bias
    for token in {*prompt, *output}:
        found[token] = found[token] / repetition if found[token] > 0 else found[token] * repetition
    for token in set(output):
        found[token] -= frequency * output.count(token) + presence
    return found


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_penalties_count_the_drafted_tokens_before_each_position(seed):
    rng = np.random.default_rng(seed)
    B, T, V = 3, 5, 6
    logits, bias = rng.normal(size=(B, T, V)).astype(np.float32), rng.normal(size=(B, V)).astype(np.float32)
    drafted, counts = rng.integers(0, V, (B, T - 1)), rng.integers(0, 3, (B, V)).astype(np.int32)
    prompted = rng.random((B, V)) < 0.3
    asked = {
        "repetition_penalty": rng.uniform(0.5, 2, B),
        "presence_penalty": rng.uniform(-1, 1, B),
        "frequency_penalty": rng.uniform(-1, 1, B),
    }
    state = make_state(B, V, bias=bias, counts=counts, prompted=prompted, **asked)
    tokens = choose_all(logits, state, drafted=drafted.astype(np.int32))
    for row in range(B):
        before = np.repeat(np.arange(V), counts[row]).tolist()
        wanted = {name.removesuffix("_penalty"): values[row] for name, values in asked.items()}
        for column in range(T):
            output = before + drafted[row, :column].tolist()
            expected = penalise_slowly(
                logits[row, column], np.flatnonzero(prompted[row]).tolist(), output, bias[row], **wanted
            )
            best, second = np.sort(expected)[:-3:-1]
            assert best - second < 1e-5 or tokens[row, column] == expected.argmax()


def test_logprobs_are_those_of_the_raw_logits():
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(2, 3, 40)) * 8).astype(np.float32)
    chosen = rng.integers(0, 40, (2, 3))
    of_chosen, tokens, tops = compute_logprobs(jnp.asarray(logits), jnp.asarray(chosen), jnp.array(True), 5, ONE_DEVICE)
    expected = np.log(softmax(logits))
    np.testing.assert_allclose(of_chosen, np.take_along_axis(expected, chosen[..., None], -1)[..., 0], atol=1e-5)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :5]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_allclose(tops, np.take_along_axis(expected, order, -1), atol=1e-5)


FLAGS = jnp.ones(1, bool), jnp.ones(1, bool)  # of a draft: `sampled` and `penalised`


@jit_quickly
def draft_and_choose(logits, guesses, asked, seeds, bias=0.0, prompted=False, counts=0):
    B, V = logits.shape
    state = {
        "sampling": jnp.broadcast_to(asked, (B, asked.size)),
        "seeds": seeds,
        "bias": jnp.broadcast_to(jnp.float32(bias), (B, V)),
        "prompted": jnp.broadcast_to(prompted, (B, V)),
        "counts": jnp.broadcast_to(counts, (B, V)),
    }
    positions, tokens = jnp.full((B, 1), 5), jnp.broadcast_to(jnp.arange(V), (B, 1, V))
    no_draft, active = jnp.zeros((B, 0), jnp.int32), jnp.ones(B, bool)
    chosen = choose_tokens(logits[:, None], positions, no_draft, active, state, ONE_DEVICE)
    scores = draw_draft_scores(guesses[:, None, None], tokens, positions, *FLAGS, state, ONE_DEVICE)
    return chosen[:, 0], scores.argmax(axis=-1)[:, 0, 0]


def test_draft_with_the_targets_logits_draws_the_chosen_tokens():
    for asked in [
        {"temperature": 0.7, "min_p": 0.1},
        {"top_k": 9, "top_p": 0.5},
        {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"top_k": 5, "repetition_penalty": 0.8, "presence_penalty": 0.6, "frequency_penalty": -0.4},
    ]:
        rng = np.random.default_rng(3)
        texts = rng.standard_normal(24, np.float32), rng.random(24) < 0.3, rng.integers(0, 4, 24, np.int32)
        columns = jnp.array([{**NEUTRAL_SAMPLING, "temperature": 1.0, **asked}[name] for name in SAMPLING_COLUMNS])
        logits, seeds = 2 * rng.standard_normal((500, 24), np.float32), rng.integers(0, 1 << 31, (500, 2), np.int32)
        chosen, drafted = draft_and_choose(logits, logits, columns, seeds, *texts)
        assert chosen.tolist() == drafted.tolist()


def test_accept_stops_at_the_first_mismatch_of_each_row():
    for block, chosen, accepted, bonus in [
        ([9, 1, 2, 3], [1, 2, 3, 4], 3, 4),  # all accepted, and the bonus token
        ([9, 1, 2, 3], [1, 2, 7, 4], 2, 7),
        ([9, 1, 2, 3], [5, 2, 3, 4], 0, 5),  # a match after a mismatch does not count
        ([9, 9, 9, 9], [9, 9, 8, 9], 2, 8),
        ([9], [4], 0, 4),  # K = 0: the target's own token
    ]:
        found = accept(jnp.array([block]), jnp.array([chosen]))
        assert [array.tolist() for array in found] == [[accepted], [bonus]]
        assert found[0].dtype == found[1].dtype == jnp.int32
