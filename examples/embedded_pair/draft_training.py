"""The draft: blocks at anchors sampled in the target's own text, loss weighted towards the first positions."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_aot.compile.dflash import DFlash
from dflash_aot.compile.layers import attend
from dflash_aot.compile.parameters import Bound
from dflash_aot.compile.qwen3 import Qwen3

from optimize import Weights, init_weights, train
from rollouts import PROMPT, WIDTH
from target_training import causal

LEARNING_RATE = 2e-3
SEQUENCES, ANCHORS = 8, 16  # per step
DECAY = 7.0  # w_i = exp(-(i-1)/DECAY), the DFlash paper's for blocks of 16


def block_loss(target, target_weights, draft, draft_weights, ids: jax.Array, anchors: jax.Array) -> jax.Array:
    """ids [N, T], anchors [N, A]: cross entropy of rows 1.. of every anchor's block, weighted and averaged."""
    facts = draft.module.draft
    N, T = ids.shape
    width = facts.block
    model, drafter = target.bind(target_weights), draft.bind(draft_weights)
    context_positions = jnp.broadcast_to(jnp.arange(T), (N, T))
    _, features, _ = model.forward(ids, context_positions, facts.taps, None, causal)
    context = drafter.context_keys_values(jax.lax.stop_gradient(features), context_positions)

    positions = (anchors[:, :, None] + jnp.arange(width)).reshape(N, -1)
    truth = jnp.take_along_axis(ids, positions, axis=1)
    offset = jnp.arange(positions.shape[1]) % width
    blocks = jnp.where(offset == 0, truth, facts.mask_token)
    before = context_positions[:, None, :] < jnp.repeat(anchors, width, axis=1)[:, :, None]
    block = jnp.arange(positions.shape[1]) // width
    together = (block[:, None] == block)[None]

    def attend_both(layer, q, k, v):
        return attend(q, (*context[layer], before), (k, v, together))

    hidden = drafter.block_hidden(model.embed(blocks), positions, attend_both)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.head(hidden), truth)
    weight = jnp.where(offset == 0, 0.0, jnp.exp(-(offset - 1) / DECAY))
    return (losses * weight).sum() / (weight.sum() * N)


def batches(ids: np.ndarray, block: int, steps: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Sequences in shuffled order, anchors anywhere in what the target wrote."""
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(ids)) for _ in range(-(-steps * SEQUENCES // len(ids)))])
    for step in range(steps):
        chosen = ids[order[step * SEQUENCES : (step + 1) * SEQUENCES]]
        yield chosen, rng.integers(PROMPT, WIDTH - block, (SEQUENCES, ANCHORS))


def train_draft(
    target: Bound[Qwen3], target_weights: Weights, draft: Bound[DFlash], ids: np.ndarray, steps: int, seed: int
) -> Weights:
    """Weights under the names of `draft`, float32; the target's stay as they are."""
    facts = draft.module.draft
    weights = init_weights(draft.shapes(), facts.decoder.layers, seed)
    loss = lambda weights, ids, anchors: block_loss(target, target_weights, draft, weights, ids, anchors)  # noqa: E731
    return train("draft", weights, loss, batches(ids, facts.block, steps, seed), LEARNING_RATE, steps)
