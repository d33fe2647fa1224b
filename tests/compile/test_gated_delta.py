"""The Gated DeltaNet kernels, interpreted on CPU with a check for races, compute what XLA's operations compute."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.cache.model_config.architecture import GatedDeltaNet
from dflash_aot.compile.kernels.gated_delta import DeltaBlocks, choose_delta_chunks, choose_delta_heads
from dflash_aot.compile.kernels.kernel_device import DeltaSizes, KernelDevice
from dflash_aot.compile.models import recurrent_state
from dflash_aot.compile.models.backend import Kernels, TpuBackend
from dflash_aot.compile.models.gated_delta_net import GatedDeltaMixer, MixerCall
from dflash_aot.compile.models.layers import LayerForm
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from tests.compile.quick import jit_quickly

LAYERS, SLOTS, HIDDEN, WINDOW, WIDTH, CHUNK = 2, 4, 16, 4, 128, 200
# Key heads, value heads, tokens, rows, key heads of a grid step, dtype, tolerance.
CASES = {"whole registers": (4, 8, 8, 3, 4, "float32", 1e-4), "groups of eight": (4, 16, 3, 1, 2, "bfloat16", 0.02)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_verify_commit_and_prefill_as_xla_does(case, capfd):
    """Results, states and windows, with any counts. Slots that have not begun hold infinity; idle ones stay."""
    Q, V, T, B, heads, dtype, tolerance = case
    sizes = GatedDeltaNet(Q, V, key_dim=WIDTH, value_dim=WIDTH, kernel=4, layers=(0, 1))
    interpret = pltpu.InterpretParams(detect_races=True)

    def run(graph, kernels, weights, state, x, lengths, counts, prompt, prompt_count):
        pending = recurrent_state.make_pending(state, sizes, B, T, kernels)
        mixer, results = nnx.merge(graph, weights), []
        for layer in range(LAYERS):
            call = MixerCall.of(mixer, x[layer])
            result, pending = recurrent_state.verify_layer(state, pending, jnp.int32(layer), call, lengths, kernels)
            results.append(result)
        place = jnp.int32(1), MixerCall.of(mixer, prompt), jnp.int32(0), lengths[0], prompt_count
        result, prefilled = recurrent_state.prefill_layer(state, *place)
        results.append(jnp.where(jnp.arange(CHUNK)[:, None] < prompt_count, result, 0))
        return [*results, *prefilled], recurrent_state.commit_updates(state, pending, lengths, counts, kernels)

    runs = []
    for device, blocks in ((None, None), (Kernels("", 1, interpret), DeltaBlocks(heads, -(-T // 8) * 8, interpret))):
        form = LayerForm(dtype, tp=TensorParallel(1, TpuBackend(kernels=device)))
        graph, zeros = nnx.split(GatedDeltaMixer(sizes, HIDDEN, 1e-6, form))
        runs.append(jit_quickly(partial(run, graph, blocks)))

    @given(data=st.data(), seed=st.integers(0, 99))
    @settings(max_examples=3)
    def check(data, seed):
        rng = np.random.default_rng(seed)
        weights = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) / 2, leaf.dtype), zeros)
        states = rng.standard_normal((LAYERS, SLOTS, V, WIDTH, WIDTH), np.float32)
        windows = rng.standard_normal((LAYERS, SLOTS, WINDOW, sizes.channels), np.float32)
        counts = np.array([data.draw(st.integers(0, T)) for _ in range(B)], np.int32)
        lengths = np.array([data.draw(st.sampled_from([0, 7])) for _ in range(B)], np.int32)
        for slot in np.flatnonzero(lengths == 0):
            counts[slot] = max(counts[slot], 1)  # a slot is idle only behind a prompt
            states[:, slot], windows[:, slot] = np.inf, np.inf
        shapes = (LAYERS, B, T, HIDDEN), (1, CHUNK, HIDDEN)
        x, prompt = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
        state = recurrent_state.RecurrentState(jnp.asarray(states), jnp.asarray(windows, dtype))
        given_ = weights, state, x, lengths, counts, prompt, np.int32(data.draw(st.integers(1, CHUNK)))
        (expected, after), (found, committed) = (one(*given_) for one in runs)
        for ours, wanted in zip([*found, *committed], [*expected, *after], strict=True):
            ours, wanted = (np.asarray(one, np.float32) for one in (ours, wanted))
            np.testing.assert_allclose(ours, wanted, rtol=tolerance, atol=tolerance)
        idle = [*np.flatnonzero(counts == 0), *range(B, SLOTS)]
        np.testing.assert_array_equal(np.asarray(committed.states)[:, idle], states[:, idle])
        np.testing.assert_array_equal(committed.windows[:, np.array(idle)], state.windows[:, np.array(idle)])

    check()
    assert "RACE" not in capfd.readouterr().out


def test_heads_of_a_grid_step_fit_whole_registers():
    for sizes, cores, expected in [
        (DeltaSizes(16, 32, 128, 128), 1, (8, 2)),  # 4B
        (DeltaSizes(16, 48, 128, 128), 1, (8, 1)),  # 27B
        (DeltaSizes(4, 12, 128, 128), 1, (4, 1)),  # of it, on four devices: all heads, which are no whole register
        (DeltaSizes(16, 16, 128, 128), 2, (8, 4)),  # 0.8B: the cores share the heads
        (DeltaSizes(16, 32, 64, 128), 1, (None, None)),
        (DeltaSizes(1, 32, 128, 128), 1, (None, None)),  # too large for VMEM
    ]:
        chunks = choose_delta_chunks(KernelDevice("", cores), sizes, WINDOW)
        assert (choose_delta_heads(sizes, cores), chunks and chunks.heads) == expected
