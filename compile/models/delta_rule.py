"""The gated delta rule (Yang et al. 2024) over blocks of rows, in matrix products, with a float32 state.

Token by token a head's state S [I, O] becomes e^g · S, then u = β (v - Sᵀ k) is added along the key: S + k uᵀ; the
result is Sᵀ q. In a block all u follow from the state S0 before the block: (I + A) U = β (V - e^G K S0), where G is the
sum of g so far and A_ts = β_t (k_t · k_s) e^(G_t - G_s) for s < t. Only differences G_t - G_s ≤ 0 are exponentiated.

B rows of a call · T tokens of a block · N blocks · Q key heads · V value heads, a multiple · I, O key and value width
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64  # tokens of a block of a prompt, as in the reference


class DeltaRows(NamedTuple):
    """What the rule takes of each token: all float32.

    Attributes:
        queries: [B, Q, T, I], of length I^-½.
        keys: [B, Q, T, I], of length 1.
        values: [B, V, T, O].
        strengths: β, [B, V, T]; 0 for padding.
        decays: g ≤ 0, [B, V, T]; 0 for padding.
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
        updates: U, [B, V, T, O].
        decays: G, the sum of the decays up to each token, [B, V, T].
    """

    keys: jax.Array
    updates: jax.Array
    decays: jax.Array


class _SolvedBlock(NamedTuple):
    """A block whose equations are solved for any state before it: U = inverse · β (values - e^G keys · S0)."""

    keys: jax.Array  # [B, Q, T, I]
    readers: jax.Array  # keys, and after them the queries: [B, Q, 2T, I]
    values: jax.Array  # [B, V, T, O]
    strengths: jax.Array  # β, [B, V, T]
    inverse: jax.Array  # of I + A, [B, V, T, T]
    scores: jax.Array  # of the updates in the results, [B, V, T, T]
    decays: jax.Array  # G, [B, V, T]


def run_block(rows: DeltaRows, state: jax.Array, begun: jax.Array) -> tuple[jax.Array, BlockUpdates]:
    """Results [B, V, T, O] of one block, and its updates.

    `state` [B, V, I, O] is the one before the block, where `begun` [B] is True; elsewhere it counts as zeros.
    """
    return _apply(_solve(rows), state, begun)


def run_blocks(rows: DeltaRows, state: jax.Array, begun: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Results [B, V, T, O] of any number of tokens, in blocks of BLOCK, and the state after the last one.

    Arguments as of `run_block`.
    """
    tokens = rows.keys.shape[2]
    if tokens <= BLOCK:
        results, updates = run_block(rows, state, begun)
        return results, fold(state, updates, jnp.full(begun.shape, tokens), begun)
    # Everything that does not depend on the state is solved for all blocks at once.
    solved = jax.vmap(_solve)(DeltaRows(*(_split_blocks(array) for array in rows)))

    def step(carry: tuple[jax.Array, jax.Array], block: _SolvedBlock) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, begun = carry
        results, updates = _apply(block, state, begun)
        after = fold(state, updates, jnp.full(begun.shape, BLOCK), begun)
        return (after, jnp.ones_like(begun)), results

    (state, _), results = jax.lax.scan(step, (state, begun), solved)
    results = jnp.moveaxis(results, 0, 2)
    return results.reshape(*results.shape[:2], -1, results.shape[-1])[:, :, :tokens], state


def fold(state: jax.Array, block: BlockUpdates, counts: jax.Array, begun: jax.Array) -> jax.Array:
    """The state after the first `counts` tokens of a block: counts int32 [B], 0 … T; states [B, V, I, O].

    `begun` as of `run_block`. A state with a count of 0 stays as it is, begun or not.
    """
    return add_updates(state, block, weigh_updates(block.decays, counts), begun | (counts == 0))


class UpdateWeights(NamedTuple):
    """Factors of what a state becomes by the counted tokens of a block, of one layer or of a stack of layers.

    Attributes:
        state: [.., B, V], of the state before the block.
        updates: [.., B, V, T]; 0 after the counted tokens.
    """

    state: jax.Array
    updates: jax.Array


