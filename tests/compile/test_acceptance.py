"""Acceptance of drafted tokens, by hand and against a loop."""

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_aot.compile.programs.acceptance import accept
from tests.compile.quick import jit_quickly

accept_quickly = jit_quickly(accept)


@pytest.mark.parametrize(
    ("block", "chosen", "accepted", "bonus"),
    [
        ([9, 1, 2, 3], [1, 2, 3, 4], 3, 4),  # all accepted, and the bonus token
        ([9, 1, 2, 3], [1, 2, 7, 4], 2, 7),
        ([9, 1, 2, 3], [5, 2, 3, 4], 0, 5),  # a match after a mismatch does not count
        ([9, 1, 2, 3], [1, 7, 3, 4], 1, 7),
        ([9, 9, 9, 9], [9, 9, 8, 9], 2, 8),
        ([9, 1], [1, 0], 1, 0),
        ([9], [4], 0, 4),  # K = 0: the target's own token
    ],
)
def test_accept_stops_at_the_first_mismatch(block, chosen, accepted, bonus):
    found = accept_quickly(jnp.array([block]), jnp.array([chosen]))
    assert [array.tolist() for array in found] == [[accepted], [bonus]]


def accept_slowly(block, chosen):
    accepted = 0
    while accepted < len(block) - 1 and block[accepted + 1] == chosen[accepted]:
        accepted += 1
    return accepted, chosen[accepted]


@st.composite
def verifications(draw):
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    tokens = st.lists(st.lists(st.integers(0, 2), min_size=width, max_size=width), min_size=rows, max_size=rows)
    return draw(tokens), draw(tokens)


@given(verifications())
@settings(deadline=None)
def test_accept_equals_a_loop_in_every_row(verification):
    block, chosen = verification
    accepted, bonus = accept_quickly(jnp.array(block), jnp.array(chosen))
    assert accepted.dtype == bonus.dtype == jnp.int32
    assert list(zip(accepted.tolist(), bonus.tolist(), strict=True)) == list(map(accept_slowly, block, chosen))
