"""The kernel of DFlash2's convolution before a sublayer, against XLA's operations, and the sizes that it takes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.cache.model_config.architecture import BlockConvolution
from dflash_aot.compile.kernels.input_convolution import choose_groups
from dflash_aot.compile.kernels.kernel_device import InputConvolution
from dflash_aot.compile.models.backend import CPU, Kernels, TpuBackend
from dflash_aot.compile.models.dflash import SublayerConvolution
from dflash_aot.compile.models.layers import LayerForm
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from tests.compile.quick import jit_quickly

HIDDEN, LAYER = 512, 1
DEVICE = Kernels("", 1, pltpu.InterpretParams(detect_races=True))


@pytest.mark.parametrize(
    ("taps", "group", "blocks", "rows", "dtype"),
    [(2, 8, 3, 8, "float32"), (3, 16, 2, 16, "bfloat16"), (1, 16, 1, 8, "float32")],
    ids=["three blocks", "three taps", "one tap"],
)
def test_kernel_computes_what_the_operations_compute(taps, group, blocks, rows, dtype, capfd):
    """In the second layer of a stack whose first one is NaN. Coefficients are as large as what they multiply."""

    def build(backend):
        sizes, form = BlockConvolution(taps, group), LayerForm(dtype, tp=TensorParallel(backend=backend))
        model = AbstractModel(lambda: SublayerConvolution(sizes, HIDDEN, form))
        return model, jit_quickly(lambda weights, h: model.bind(weights).convolve_input(h, LAYER))

    model, operations = build(CPU)
    _, kernel = build(TpuBackend(kernels=DEVICE))
    rng = np.random.default_rng(taps)
    weights = {
        name: jnp.asarray(rng.standard_normal((2, *leaf.shape)) / np.sqrt(leaf.shape[-1]), leaf.dtype).at[0].set(np.nan)
        for name, leaf in model.shapes().items()
    }
    h = jnp.asarray(rng.standard_normal((blocks, rows, HIDDEN)), dtype)
    stack = InputConvolution(weights["kernel_projection.weight"], weights["base_kernel"], jnp.int32(LAYER), group)
    assert jax.eval_shape(partial(DEVICE.convolve_input, h, stack)) is not None
    for expected, found in zip(operations(weights, h), kernel(weights, h), strict=True):
        assert found.dtype == expected.dtype
        expected, found = (np.asarray(one, np.float32) for one in (expected, found))
        assert np.isfinite(expected).all() and np.abs(expected).max() > 0.5
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if dtype == "float32" else 0.03)
    assert "RACE" not in capfd.readouterr().out


def test_grid_step_takes_whole_memory_tiles():
    """Of Qwen3-8B, of a hidden size of 6656, at least one; 64 channels are no whole registers, nor are 24 groups."""
    cases = [(256, 16, 32768, 32), (416, 16, 53248, 16), (32, 16, 2**20, 16), (16, 4, 1024, None), (24, 16, 1024, None)]
    for groups, size, group_bytes, expected in cases:
        assert choose_groups(groups, size, group_bytes) == expected


def test_other_sizes_are_left_to_the_operations():
    for blocks, rows, hidden, dtype, taken in [
        (16, 16, 4096, "bfloat16", True),
        (16, 16, 6656, "bfloat16", True),
        (16, 16, 6656, "float32", False),  # not in VMEM
        (1, 7, 512, "bfloat16", False),  # no whole sublanes
        (17, 16, 512, "bfloat16", False),  # too many rows
    ]:
        h, projection = (jnp.zeros(shape, dtype) for shape in ((blocks, rows, hidden), (1, hidden // 4, hidden)))
        stack = InputConvolution(projection, jnp.zeros((1, 2, 2, hidden)), jnp.int32(0), 16)
        found = jax.eval_shape(partial(DEVICE.convolve_input, h, stack))
        assert (found is not None) == taken
