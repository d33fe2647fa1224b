"""Trains the draft on blocks at random anchors in the target's own text, with most weight on the first positions.

N sequences · A anchors of a sequence · T tokens of a sequence · F width of the features · H hidden
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_aot.compile.models.attention import attend
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.layers import AttentionInputs
from dflash_aot.compile.models.parameters import AbstractModel

from optimize import Weights, train
from products import multiply_in_bfloat16
from rollouts import PROMPT, WIDTH
from target_training import causal

SEQUENCES = 8  # per step


@dataclass(frozen=True)
class Phase:
    """Settings of one phase of the draft's training.

    Attributes:
        block: rows per anchor, including the anchor.
        anchors: anchors per sequence.
        decay: row i has weight exp(-(i-1)/decay), because a rejected token also rejects all that follow.
        sharpness: factor of the target's logits before they become labels.
        learning_rate: at the peak and at the end.
        steps: optimizer steps.
    """

    block: int
    anchors: int
    decay: float
    sharpness: float
    learning_rate: tuple[float, float]
    steps: int


# The labels are the target's distributions: they teach more per anchor than the chosen token alone. Short blocks come
# first, because the first rows matter most and a step holds three times as many of them; then the final block size, at
# last with sharper labels and more weight on late rows.
PHASES = (
    Phase(block=6, anchors=48, decay=4.0, sharpness=1.0, learning_rate=(2e-3, 1e-3), steps=2258),
    Phase(block=16, anchors=20, decay=4.0, sharpness=1.5, learning_rate=(1e-3, 1e-5), steps=1042),
    Phase(block=16, anchors=20, decay=6.0, sharpness=2.0, learning_rate=(1e-3, 1e-5), steps=5400),
)
LEAST_STEPS = 17  # at least two in each phase


def plan_phases(steps: int) -> tuple[Phase, ...]:
    """PHASES with so many steps in all, at least LEAST_STEPS."""
    total = sum(phase.steps for phase in PHASES)
    return tuple(replace(phase, steps=round(phase.steps * steps / total)) for phase in PHASES)


def block_loss(
    models: tuple[AbstractModel[CausalLM], AbstractModel[DFlash]],
    phase: Phase,
    weights: Weights,
    target_weights: Weights,
    batch: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
) -> jax.Array:
    """Weighted mean cross entropy of the rows of every anchor's block that predict a token.

    `batch` holds ids [N, T], features [N, T, F], the target's last normed hidden states [N, T, H], anchors [N, A].
    """
    ids, features, last, anchors = batch
    model, drafter = models[0].bind(target_weights), models[1].bind(weights)
    positions = list_positions(anchors, phase.block)
    offset = jnp.arange(positions.shape[1]) % phase.block
    hidden = run_blocks(model, drafter, phase.block, ids, features, anchors)
    logits = drafter.logits(hidden, model)
    heads = drafter.draft.heads
    # The token at a position is chosen from the hidden state before it.
    before = positions - heads.first_row
    teacher = model.head(jnp.take_along_axis(last, before[..., None], axis=1))
    labels = jax.nn.softmax(teacher * phase.sharpness)
    losses = optax.softmax_cross_entropy(logits, labels)
    if heads.chains:
        previous = jnp.take_along_axis(ids, before, axis=1)
        scores = logits + score_transitions(drafter, hidden, previous)
        of_scores = optax.softmax_cross_entropy(scores, labels)
        # A selector's candidates are chosen by the logits, and the tokens by their sums with the transitions: both
        # learn. A Markov head chooses by the sums alone.
        losses = (losses + of_scores) / 2 if heads.selector else of_scores
    row = offset - heads.first_row
    weight = jnp.where(row < 0, 0.0, jnp.exp(-row / phase.decay))
    return (losses * weight).sum() / (weight.sum() * len(ids))


def list_positions(anchors: jax.Array, width: int) -> jax.Array:
    """The positions of the blocks of anchors [N, A], block by block: [N, A · width]."""
    return (anchors[:, :, None] + jnp.arange(width)).reshape(len(anchors), -1)


def run_blocks(
    model: CausalLM,
    drafter: DFlash,
    width: int,
    ids: jax.Array,
    features: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """The draft's normed hidden states of every anchor's block, [N, A · width, H]; arguments as in `block_loss`."""
    (N, T), A = ids.shape, anchors.shape[1]
    context_positions = jnp.broadcast_to(jnp.arange(T), (N, T))
    context = drafter.write_context(
        features, context_positions, lambda kv, layer, k, v: [*kv, (k, v)], []
    )

    positions = list_positions(anchors, width)
    truth = jnp.take_along_axis(ids, positions, axis=1)
    block, offset = jnp.divmod(jnp.arange(positions.shape[1]), width)
    blocks = jnp.where(offset == 0, truth, drafter.draft.mask_token)
    before = context_positions[:, None, :] < jnp.repeat(anchors, width, axis=1)[:, :, None]
    together = (block[:, None] == block)[None]

    def join(x: jax.Array) -> jax.Array:
        """[N · A, .., block, D] → [N, .., A · block, D]."""
        x = jnp.moveaxis(x.reshape(N, A, *x.shape[1:]), 1, -3)
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])

    def attend_both(layer: int, inputs: AttentionInputs) -> jax.Array:
        q = inputs.queries
        past_keys, past_values = context[layer]
        own = join(inputs.keys), join(inputs.values), together
        mixed = attend(join(q), (past_keys, past_values, before), own)
        mixed = mixed.reshape(*mixed.shape[:-2], A, width, mixed.shape[-1])
        return jnp.moveaxis(mixed, -3, 1).reshape(q.shape)

    # Each block is a row of its own, because convolutions must not cross blocks.
    rows = (N * A, width)
    x = drafter.embed(blocks.reshape(rows), model)
    return drafter.block_hidden(x, positions.reshape(rows), attend_both).reshape(N, A * width, -1)


def score_transitions(drafter: DFlash, hidden: jax.Array, previous: jax.Array) -> jax.Array:
    """Scores of all tokens after given ones: hidden [N, T, H], previous tokens [N, T] → [N, T, V]."""
    if drafter.draft.heads.markov is not None:
        markov = drafter.markov_head
        return markov.markov_w2(markov.markov_w1.weight[...][previous], jnp.float32)
    selector = drafter.candidate_selector
    codes = selector.predecessor_codebook[...][previous] * selector.hidden_projection(hidden)
    return codes @ selector.successor_codebook[...].T


def run_target(
    target: AbstractModel[CausalLM],
    weights: Weights,
    ids: np.ndarray,
    target_layer_ids: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """The target's outputs for every sequence, in float32.

    Features [S, T, len(target_layer_ids)·H], and the last hidden states after the norm, [S, T, H].
    """

    @jax.jit
    def run(weights: Weights, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        model = target.bind(weights)
        x, features, _ = model.forward(rows, positions, target_layer_ids, None, causal)
        return features, model.model.norm(x)

    with multiply_in_bfloat16():
        parts = [run(weights, rows) for rows in ids.reshape(-1, 64, ids.shape[1])]
    features, last = zip(*parts, strict=True)
    return np.concatenate([np.asarray(part) for part in features]), np.concatenate(
        [np.asarray(part) for part in last]
    )


def batches(
    phase: Phase, ids: np.ndarray, features: np.ndarray, last: np.ndarray, seed: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """Sequences in shuffled order, with random anchors in the part that the target wrote."""
    rng = np.random.default_rng(seed)
    order = np.concatenate(
        [rng.permutation(len(ids)) for _ in range(-(-phase.steps * SEQUENCES // len(ids)))]
    )
    for step in range(phase.steps):
        chosen = order[step * SEQUENCES : (step + 1) * SEQUENCES]
        anchors = rng.integers(PROMPT, WIDTH - phase.block, (SEQUENCES, phase.anchors))
        yield ids[chosen], features[chosen], last[chosen], anchors


def train_phase(
    models: tuple[AbstractModel[CausalLM], AbstractModel[DFlash]],
    target_weights: Weights,
    weights: Weights,
    ids: np.ndarray,
    outputs: Callable[[], tuple[np.ndarray, np.ndarray]],
    phase: Phase,
    seed: int,
    checkpoint: Path,
    every: int,
) -> Weights:
    """The draft's weights, in float32, after one phase of training; see `train`. The target's weights are fixed.

    outputs: gives what `run_target` returns for `ids`.
    """
    features, last = outputs()
    embeddings = {name: leaf for name, leaf in target_weights.items() if "embed_tokens" in name}

    def loss(weights: Weights, *batch: jax.Array) -> jax.Array:
        return block_loss(models, phase, weights, embeddings, batch)

    rows = batches(phase, ids, features, last, seed)
    label = f"draft, blocks of {phase.block}"
    return train(label, weights, loss, rows, phase.learning_rate, phase.steps, checkpoint, every)
