"""The gated delta rule (Yang et al. 2024) over blocks of rows, in matrix products, with a float32 state.

Token by token a head's state S [I, O] becomes e^g · S, then u = β (v - Sᵀ k) is added along the key: S + k uᵀ; the
result is Sᵀ q. In a block all u follow from the state S0 before the block: (I + A) U = β (V - e^G K S0), where G is the
sum of g so far and A_ts = β_t (k_t · k_s) e^(G_t - G_s) for s < t. Only differences G_t - G_s ≤ 0 are exponentiated.

B rows of a call · T tokens of a block · N blocks · Q key heads · R value heads per key head · I, O key and value width
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 64  # tokens of a block of a prompt, as in the reference


class DeltaRows(NamedTuple):
    """What the rule takes of each token: all float32.

    Attributes:
        queries: [B, Q, T, I], of length I^-½.
        keys: [B, Q, T, I], of length 1.
        values: [B, Q, R, T, O].
        strengths: β, [B, Q, R, T]; 0 for padding.
        decays: g ≤ 0, [B, Q, R, T]; 0 for padding.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    strengths: jax.Array
    decays: jax.Array


class BlockUpdates(NamedTuple):
    """What a block adds to the state, from which the state after any of its tokens follows (`fold`).

    Attributes:
        keys: [B, Q, T, I].
        updates: U, [B, Q, R, T, O].
        decays: G, the sum of the decays up to each token, [B, Q, R, T].
    """

    keys: jax.Array
    updates: jax.Array
    decays: jax.Array


class _SolvedBlock(NamedTuple):
    """A block whose equations are solved for any state before it: U = values - factors · S0."""

    queries: jax.Array  # [B, Q, T, I]
    keys: jax.Array  # [B, Q, T, I]
    values: jax.Array  # [B, Q, R, T, O]
    factors: jax.Array  # [B, Q, R, T, I]
    scores: jax.Array  # [B, Q, R, T, T], of the updates in the results
    decays: jax.Array  # G, [B, Q, R, T]


def run_block(rows: DeltaRows, state: jax.Array) -> tuple[jax.Array, BlockUpdates]:
    """Results [B, Q, R, T, O] of one block, and its updates. `state` [B, Q, R, I, O] is the one before the block."""
    return _apply(_solve(rows), state)


def run_blocks(rows: DeltaRows, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Results [B, Q, R, T, O] of any number of tokens, in blocks of BLOCK, and the state behind the last one."""
    tokens = rows.keys.shape[2]
    if tokens <= BLOCK:
        results, updates = run_block(rows, state)
        return results, fold(state, updates, jnp.full(state.shape[:1], tokens))
    # Everything that does not depend on the state is solved for all blocks at once.
    solved = jax.vmap(_solve)(DeltaRows(*(_split_blocks(rows[at], axis) for at, axis in enumerate((2, 2, 3, 3, 3)))))

    def step(state: jax.Array, block: _SolvedBlock) -> tuple[jax.Array, jax.Array]:
        results, updates = _apply(block, state)
        return fold(state, updates, jnp.full(state.shape[:1], BLOCK)), results

    state, results = jax.lax.scan(step, state, solved)
    results = jnp.moveaxis(results, 0, 3)
    return results.reshape(*results.shape[:3], -1, results.shape[-1])[:, :, :, :tokens], state


def fold(state: jax.Array, block: BlockUpdates, counts: jax.Array) -> jax.Array:
    """The state after the first `counts` tokens of a block: counts int32 [B], 0 … T; states [B, Q, R, I, O]."""
    index, counts = jnp.arange(block.decays.shape[-1]), counts[:, None, None, None]
    last = jnp.where(index == counts - 1, block.decays, 0).sum(axis=-1, keepdims=True)
    taken = index < counts
    weights = jnp.where(taken, jnp.exp(jnp.where(taken, last - block.decays, 0)), 0)
    added = jnp.einsum("BQTI,BQRTO->BQRIO", block.keys, block.updates * weights[..., None])
    return jnp.exp(last)[..., None] * state + added


def _solve(rows: DeltaRows) -> _SolvedBlock:
    total = jnp.cumsum(rows.decays, axis=-1)
    index = jnp.arange(total.shape[-1])
    earlier = index[:, None] >= index
    distance = jnp.where(earlier, total[..., :, None] - total[..., None, :], 0)  # masked before exp: it overflows
    faded = jnp.where(earlier, jnp.exp(distance), 0)
    products = jnp.einsum("BQTI,BQSI->BQTS", rows.keys, rows.keys)[:, :, None]
    inverse = invert_unit_triangular(rows.strengths[..., None] * products * faded)
    factors = (rows.strengths * jnp.exp(total))[..., None] * rows.keys[:, :, None]
    return _SolvedBlock(
        queries=rows.queries,
        keys=rows.keys,
        values=jnp.einsum("BQRTS,BQRSO->BQRTO", inverse, rows.strengths[..., None] * rows.values),
        factors=jnp.einsum("BQRTS,BQRSI->BQRTI", inverse, factors),
        scores=jnp.einsum("BQTI,BQSI->BQTS", rows.queries, rows.keys)[:, :, None] * faded,
        decays=total,
    )


def _apply(block: _SolvedBlock, state: jax.Array) -> tuple[jax.Array, BlockUpdates]:
    updates = block.values - jnp.einsum("BQRTI,BQRIO->BQRTO", block.factors, state)
    carried = jnp.einsum("BQTI,BQRIO->BQRTO", block.queries, state) * jnp.exp(block.decays)[..., None]
    results = carried + jnp.einsum("BQRTS,BQRSO->BQRTO", block.scores, updates)
    return results, BlockUpdates(block.keys, updates, block.decays)


def invert_unit_triangular(lower: jax.Array) -> jax.Array:
    """The inverse of I + the strictly lower triangle of `lower`: [.., T, T] → [.., T, T].

    Inverts the diagonal blocks of 1, 2, 4, … tokens, each from the two halves of the size before: forward substitution
    in blocks, without a loop over tokens. (A power series would need fewer products, and cancels in float32.)
    """
    tokens = lower.shape[-1]
    index, size = jnp.arange(tokens), 1
    inverse = jnp.broadcast_to(jnp.eye(tokens, dtype=lower.dtype), lower.shape)
    while size < tokens:
        half = index // size
        below = (half[:, None] == half + 1) & (half % 2 == 0)  # the lower left quarter of a block of two halves
        quarter = jnp.where(below, lower, 0)
        inverse = inverse - (quarter if size == 1 else inverse @ quarter @ inverse)
        size *= 2
    return inverse


def _split_blocks(array: jax.Array, axis: int) -> jax.Array:
    """Pads the axis of tokens with zeros to whole blocks and splits it: [.., T, ..] → [N, .., BLOCK, ..]."""
    padding = [(0, -array.shape[axis] % BLOCK if at == axis else 0) for at in range(array.ndim)]
    padded = jnp.pad(array, padding)
    return jnp.moveaxis(padded.reshape(*array.shape[:axis], -1, BLOCK, *array.shape[axis + 1 :]), axis, 0)
