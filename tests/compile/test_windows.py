"""Which positions a draft layer sees."""

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_aot.cache.architecture import Window
from dflash_aot.compile.programs import within

POSITIONS = st.integers(0, 40)


def sees(window, query, key):
    if window is None:
        return True
    return query - window.size < key <= query if window.causal else query - window.size < key < query + window.size


@pytest.mark.parametrize(
    ("window", "row"),
    [
        (None, "######"),
        (Window(1, causal=True), "...#.."),
        (Window(3, causal=True), ".###.."),
        (Window(3, causal=False), ".#####"),
        (Window(9, causal=True), "####.."),
        (Window(9, causal=False), "######"),
    ],
)
def test_position_three_sees_its_window(window, row):
    seen = within(window, jnp.array([[3]]), jnp.arange(6)[None])
    assert "".join(".#"[flag] for flag in seen[0, 0].tolist()) == row


@given(
    window=st.none() | st.builds(Window, st.integers(1, 12), st.booleans()),
    queries=st.lists(st.lists(POSITIONS, min_size=4, max_size=4), min_size=2, max_size=2),
    keys=st.lists(st.lists(POSITIONS, min_size=7, max_size=7), min_size=2, max_size=2),
)
@settings(deadline=None)
def test_windows_are_those_of_a_loop_in_every_row(window, queries, keys):
    expected = [[[sees(window, q, k) for k in ks] for q in qs] for qs, ks in zip(queries, keys, strict=True)]
    assert within(window, jnp.array(queries), jnp.array(keys)).tolist() == expected
