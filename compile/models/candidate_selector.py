"""The candidate selector of DFlash2: chooses a path through the likeliest tokens of each position of a block.

A token's score is its logit and a transition from the token before it: Σ A[previous] · (P hidden) · S[token], with two
codebooks A and S. The path is greedy: each position takes the best token after the one chosen before it.

B rows · K drafted positions · C candidates of a position · R rank · H hidden · V vocabulary
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_aot.cache.model_config.architecture import CandidateSelector
from dflash_aot.compile.models.layers import OUTPUTS, CheckpointTensors, Linear, WeightKind, parameter
from dflash_aot.compile.models.matmul import matmul
from dflash_aot.compile.models.tensor_parallel import TensorParallel


class PathSelector(nnx.Module):
    """`candidate_selector` of the draft. Devices share the rows of the codebooks [V, R]."""

    def __init__(self, sizes: CandidateSelector, vocab: int, hidden: int, dtype: str, tp: TensorParallel):
        shape = (vocab, sizes.rank)
        self.hidden_projection = Linear(sizes.rank, hidden, WeightKind(dtype))
        predecessors = CheckpointTensors(["predecessor_codebook"], shape)
        successors = CheckpointTensors(["successor_codebook"], shape)
        self.predecessor_codebook = parameter(shape, dtype, predecessors, split=OUTPUTS)
        self.successor_codebook = parameter(shape, dtype, successors, split=OUTPUTS)
        self.tp = tp

    def scores(self, hidden: jax.Array, logits: jax.Array, candidates: jax.Array, anchors: jax.Array) -> jax.Array:
        """Scores of every candidate after every candidate of the position before it: float32 [B, K, C, C].

        Axis 2 is the token before, axis 3 the token. Before the first position there is only the anchor, the last of
        axis 2; the others there have no meaning.

        Args:
            hidden: [B, K, H], normed.
            logits: float32 [B, K, C], of the candidates.
            candidates: int32 [B, K, C].
            anchors: int32 [B].
        """
        B, K, C = candidates.shape
        following = candidates.reshape(B, -1)
        before = jnp.concatenate([anchors[:, None], following[:, : (K - 1) * C]], axis=1)
        # Each row of a codebook is read once for each place that needs it.
        codes = self.tp.look_up_each(
            (self.predecessor_codebook[...], before), (self.successor_codebook[...], following)
        )
        previous, token = (code.astype(jnp.float32) for code in codes)
        previous = jnp.pad(previous, ((0, 0), (C - 1, 0), (0, 0))).reshape(B, K, C, -1)
        projected = matmul(self.hidden_projection.weight[...], hidden, dtype=jnp.float32)
        transitions = jnp.einsum(
            "BKPR,BKCR->BKPC",
            previous * projected[:, :, None],
            token.reshape(B, K, C, -1),
            precision=jax.lax.Precision.HIGHEST,
        )
        return logits[:, :, None] + transitions


def choose_path(scores: jax.Array, candidates: jax.Array) -> jax.Array:
    """The chosen candidate of each position, int32 [B, K].

    Position by position, the best after the one chosen before, and at first after the last of axis 2. All choices are
    tabulated, and the tables of neighbours are composed: log K steps instead of K.

    Args:
        scores: float32 [B, K, C, C], as `PathSelector.scores` returns them; or [B, K, 1, C] if the candidate before
            does not matter.
        candidates: int32 [B, K, C].
    """
    table = jnp.argmax(scores, axis=-1).astype(jnp.int32)  # [B, K, C]: the choice after each candidate before
    if scores.shape[2] == 1:
        return _pick(candidates, table[..., 0])
    K, C = table.shape[1:]
    unchanged = jnp.arange(C, dtype=jnp.int32)
    for step in (1 << bit for bit in range((K - 1).bit_length())):
        # The choice after each candidate that is `step` more positions before.
        before = jnp.pad(table, ((0, 0), (step, 0), (0, 0)), constant_values=-1)[:, :K]
        table = _pick(table[:, :, None], jnp.where(before < 0, unchanged, before))
    return _pick(candidates, table[..., -1])


def _pick(items: jax.Array, indices: jax.Array) -> jax.Array:
    """items [.., C] at indices [..], int32. A sum with one term, because gathers are slow on TPU."""
    return jnp.where(indices[..., None] == jnp.arange(items.shape[-1]), items, 0).sum(axis=-1, dtype=jnp.int32)
