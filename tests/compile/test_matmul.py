"""Products on a CPU: any number of rows, and int8 weights, equal to those of floats, converted in bounded tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_aot.compile.models.backend import CPU, TPU
from dflash_aot.compile.models.matmul import (
    CONVERTED_BYTES,
    ROW_BY_ROW,
    ROW_BY_ROW_INPUTS,
    TILED,
    count_converted_outputs,
    count_padded_rows,
)


def test_tile_is_a_divisor_or_leaves_a_smaller_tile():
    for outputs, width, size in [
        (3072, 1024, 1024),
        (1024, 3072, 256),  # 426 rows are allowed
        (50257, 768, 29),  # a divisor
        (50261, 768, 1524),  # a prime: 32 equal tiles, and one of 1493
        (576, 576, 288),  # at least two
        (151936, 2560, 128),
        (3, 2**24, 1),
        (1, 8, 1),
    ]:
        assert count_converted_outputs(outputs, 4 * width) == size
        assert size == 1 or size * 4 * width <= CONVERTED_BYTES


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_product_equals_floats_and_converts_one_tile(dtype):
    if dtype not in TILED:
        pytest.skip(f"this JAX converts {dtype} well in a whole product")
    for shape in [(1024, 3072), (4099, 1024), (1024, 768)]:
        rng = np.random.default_rng(0)
        weight, x = rng.integers(-127, 128, shape, np.int8), rng.integers(-4, 5, (8, shape[1])).astype(np.float32)
        scale = rng.random(shape[0], np.float32)
        given = jnp.asarray(weight, dtype), jnp.asarray(x), jnp.asarray(scale)
        compiled = jax.jit(CPU.matmul).lower(*given).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * CONVERTED_BYTES
        np.testing.assert_array_equal(compiled(*given), (x @ weight.T.astype(np.float32)) * scale)


def test_weights_are_converted_one_after_the_other():
    weights, x = [jnp.ones((1024, 1024), jnp.int8)] * 4, jnp.ones((8, 1024))

    def multiply(weights, x):
        for weight in weights:
            x = CPU.matmul(weight, x) / 1024
        return x

    compiled = jax.jit(multiply).lower(weights, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * CONVERTED_BYTES
    np.testing.assert_array_equal(compiled(weights, x), x)


def test_few_rows_are_multiplied_without_a_float_weight():
    sizes = [("bfloat16", 1, 512, 1024), ("bfloat16", 4, 512, 1024), ("int8", 4, 1031, 1024)]
    sizes += [(dtype, 2, 48, ROW_BY_ROW_INPUTS + more) for dtype in ROW_BY_ROW for more in (0, 1)]
    for dtype, count, outputs, inputs in sizes:
        rng = np.random.default_rng(0)
        weight, x = rng.integers(-8, 9, (outputs, inputs)), rng.integers(-4, 5, (count, inputs))
        given = jnp.asarray(weight, dtype), jnp.asarray(x, "bfloat16")
        compiled = jax.jit(lambda weight, x: CPU.matmul(weight, x, dtype="float32")).lower(*given).compile()
        np.testing.assert_array_equal(compiled(*given), x @ weight.T)
        if count <= ROW_BY_ROW[dtype] and inputs <= ROW_BY_ROW_INPUTS:
            assert compiled.memory_analysis().temp_size_in_bytes < weight.size


def test_padding_rows_are_multiplied_and_cut_off():
    for count, padded in [(1, 1), (4, 4), (5, 8), (8, 8), (9, 16), (17, 32)]:
        assert count_padded_rows(count) == padded
        rng = np.random.default_rng(0)
        weight, x = (rng.integers(-4, 5, (rows, 32)).astype(np.float32) for rows in (24, count))
        lowered = jax.jit(CPU.matmul).lower(weight, x)
        assert f"tensor<24x{padded}xf32>" in lowered.as_text()
        np.testing.assert_array_equal(lowered.compile()(weight, x), x @ weight.T)


@pytest.mark.parametrize("count", [3, 70])
def test_rows_of_a_narrow_table_are_looked_up_without_a_gather(count):
    table = jnp.arange(4096 * 65, dtype=jnp.float32).reshape(4096, 65)
    ids = jnp.asarray(np.random.default_rng(count).integers(0, 4096, (count, 2)))
    look_up = jax.jit(TPU.look_up)
    assert "gather" not in look_up.lower(table, ids).as_text()
    np.testing.assert_array_equal(look_up(table, ids), table[ids])