def weigh_updates(decays: jax.Array, counts: jax.Array) -> UpdateWeights:
    """The weights of blocks whose `decays` [.., B, V, T] are those of `BlockUpdates`, up to the count of each row."""
    index, count = np.arange(decays.shape[-1]), counts[:, None, None]
    last = jnp.where(index == count - 1, decays, 0).sum(axis=-1)
    taken = index < count
    faded = jnp.exp(jnp.where(taken, last[..., None] - decays, 0))
    return UpdateWeights(state=jnp.exp(last), updates=jnp.where(taken, faded, 0))


def add_updates(state: jax.Array, block: BlockUpdates, weights: UpdateWeights, kept: jax.Array) -> jax.Array:
    """The state [B, V, I, O] after a block: the weighted state where `kept` [B] is True, and the weighted updates."""
    before = jnp.where(kept[:, None, None, None], weights.state[..., None, None] * state, 0)
    keys = weights.updates[..., None] * _repeat(block.keys, state)
    return before + jnp.einsum("BVTI,BVTO->BVIO", keys, block.updates)


def _solve(rows: DeltaRows) -> _SolvedBlock:
    total = jnp.cumsum(rows.decays, axis=-1)
    index = np.arange(total.shape[-1])  # a constant: in a loop over layers the compiler would compute it again
    earlier = index[:, None] >= index
    distance = jnp.where(earlier, total[..., :, None] - total[..., None, :], 0)  # masked before exp: it overflows
    faded = jnp.where(earlier, jnp.exp(distance), 0)
    products = _repeat(jnp.einsum("BQTI,BQSI->BQTS", rows.keys, rows.keys), rows.values)
    inverse = invert_unit_triangular(rows.strengths[..., None] * products * faded)
    return _SolvedBlock(
        keys=rows.keys,
        readers=jnp.concatenate([rows.keys, rows.queries], axis=2),
        values=rows.values,
        strengths=rows.strengths,
        inverse=inverse,
        scores=_repeat(jnp.einsum("BQTI,BQSI->BQTS", rows.queries, rows.keys), rows.values) * faded,
        decays=total,
    )


def _apply(block: _SolvedBlock, state: jax.Array, begun: jax.Array) -> tuple[jax.Array, BlockUpdates]:
    # One product reads the state, as it lies: a state masked before it would be copied.
    read = jnp.einsum("BVTI,BVIO->BVTO", _repeat(block.readers, state), state)
    fading = jnp.exp(block.decays)[..., None]
    removed, carried = jnp.split(jnp.where(begun[:, None, None, None], read, 0), 2, axis=2)
    wanted = block.strengths[..., None] * (block.values - fading * removed)
    updates = jnp.einsum("BVTS,BVSO->BVTO", block.inverse, wanted)
    results = fading * carried + jnp.einsum("BVTS,BVSO->BVTO", block.scores, updates)
    return results, BlockUpdates(block.keys, updates, block.decays)


def _repeat(heads: jax.Array, values: jax.Array) -> jax.Array:
    """[B, Q, ..] of key heads for each of the value heads that `values` [B, V, ..] has."""
    return jnp.repeat(heads, values.shape[1] // heads.shape[1], axis=1)


def invert_unit_triangular(lower: jax.Array) -> jax.Array:
    """The inverse of I + the strictly lower triangle of `lower`: [.., T, T] → [.., T, T].

    Inverts the diagonal blocks of 1, 2, 4, … tokens, each from the two halves of the size before: forward substitution
    in blocks, without a loop over tokens. (A power series would need fewer products, and cancels in float32.)
    """
    tokens = lower.shape[-1]
    index, size = np.arange(tokens), 1
    inverse = jnp.broadcast_to(np.eye(tokens, dtype=lower.dtype), lower.shape)
    while size < tokens:
        half = index // size
        below = (half[:, None] == half + 1) & (half % 2 == 0)  # the lower left quarter of a block of two halves
        quarter = jnp.where(below, lower, 0)
        inverse = inverse - (quarter if size == 1 else inverse @ quarter @ inverse)
        size *= 2
    return inverse


def _split_blocks(array: jax.Array) -> jax.Array:
    """Pads the axis of tokens with zeros to whole blocks and splits it: [B, V, T, ..] → [N, B, V, BLOCK, ..]."""
    rows, heads, tokens, *rest = array.shape
    padded = jnp.pad(array, [(0, 0), (0, 0), (0, -tokens % BLOCK), *[(0, 0)] * len(rest)])
    return jnp.moveaxis(padded.reshape(rows, heads, -1, BLOCK, *rest), 2, 0)
