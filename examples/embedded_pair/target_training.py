"""The target: next-token prediction on the corpus."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_aot.compile.layers import attend
from dflash_aot.compile.parameters import Bound
from dflash_aot.compile.qwen3 import Qwen3

from corpus import windows
from optimize import Weights, init_weights, train

LEARNING_RATE = 3e-3
# (windows per step, tokens per window, share of the steps): mostly short, long ones at the end for the positions.
PHASES = ((8, 256, 0.85), (4, 512, 0.15))


def causal(kv, layer, q, k, v):
    """Attention inside the window, no kv kept."""
    width = q.shape[1]
    seen = jnp.tril(jnp.ones((1, width, width), bool))
    return attend(q, (k, v, seen)), kv


def next_token_loss(model: Bound[Qwen3], weights: Weights, ids: jax.Array) -> jax.Array:
    """Mean cross entropy of ids [B, T+1]."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1] - 1), (ids.shape[0], ids.shape[1] - 1))
    target = model.bind(weights)
    x, _, _ = target.forward(ids[:, :-1], positions, (0,), None, causal)
    return optax.softmax_cross_entropy_with_integer_labels(target.logits(x), ids[:, 1:]).mean()


def batches(stream: np.ndarray, steps: int, seed: int) -> Iterator[tuple[np.ndarray]]:
    """All phases' windows, one after the other."""
    rng = np.random.default_rng(seed)
    for rows, width, share in PHASES:
        for _ in range(round(steps * share)):
            yield (windows(stream, rows, width + 1, rng),)


def train_target(model: Bound[Qwen3], stream: np.ndarray, steps: int, seed: int) -> Weights:
    """Weights under the names of `model`, float32."""
    weights = init_weights(model.shapes(), model.module.target.decoder.layers, seed)
    loss = lambda weights, ids: next_token_loss(model, weights, ids)  # noqa: E731
    return train("target", weights, loss, batches(stream, steps, seed), LEARNING_RATE, steps)
