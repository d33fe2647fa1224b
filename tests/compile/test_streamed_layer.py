"""The kernel that streams what lies between two attentions, against the layers as XLA's operations."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from dflash_aot.cache.devices import make_mesh
from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.compile.kernels import streamed_layer
from dflash_aot.compile.kernels.kernel_device import StreamSizes
from dflash_aot.compile.models.backend import Kernels, TpuBackend
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.layers import LayerForm
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from tests.compile.quick import jit_quickly

CONFIG = Path("tests/cache/configs/Qwen3-4B.json")
SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_window_layers": 3}
HYBRID = Path("tests/cache/configs/Qwen3.5-4B.json")
HYBRID_SIZES = SIZES | {"layer_types": ["linear_attention"] * 2 + ["full_attention"]}
HYBRID_SIZES |= {"linear_num_key_heads": 2, "linear_num_value_heads": 16}


FORMS = ("float32", "plain", 1, 1), ("bfloat16", "plain", 3, 7), ("float32", "int8", 2, 3), ("bfloat16", "int8", 2, 16)
SHARES = (1, 1), (2, 1), (1, 2), (2, 2)  # cores of a device, devices


@pytest.mark.parametrize(
    ("dtype", "format_", "rows", "width", "cores", "devices"),
    [*((*form, *share) for form, share in zip(FORMS, SHARES, strict=True)), (*FORMS[3], 1, 1), (*FORMS[0], 2, 2)],
)
def test_kernels_compute_what_the_layers_compute(dtype, format_, rows, width, cores, devices, monkeypatch, capfd):
    parts = 2 if format_ == "int8" else 1
    monkeypatch.setattr(streamed_layer, "TILE_BYTES", cores * 2**18 // parts)
    for name in ("MLP_TILE_BYTES", "CORE_MLP_TILE_BYTES"):
        monkeypatch.setattr(streamed_layer, name, 2**19 // parts)
    target = read_target(ConfigFile(CONFIG, json.loads(CONFIG.read_text()) | SIZES))
    name = f"stream_{'layer' if cores * devices == 1 else 'inputs'}"
    compare_with_operations(target, (dtype, format_, rows, width), (cores, devices), name, capfd)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("form", [("float32", "plain", 1, 3), ("bfloat16", "int8", 2, 8)])
def test_kernels_compute_what_layers_of_hybrids_compute(form, cores, monkeypatch, capfd):
    for name in ("DELTA_TILE_BYTES", "MLP_TILE_BYTES", "TILE_BYTES"):
        monkeypatch.setattr(streamed_layer, name, 2**19)
    config = json.loads(HYBRID.read_text())
    target = read_target(ConfigFile(HYBRID, config | {"text_config": config["text_config"] | HYBRID_SIZES}))
    name = "stream_output_mlp" if cores == 1 else "stream_delta_inputs"
    compare_with_operations(target, form, (cores, 1), name, capfd)


def compare_with_operations(target, form, shared_by, name, capfd):
    """Several tiles of each matrix. The attention gives its queries back. Of two devices one has all."""
    (dtype, format_, rows, width), (cores, devices) = form, shared_by
    device = Kernels("", cores, pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores))

    def attend(kv, layer, inputs):
        return inputs.queries, kv + jnp.sum(inputs.keys.astype(jnp.float32) * inputs.values.astype(jnp.float32))

    def recur(kv, layer, call):
        inputs = call.project()
        size = inputs.gates.shape[-1]
        factors = jnp.repeat(inputs.strengths + inputs.decays, 128, axis=-1)
        channels = inputs.channels[..., :size] + inputs.channels[..., -size:]
        return call.output((inputs.gates + channels) * factors.astype(dtype)), kv

    def build(kernels, devices=1):
        form = LayerForm(dtype, format_, tp=TensorParallel(devices, TpuBackend(kernels=kernels)))
        model = AbstractModel(lambda: CausalLM(target, form))

        def run(weights, ids, positions):
            return model.bind(weights).forward(ids, positions, [0, 2], jnp.float32(0), attend, recur)

        shares = {"mesh": make_mesh(jax.devices()[:1]), "in_specs": P(), "out_specs": P(), "check_vma": False}
        return model, jit_quickly(jax.shard_map(run, **shares))

    model, operations = build(None)
    _, kernel = build(device, devices)
    rng = np.random.default_rng(width)

    def fill(name, leaf):
        """Numbers of int8 have a deviation of 73; scaled rows have about that of plain ones."""
        if leaf.dtype == jnp.int8:
            return jnp.asarray(rng.integers(-127, 128, leaf.shape), jnp.int8)
        if "scale" in name:
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape) / (73 * 16), leaf.dtype)
        width = 1 if "norm" in name else leaf.shape[-1]
        return jnp.asarray(rng.standard_normal(leaf.shape) / np.sqrt(width), leaf.dtype)

    weights = {name: fill(name, leaf) for name, leaf in model.shapes().items()}
    ids = rng.integers(0, 64, (rows, width))
    positions = np.arange(rows * width).reshape(rows, width)
    assert name in str(kernel.trace(weights, ids, positions).jaxpr)
    for expected, found in zip(operations(weights, ids, positions), kernel(weights, ids, positions), strict=True):
        assert found.dtype == expected.dtype
        expected, found = (np.asarray(one, np.float32) for one in (expected, found))
        assert np.isfinite(expected).all() and np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 if dtype == "float32" else 0.05)
    assert "RACE" not in capfd.readouterr().out


def test_other_sizes_and_devices_are_left_to_the_operations():
    choose = partial(StreamSizes, rows=1, hidden=2560, mixed=4096, queries=4096, keys_values=2048, head=128, item=2)
    for tokens, width, cores, stored, tiles in [
        (128, 9728, 1, 2, (256, 256, 256, 256)),
        (256, 9728, 1, 1, (512, 512, 512, 512)),
        (512, 9728, 1, 2, None),  # too many tokens
        (16, 9856, 2, 2, None),  # no whole registers of each core
        (16, 9736, 1, 2, None),  # no whole registers
    ]:
        sizes = choose(tokens=tokens, width=width, stored=stored)
        kernel = streamed_layer.choose_stream(Kernels("", cores), sizes, 1e-6, shared=False)
        assert (kernel and kernel.tiles) == tiles
    parts = streamed_layer.choose_stream(Kernels("", 2), choose(tokens=256, width=9728, stored=2), 1e-6, shared=True)
    assert (parts.output.tile, parts.mlp.tile, parts.inputs.tiles) == (128, 128, (256, 256))
