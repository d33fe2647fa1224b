"""The target: next-token prediction on the corpus."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_aot.compile.models.attention import attend
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.parameters import AbstractModel

from corpus import windows
from optimize import Weights, init_weights, train

LEARNING_RATE = 3e-3, 3e-5  # at its peak, at the end
COPIED_SHARE = 0.25
# (windows per step, tokens per window, share of the steps): mostly short, long ones at the end for the positions.
PHASES = ((8, 256, 0.85), (4, 512, 0.15))


def causal(kv, layer, q, k, v):
    """Attention inside the window, no kv kept."""
    width = q.shape[1]
    seen = jnp.tril(jnp.ones((1, width, width), bool))
    return attend(q, (k, v, seen)), kv


def next_token_loss(model: AbstractModel[CausalLM], weights: Weights, ids: jax.Array) -> jax.Array:
    """Mean cross entropy of ids [B, T+1]."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1] - 1), (ids.shape[0], ids.shape[1] - 1))
    target = model.bind(weights)
    x, _, _ = target.forward(ids[:, :-1], positions, (0,), None, causal)
    return optax.softmax_cross_entropy_with_integer_labels(target.logits(x), ids[:, 1:]).mean()


def with_copies(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """ids [B, T]; in a quarter of the rows a stretch of the first half comes again in the second.

    Models learn to copy late, and this one stops early; so it is shown more to copy than the text holds.
    """
    rows = rows.copy()
    width = rows.shape[1]
    for row in rows[rng.random(len(rows)) < COPIED_SHARE]:
        length = rng.integers(16, 65)
        source = rng.integers(0, width // 2 - length + 1)
        place = rng.integers(width // 2, width - length + 1)
        row[place : place + length] = row[source : source + length]
    return rows


def batches(stream: np.ndarray, steps: int, seed: int) -> Iterator[tuple[np.ndarray]]:
    """All phases' windows, one after the other."""
    rng = np.random.default_rng(seed)
    for rows, width, share in PHASES:
        for _ in range(round(steps * share)):
            yield (with_copies(windows(stream, rows, width + 1, rng), rng),)


def train_target(model: AbstractModel[CausalLM], stream: np.ndarray, steps: int, seed: int) -> Weights:
    """Weights under the names of `model`, float32."""
    weights = init_weights(model.shapes(), model.module.target.decoder.layers, seed)
    loss = lambda weights, ids: next_token_loss(model, weights, ids)  # noqa: E731
    return train("target", weights, loss, batches(stream, steps, seed), LEARNING_RATE, steps)
