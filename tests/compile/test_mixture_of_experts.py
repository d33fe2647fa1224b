"""The mixture-of-experts MLP against a loop over tokens, and the independence of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_aot.cache.model_config.architecture import MixtureOfExperts
from dflash_aot.compile.models.mixture_of_experts import RoutedMlp
from dflash_aot.compile.models.parameters import AbstractModel

HIDDEN, WIDTH, COUNT, CHOSEN = 24, 12, 16, 3


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(11)
    shapes = AbstractModel(lambda: RoutedMlp(HIDDEN, MixtureOfExperts(COUNT, CHOSEN, WIDTH, True), "float32")).shapes()
    return {name: rng.standard_normal(leaf.shape, np.float32) / 2 for name, leaf in shapes.items()}


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(12).standard_normal((32, HIDDEN), np.float32)


def jitted(normalized):
    model = AbstractModel(lambda: RoutedMlp(HIDDEN, MixtureOfExperts(COUNT, CHOSEN, WIDTH, normalized), "float32"))
    return jax.jit(lambda weights, x: model.bind(weights)(x))


run = jitted(normalized=True)


def choose(weights, token, normalized=True):
    """The experts of one token, with their shares."""
    scores = weights["gate.weight"].astype(np.float64) @ token
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    chosen = np.argsort(-shares)[:CHOSEN]
    return {int(e): shares[e] / (shares[chosen].sum() if normalized else 1) for e in chosen}


def run_slowly(weights, token, normalized):
    """One token, expert by expert, in float64."""
    total = np.zeros(HIDDEN)
    for expert, share in choose(weights, token, normalized).items():
        gate, up = (weights["gate_up"][2 * expert + part].astype(np.float64) @ token for part in (0, 1))
        total += share * (weights["down"][expert].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    return total


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("count", [1, 5, 32])
def test_routed_mlp_equals_a_loop_over_tokens(weights, tokens, normalized, count):
    expected = [run_slowly(weights, token, normalized) for token in tokens[:count]]
    found = jitted(normalized)(weights, tokens[:count])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


def test_batched_tokens_give_the_same_as_flat_tokens(weights, tokens):
    np.testing.assert_array_equal(
        run(weights, tokens.reshape(4, 8, HIDDEN)), run(weights, tokens).reshape(4, 8, HIDDEN)
    )


@pytest.mark.parametrize("others", [0.0, 1e6, np.nan])
def test_output_does_not_depend_on_other_tokens_of_the_batch(weights, tokens, others):
    whole = run(weights, tokens)
    for row in (0, 7, 31):
        padded = np.full_like(tokens, others)
        padded[row] = tokens[row]
        np.testing.assert_array_equal(run(weights, padded)[row], whole[row])


def test_token_alone_equals_the_token_in_a_batch(weights, tokens):
    """Up to the rounding of products with one row and with many: a millionth of the largest value."""
    whole = np.asarray(run(weights, tokens))
    alone = np.concatenate([run(weights, tokens[row : row + 1]) for row in range(4)])
    np.testing.assert_allclose(alone, whole[:4], rtol=0, atol=1e-6 * abs(whole).max())


def test_overflow_in_an_expert_does_not_reach_tokens_that_did_not_choose_it(weights, tokens):
    mine, theirs = (set(choose(weights, tokens[row])) for row in (0, 1))
    assert theirs - mine
    broken = {**weights, "down": weights["down"].copy()}
    broken["down"][sorted(theirs - mine)] = np.inf
    found = run(broken, tokens[:2])
    np.testing.assert_array_equal(found[0], run(weights, tokens[:2])[0])
    assert not np.isfinite(found[1]).any()


def test_expert_weights_are_not_copied():
    hidden, experts, n = 256, MixtureOfExperts(32, 4, 128, True), 32
    model = AbstractModel(lambda: RoutedMlp(hidden, experts, "float32"))
    function = jax.jit(lambda weights, x: model.bind(weights)(x))
    compiled = function.lower(model.shapes(), jax.ShapeDtypeStruct((n, hidden), jnp.float32)).compile()
    one_expert = 3 * hidden * experts.width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * one_expert
