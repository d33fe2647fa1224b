"""Acceptance of drafted tokens, by hand."""

import jax.numpy as jnp

from dflash_aot.compile.programs.sampling import accept

# Block, chosen tokens, accepted tokens, bonus token.
ROWS = [
    ([9, 1, 2, 3], [1, 2, 3, 4], 3, 4),  # all accepted, and the bonus token
    ([9, 1, 2, 3], [1, 2, 7, 4], 2, 7),
    ([9, 1, 2, 3], [5, 2, 3, 4], 0, 5),  # a match after a mismatch does not count
    ([9, 1, 2, 3], [1, 7, 3, 4], 1, 7),
    ([9, 9, 9, 9], [9, 9, 8, 9], 2, 8),
]


def test_accept_stops_at_the_first_mismatch_of_each_row():
    block, chosen, accepted, bonus = zip(*ROWS, strict=True)
    found = accept(jnp.array(block), jnp.array(chosen))
    assert [array.tolist() for array in found] == [[*accepted], [*bonus]]
    assert found[0].dtype == found[1].dtype == jnp.int32
    alone = accept(jnp.array([[9]]), jnp.array([[4]]))  # K = 0: the target's own token
    assert [array.tolist() for array in alone] == [[0], [4]]
