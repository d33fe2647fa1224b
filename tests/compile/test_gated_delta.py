"""The Gated DeltaNet kernels, interpreted on CPU with a check for races, compute what XLA's operations compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.cache.model_config.architecture import GatedDeltaNet
from dflash_aot.compile.kernels.gated_delta import DeltaBlocks, choose_delta_heads
from dflash_aot.compile.kernels.kernel_device import DeltaSizes
from dflash_aot.compile.models.gated_delta_net import GatedDeltaMixer, MixerCall
from dflash_aot.compile.models.layers import LayerForm
from dflash_aot.compile.models.recurrent_state import RecurrentState, commit_updates, make_pending, verify_layer
from tests.compile.quick import jit_quickly

LAYERS, SLOTS, HIDDEN, WINDOW, WIDTH = 2, 4, 16, 4, 128
# Key heads, value heads, tokens, rows, key heads of a grid step.
CASES = {"whole registers of tokens": (2, 4, 8, 3, 2), "two groups of eight value heads": (2, 16, 3, 1, 1)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_verify_and_commit_as_xla_does(case, capfd):
    """Results, states and windows, with any counts. Slots that have not begun hold infinity; idle ones stay."""
    Q, V, T, B, heads = case
    sizes = GatedDeltaNet(Q, V, key_dim=WIDTH, value_dim=WIDTH, kernel=4, layers=(0, 1))
    kernels = DeltaBlocks(heads, -(-T // 8) * 8, pltpu.InterpretParams(detect_races=True))
    graph, zeros = nnx.split(GatedDeltaMixer(sizes, HIDDEN, 1e-6, LayerForm("float32")))

    def run(weights, state, x, lengths, counts, kernels):
        pending = make_pending(state, sizes, B, T, kernels)
        mixer, results = nnx.merge(graph, weights), []
        for layer in range(LAYERS):
            call = MixerCall.of(mixer, x[layer])
            result, pending = verify_layer(state, pending, jnp.int32(layer), call, lengths, kernels)
            results.append(result)
        return results, commit_updates(state, pending, lengths, counts, kernels)

    runs = [jit_quickly(lambda *arrays, chosen=chosen: run(*arrays, chosen)) for chosen in (None, kernels)]

    @given(data=st.data(), seed=st.integers(0, 99))
    @settings(max_examples=3)
    def check(data, seed):
        rng = np.random.default_rng(seed)
        weights = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32) / 2), zeros)
        states = rng.standard_normal((LAYERS, SLOTS, V, WIDTH, WIDTH), np.float32)
        windows = rng.standard_normal((LAYERS, SLOTS, WINDOW, sizes.channels), np.float32)
        counts = np.array([data.draw(st.integers(0, T)) for _ in range(B)], np.int32)
        lengths = np.array([data.draw(st.sampled_from([0, 7])) for _ in range(B)], np.int32)
        for slot in np.flatnonzero(lengths == 0):
            counts[slot] = max(counts[slot], 1)  # a slot is idle only behind a prompt
            states[:, slot], windows[:, slot] = np.inf, np.inf
        x = rng.standard_normal((LAYERS, B, T, HIDDEN), np.float32)
        given_ = weights, RecurrentState(jnp.asarray(states), jnp.asarray(windows)), x, lengths, counts
        (expected, after), (found, committed) = (one(*given_) for one in runs)
        for ours, wanted in zip([*found, *committed], [*expected, *after], strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
        idle = [*np.flatnonzero(counts == 0), *range(B, SLOTS)]
        np.testing.assert_array_equal(np.asarray(committed.states)[:, idle], states[:, idle])
        np.testing.assert_array_equal(np.asarray(committed.windows)[:, idle], windows[:, idle])

    check()
    assert "RACE" not in capfd.readouterr().out


QWEN35_4B = DeltaSizes(key_heads=16, value_heads=32, key_dim=128, value_dim=128)


def test_heads_of_a_grid_step_fit_whole_registers():
    for sizes, cores, expected in [
        (QWEN35_4B, 1, 8),
        (DeltaSizes(16, 48, 128, 128), 1, 8),  # 27B
        (DeltaSizes(4, 12, 128, 128), 1, 4),  # of it, on four devices: all heads, which are no whole register
        (DeltaSizes(4, 12, 128, 128), 2, None),
        (DeltaSizes(16, 16, 128, 128), 2, 8),  # 0.8B: the cores share the heads
        (DeltaSizes(16, 32, 64, 128), 1, None),
        (DeltaSizes(1, 32, 128, 128), 1, None),  # too large for VMEM
    ]:
        assert choose_delta_heads(sizes, cores) == expected
