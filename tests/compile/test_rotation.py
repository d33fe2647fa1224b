"""Rotary embedding: the two ways of turning halves of a head give the same bits."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.compile.models.layers import Rotation, turn_by_product, turn_by_slices


def test_turn_by_product_equals_turn_by_slices():
    for dtype in ["float32", "bfloat16"]:
        rotation = Rotation(Rope(head_dim=128, theta=1e4), jnp.arange(5)[None], jnp.dtype(dtype))
        x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 2, 3, 5, 128)), dtype)
        with jax.default_matmul_precision("highest"):  # as programs for TPU are lowered
            found, expected = turn_by_product(x, rotation.turn), turn_by_slices(x, rotation.turn)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, expected)
