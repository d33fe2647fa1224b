"""Trains the target by next-token prediction on the corpus."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_aot.compile.models.attention import attend
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.parameters import AbstractModel

from corpus import windows
from optimize import Weights, init_weights, train

LEARNING_RATE = 3e-3, 3e-5  # at the peak, at the end
COPIED_SHARE = 0.25
# (windows per step, tokens per window, share of the steps). Long windows come last, to train the high positions.
PHASES = ((8, 256, 0.85), (4, 512, 0.15))


def causal(kv, layer, inputs):
    """Causal attention within the window; kv is not stored."""
    width = inputs.queries.shape[-2]
    seen = jnp.tril(jnp.ones((1, width, width), bool))
    return attend(inputs.queries, (inputs.keys, inputs.values, seen)), kv


def next_token_loss(model: AbstractModel[CausalLM], weights: Weights, ids: jax.Array) -> jax.Array:
    """Mean cross entropy of ids [B, T+1]."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1] - 1), (ids.shape[0], ids.shape[1] - 1))
    target = model.bind(weights)
    x, _, _ = target.forward(ids[:, :-1], positions, (0,), None, causal)
    return optax.softmax_cross_entropy_with_integer_labels(target.logits(x), ids[:, 1:]).mean()


def with_copies(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """ids [B, T] where a quarter of the rows repeat a part of their first half in their second half.

    Models learn late to copy, and this training is short, so it shows more repetition than the corpus has.
    """
    rows = rows.copy()
    width = rows.shape[1]
    for row in rows[rng.random(len(rows)) < COPIED_SHARE]:
        length = rng.integers(16, 65)
        source = rng.integers(0, width // 2 - length + 1)
        destination = rng.integers(width // 2, width - length + 1)
        row[destination : destination + length] = row[source : source + length]
    return rows


def batches(stream: np.ndarray, steps: int, seed: int) -> Iterator[tuple[np.ndarray]]:
    """Windows of all phases in turn."""
    rng = np.random.default_rng(seed)
    for rows, width, share in PHASES:
        for _ in range(round(steps * share)):
            yield (with_copies(windows(stream, rows, width + 1, rng), rng),)


def train_target(
    model: AbstractModel[CausalLM],
    stream: np.ndarray,
    steps: int,
    seed: int,
    checkpoint: Path,
    every: int,
) -> Weights:
    """The trained weights in float32, by the parameter names of `model`; see `train`."""
    weights = init_weights(model.shapes(), model.module.target.decoder.layers, seed)
    loss = lambda weights, ids: next_token_loss(model, weights, ids)  # noqa: E731
    return train(
        "target",
        weights,
        loss,
        batches(stream, steps, seed),
        LEARNING_RATE,
        steps,
        checkpoint,
        every,
    )
