"""Scores of a drafted token given the token before it, and the path that follows them through a block.

A score is the token's logit and a transition: Σ A[previous] · S[token], with two tables A and S of the vocabulary. In
DFlash2's candidate selector the position's hidden state weighs the terms, and the path goes through the likeliest
tokens of each position. In DSpark's Markov head the sum stands alone, and the path goes through all tokens. The path is
greedy: each position takes the best token after the one chosen before it.

B rows · K drafted positions · C candidates of a position · R rank · H hidden · V vocabulary · D the draft's vocabulary
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_aot.cache.model_config.architecture import (
    CandidateSelector,
    ConfidenceHead,
    MarkovHead,
)
from dflash_aot.compile.models.layers import (
    OUTPUTS,
    LayerForm,
    Linear,
    ParameterSource,
    parameter,
)
from dflash_aot.compile.models.tensor_parallel import TensorParallel


class PathSelector(nnx.Module):
    """`candidate_selector` of a DFlash2 draft. Devices share the rows of the codebooks [V, R]."""

    def __init__(self, sizes: CandidateSelector, vocab: int, hidden: int, form: LayerForm):
        shape = (vocab, sizes.rank)
        self.hidden_projection = Linear(sizes.rank, hidden, form.plain)
        predecessors = ParameterSource(["predecessor_codebook"], shape)
        successors = ParameterSource(["successor_codebook"], shape)
        self.predecessor_codebook = parameter(shape, form.dtype, predecessors, split=OUTPUTS)
        self.successor_codebook = parameter(shape, form.dtype, successors, split=OUTPUTS)
        self.tp = form.tp

    def scores(
        self, hidden: jax.Array, logits: jax.Array, candidates: jax.Array, anchors: jax.Array
    ) -> jax.Array:
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
        tables = self.predecessor_codebook[...], self.successor_codebook[...]
        previous, token = _look_up_codes(self.tp, tables, (following, following), anchors, K)
        projected = self.hidden_projection(hidden, jnp.float32)
        transitions = _multiply_codes(previous * projected[:, :, None], token.reshape(B, K, C, -1))
        return logits[:, :, None] + transitions


class MarkovTables(nnx.Module):
    """`markov_head` of a DSpark draft: tables [V, R] and, of drafted tokens, [D, R]. Devices share the rows of both."""

    def __init__(self, sizes: MarkovHead, vocab: int, drafted: int, form: LayerForm):
        self.markov_w1 = Linear(vocab, sizes.rank, form.plain, OUTPUTS)
        self.markov_w2 = Linear(drafted, sizes.rank, form.plain, OUTPUTS)
        self.tp = form.tp

    def scores(
        self, logits: jax.Array, candidates: jax.Array, tokens: jax.Array, anchors: jax.Array
    ) -> jax.Array:
        """As `PathSelector.scores`. `candidates` are ids of the draft's vocabulary, `tokens` those of the target's."""
        B, K, C = candidates.shape
        tables = self.markov_w1.weight[...], self.markov_w2.weight[...]
        ids = tokens.reshape(B, -1), candidates.reshape(B, -1)
        previous, token = _look_up_codes(self.tp, tables, ids, anchors, K)
        return logits[:, :, None] + _multiply_codes(previous, token.reshape(B, K, C, -1))

    def settle_path(
        self,
        logits: jax.Array,
        guess: jax.Array,
        anchors: jax.Array,
        to_target: Callable[[jax.Array], jax.Array],
        wanted: jax.Array,
        count: int,
    ) -> jax.Array:
        """The greedy path through all tokens, int32 [B, K], found by repairing a `guess`.

        A pass takes the best token of each position after the guess of the position before, and is the next guess. The
        path is found when a pass changes nothing, or after K passes: pass i settles position i. A pass reads the
        second table once; a walk from position to position would read it K times.

        Args:
            logits: of B · K rows and D tokens, as `Backend.score_outputs` makes them for `count` candidates.
            guess: int32 [B, K], ids of the target's vocabulary.
            anchors: int32 [B].
            to_target: ids of the draft's vocabulary → ids of the target's.
            wanted: scalar bool; if False the guess is the result.
            count: see `logits`.
        """
        K = guess.shape[1]
        second = self.markov_w2.weight[...]
        # passes done, the guess, whether it changed
        Passes = tuple[jax.Array, jax.Array, jax.Array]

        def is_unsettled(state: Passes) -> jax.Array:
            done, _, changed = state
            return changed & (done < K)

        def run_pass(state: Passes) -> Passes:
            done, guess, _ = state
            before = jnp.concatenate([anchors[:, None], guess[:, :-1]], axis=1)
            codes = self.tp.look_up(self.markov_w1.weight[...], before)
            codes = codes.reshape(guess.size, -1)
            biases = self.tp.backend.score_outputs(second, codes, None, count)
            found = self.tp.best_score(logits + biases, len(second), guess.size)
            found = to_target(found).reshape(guess.shape)
            return done + 1, found, jnp.any(found != guess)

        _, path, _ = jax.lax.while_loop(is_unsettled, run_pass, (jnp.int32(0), guess, wanted))
        return path


class ConfidenceLayer(nnx.Module):
    """`confidence_head` of a DSpark draft. It is loaded, and no program uses it. Every device holds all of it."""

    def __init__(self, sizes: ConfidenceHead, form: LayerForm):
        self.proj = ConfidenceProjection(sizes, form)


class ConfidenceProjection(nnx.Module):
    """The only layer of a confidence head, with a bias."""

    def __init__(self, sizes: ConfidenceHead, form: LayerForm):
        weight = (1, sizes.width)
        self.weight = parameter(weight, form.dtype, ParameterSource(["weight"], weight))
        self.bias = parameter((1,), form.dtype, ParameterSource(["bias"], (1,)))


def _look_up_codes(
    tp: TensorParallel,
    tables: tuple[jax.Array, jax.Array],
    tokens: tuple[jax.Array, jax.Array],
    anchors: jax.Array,
    K: int,
) -> tuple[jax.Array, jax.Array]:
    """Codes of the tokens before every position, float32 [B, K, C, R], and of its candidates, float32 [B, K · C, R].

    `tokens` int32 [B, K · C] are the candidates as rows of the first table and of the second. Each row of a table is
    read once for each place that needs it.
    """
    named, following = tokens
    B = anchors.shape[0]
    C = following.shape[1] // K
    before = jnp.concatenate([anchors[:, None], named[:, : (K - 1) * C]], axis=1)
    first, second = tables
    codes = tp.look_up_each((first, before), (second, following))
    previous, token = (code.astype(jnp.float32) for code in codes)
    return jnp.pad(previous, ((0, 0), (C - 1, 0), (0, 0))).reshape(B, K, C, -1), token


def _multiply_codes(previous: jax.Array, token: jax.Array) -> jax.Array:
    """Σ previous · token over the rank, of float32 [B, K, P, R] and [B, K, C, R]: [B, K, P, C]."""
    return jnp.einsum("BKPR,BKCR->BKPC", previous, token, precision=jax.lax.Precision.HIGHEST)


def choose_path(scores: jax.Array, candidates: jax.Array) -> jax.Array:
    """The chosen candidate of each position, int32 [B, K].

    Each position takes the best candidate after the candidate chosen before it; the first position takes the best
    candidate after the last of axis 2. All choices are tabulated, and the tables of neighbours are
    composed: log K steps instead of K.

    Args:
        scores: float32 [B, K, C, C], as `PathSelector.scores` returns them; or [B, K, 1, C] if the candidate before
            does not matter.
        candidates: int32 [B, K, C].
    """
    # [B, K, C]: the choice after each candidate before
    table = jnp.argmax(scores, axis=-1).astype(jnp.int32)
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
    return jnp.where(indices[..., None] == jnp.arange(items.shape[-1]), items, 0).sum(
        axis=-1, dtype=jnp.int32
    )
