"""The mixture-of-experts MLP, and the kernel of all MLPs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dflash_aot.cache.model_config.architecture import ClampedActivation, MixtureOfExperts
from dflash_aot.compile.kernels import streamed_mlp
from dflash_aot.compile.kernels.streamed_mlp import ExpertWork, divide_work
from dflash_aot.compile.models.backend import Kernels, TpuBackend
from dflash_aot.compile.models.layers import LayerForm, Mlp, RmsNorm
from dflash_aot.compile.models.mixture_of_experts import ClampedMlp, RoutedMlp, choose_experts
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from tests.compile.quick import jit_quickly

PLAIN, INT8, BF16 = LayerForm("float32"), LayerForm("float32", "int8"), LayerForm("bfloat16")


def use_kernels(form, device):
    return replace(form, tp=TensorParallel(backend=TpuBackend(kernels=device)))


def make_norm(hidden, dtype="float32", product="unit_offset"):
    norm = RmsNorm(hidden, 1e-6, dtype, product)
    norm.weight[...] = jnp.linspace(0.5, 1, hidden).astype(dtype)
    return norm


@pytest.mark.parametrize("kind", [PLAIN, INT8], ids=lambda kind: kind.format)
def test_expert_weights_are_not_copied(kind):
    hidden, experts, n = 256, MixtureOfExperts(32, 4, 128, True), 32
    model = AbstractModel(lambda: RoutedMlp(hidden, experts, kind))
    function = jax.jit(lambda weights, x: model.bind(weights)(x, make_norm(hidden)))
    compiled = function.lower(model.shapes(), jax.ShapeDtypeStruct((n, hidden), jnp.float32)).compile()
    one_expert = 3 * hidden * experts.width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * one_expert


@pytest.mark.parametrize(
    ("kind", "width", "cores", "count"),
    [(BF16, 256, 1, 1), (PLAIN, 48, 1, 300), (INT8, 256, 2, 20), (INT8, 96, 1, 5)],
    ids=["bfloat16, one token", "turned, two calls", "int8, two cores", "int8, turned"],
)
def test_kernels_equal_the_loop_and_read_only_chosen_experts(kind, width, cores, count, capfd):
    """In the second layer of a stack. Two experts that no token chooses are NaN, as are those of the first layer.

    The last token is NaN and chooses nothing.
    """
    hidden, shared, product = 128, 0 if kind is INT8 else 64, "unit_offset" if kind is PLAIN else "rounded"

    def build(form):
        model = AbstractModel(lambda: RoutedMlp(hidden, MixtureOfExperts(8, 2, width, True, shared=shared), form))
        norm = make_norm(hidden, kind.dtype, product)
        return model, jit_quickly(lambda weights, x: model.bind(weights)(x, norm, 1))

    model, loop = build(kind)
    _, kernel = build(use_kernels(kind, Kernels("", cores, pltpu.InterpretParams(detect_races=True))))
    rng = np.random.default_rng(count)
    weights = {name: rng.standard_normal((2, *leaf.shape), np.float32) / 8 for name, leaf in model.shapes().items()}
    if kind is INT8:
        for name in ("gate_up", "down"):
            weights[name] = rng.integers(-127, 128, weights[name].shape, np.int8)
            weights[f"{name}_scale"] = np.abs(weights[f"{name}_scale"]) / 100
    ends = [f"{name}_scale" if kind is INT8 else name for name in ("gate_up", "down")]
    tokens = rng.standard_normal((count, hidden), np.float32)
    tokens[:, 0], weights["gate.weight"][1, [2, 5], 0] = 1, -100
    for name in (ends[0], ends[1], "gate.weight"):
        weights[name][0] = np.nan
    weights[ends[1]][1, [2, 5]] = np.nan
    tokens = np.concatenate([tokens, np.full((1, hidden), np.nan, np.float32)])
    if kind is not INT8:
        tokens, weights = jax.tree.map(lambda array: jnp.asarray(array, kind.dtype), (tokens, weights))
    assert "route_tokens" in str(kernel.trace(weights, tokens).jaxpr)
    gates = {name: stack[1] for name, stack in weights.items() if name.endswith("gate.weight")}
    expected, found = (np.asarray(one, np.float32) for one in (loop(weights | gates, tokens), kernel(weights, tokens)))
    assert np.isfinite(expected[:count]).all() and np.abs(expected[:count]).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 if kind is BF16 else 1e-4)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(("count", "normalized"), [(1, True), (21, False), (300, True)])
def test_kernel_chooses_the_experts_that_operations_choose(count, normalized, capfd):
    """Whole numbers, of which many are equal."""
    experts = MixtureOfExperts(12, 3, 8, normalized)
    scores = jnp.asarray(np.random.default_rng(count).integers(-2, 3, (count, 12)), jnp.float32)
    backends = TpuBackend(), TpuBackend(kernels=Kernels("", 1, pltpu.InterpretParams(detect_races=True)))
    expected, found = (choose_experts(scores, experts, jnp.bfloat16, one) for one in backends)
    assert found.count == expected.count
    np.testing.assert_array_equal(found.numbers[: found.count], expected.numbers[: found.count])
    assert (np.asarray(found.numbers) < 12).all()
    np.testing.assert_allclose(found.shares, expected.shares, rtol=2**-8)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(("kind", "count"), [(PLAIN, 1), (INT8, 20), (LayerForm("bfloat16", "int8"), 300)])
def test_kernel_of_clamped_experts_equals_the_loop(kind, count, monkeypatch, capfd):
    """In the second layer of a stack, with two steps of each kind of an expert; the last ones reach beyond it."""
    monkeypatch.setattr(streamed_mlp, "CLAMPED_BYTES", 0)
    hidden, width = 288, 160
    experts = MixtureOfExperts(8, 2, width, True, clamped=ClampedActivation(0.5, 1.7))

    def build(form):
        model = AbstractModel(lambda: ClampedMlp(hidden, experts, experts.clamped, form))
        return model, jit_quickly(lambda weights, x: model.bind(weights)(x, 1))

    model, loop = build(kind)
    _, kernel = build(use_kernels(kind, Kernels("", 1, pltpu.InterpretParams(detect_races=True))))
    rng = np.random.default_rng(count)

    def fill(name, leaf):
        stacked = name.removesuffix("_scale") in ("gate_up", "down", "gate_up_bias")
        shape = (2, *leaf.shape) if stacked else leaf.shape
        if leaf.dtype == jnp.int8:
            return rng.integers(-127, 128, shape, np.int8)
        values = rng.standard_normal(shape, np.float32) / (8 if name in ("gate_up", "down") else 1)
        return jnp.asarray(np.abs(values) / 999 if name.endswith("_scale") else values, leaf.dtype)

    weights = {name: fill(name, leaf) for name, leaf in model.shapes().items()}
    tokens = jnp.asarray(rng.standard_normal((count, hidden), np.float32), kind.dtype)
    assert "stream_clamped_mlp" in str(kernel.trace(weights, tokens).jaxpr)
    expected, found = (np.asarray(run(weights, tokens), np.float32) for run in (loop, kernel))
    assert np.isfinite(expected).all() and np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if kind.dtype == "float32" else 0.02)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("kind", "width", "cores", "count"),
    [(PLAIN, 256, 1, 1), (PLAIN, 1920, 2, 20), (INT8, 96, 1, 5), (INT8, 256, 1, 300)],
    ids=["one token", "uneven on two cores", "int8, turned", "int8, no kernel"],
)
def test_kernel_computes_the_dense_mlp_of_a_layer(kind, width, cores, count, capfd):
    """The second layer of three; the others are NaN. More than 256 tokens are multiplied by XLA."""
    hidden, rng = 128, np.random.default_rng(count)
    device = Kernels("", cores, pltpu.InterpretParams(detect_races=True), vmem_bytes=2**21)

    def build(form):
        model = AbstractModel(lambda: Mlp(hidden, width, form))
        return model, jit_quickly(lambda weights, x: model.bind(weights)(x, 1))

    (model, plain), (_, kernel) = build(kind), build(use_kernels(kind, device))
    weights = {name: rng.standard_normal(leaf.shape, np.float32) / 8 for name, leaf in model.shapes().items()}
    if kind is INT8:
        for name in ("gate_up", "down_proj.weight"):
            weights[name] = rng.integers(-127, 128, weights[name].shape, np.int8)
            weights[f"{name}_scale"] = np.abs(weights[f"{name}_scale"]) / 100
    tokens = rng.standard_normal((2, count, hidden), np.float32)
    stacks = {
        name: np.stack([one if one.dtype == np.int8 else np.full_like(one, np.nan), one, np.full_like(one, 0)])
        for name, one in weights.items()
    }
    expected, found = plain(weights, tokens), kernel(stacks, tokens)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)
    assert "RACE" not in capfd.readouterr().out


def test_mlp_without_whole_memory_tiles_has_no_kernel():
    form = use_kernels(INT8, Kernels("", 1))
    sizes = [(128, 96), (128, 80), (120, 96)]
    assert [Mlp(hidden, width, form).kernels is not None for hidden, width in sizes] == [True, False, False]


def test_work_of_the_kernel_fits_in_vmem():
    for tokens, width, item, cores, expected in [
        (16, 768, 2, 1, ExpertWork(16, 384, 1)),  # Qwen3-30B-A3B, batch=1 k=15
        (16, 768, 2, 2, ExpertWork(16, 384, 2)),  # the cores share the width
        (256, 768, 2, 2, ExpertWork(256, 128, 2)),  # six tiles; of 256 there would be three
        (600, 768, 2, 1, ExpertWork(208, 256, 1)),  # three calls
        (16, 192, 2, 1, ExpertWork(16, 192, 1)),  # on each of four devices
        (16, 200, 2, 1, None),  # no whole memory tiles
        (16, 176, 1, 1, None),  # a memory tile of int8 has more rows
    ]:
        device = Kernels("", cores, vmem_bytes=14 * 2**20)
        assert divide_work(tokens, 2048, width, (2, item), device) == expected
