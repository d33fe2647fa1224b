"""Tensor parallelism on eight CPU devices: weights, state and tokens. Run by test_tensor_parallelism.py."""

import functools
import sys
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from absl.testing import flagsaver
from safetensors.numpy import save_file

from dflash_aot.bin import precompile
from dflash_aot.cache.arrays import MESH_AXIS, state_arrays
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.devices import make_sharding
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.weight_recipe import Placement, WeightFormats, WeightRecipe
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.executables.executable import DeviceState, load_executable
from dflash_aot.runtime.weights.weight_loader import load_weights
from tests.conftest import leave_out_k0
from tests.quantized_checkpoints import quantize_checkpoint

DEVICES = jax.devices("cpu")
GRID = "batch=2 length=64 k=0,7 prefill=16"
KINDS = ("dspark", "experts", "dflash2")
INT8 = WeightFormats("int8", "int8")
PROMPTS = [[1], [*range(32)], [2, 7, 1, 8, 2, 8], [3, 1, 4, 1, 5, 9], [29, 30]]
PARAMS = SamplingParams(max_tokens=20, stop_token_ids=(), trace=True)


# -- weights


def copy_heads(array: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    """The array with each part of its first axis as often as `shape` has it: queries only move to other heads."""
    whole = np.asarray(array)
    return np.repeat(whole, shape[0] // len(whole), axis=0) if whole.size < np.prod(shape) else whole.reshape(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_each_device_holds_its_slice_of_every_argument(make_up, kind, count=8):
    pair, devices = make_up(kind), DEVICES[:count]
    alone = load_weights(pair.programs().recipes(), pair.places, DEVICES[:1])
    recipes = pair.programs(count).recipes()
    shared = load_weights(recipes, pair.places, devices)
    for recipe in recipes:
        found = shared[recipe.name]
        whole = copy_heads(alone[recipe.name], found.shape)
        assert found.sharding == make_sharding(recipe.sharding, devices)
        for shard in found.addressable_shards:
            assert shard.data.size == whole.size // (count if MESH_AXIS in recipe.sharding else 1)
            np.testing.assert_array_equal(shard.data, whole[shard.index])
    split = sum(recipe.bytes for recipe in recipes if MESH_AXIS in recipe.sharding)
    assert split > 0.95 * sum(recipe.bytes for recipe in recipes)


@pytest.mark.parametrize(("kind", "form"), [("dspark", "fp8"), ("experts", "packed"), ("dflash2", "fp8")])
def test_each_device_holds_its_slice_of_a_quantized_checkpoint(make_up, tmp_path, kind, form):
    """The same integers and scales on any number of devices, which split blocks and packed numbers anywhere."""
    pair = make_up(kind)
    places = {
        role: quantize_checkpoint(place, tmp_path / role, form, [], block=(9, 5)).directory
        for role, place in pair.places.items()
    }
    alone = load_weights(pair.programs(formats=INT8).recipes(), places, DEVICES[:1])
    shared = load_weights(pair.programs(8, formats=INT8).recipes(), places, DEVICES)
    for name, array in shared.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, copy_heads(alone[name], array.shape)[shard.index])
    assert {str(array.dtype) for array in shared.values()} >= {"int8", "float32"}


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_arguments_equal_the_unrolled_ones(make_up, kind, count=4):
    """Executables for TPU take stacked arguments."""
    pair, devices = make_up(kind), DEVICES[:count]
    unrolled, stacked = (
        load_weights(pair.programs(count, stacked).recipes(), pair.places, devices) for stacked in (False, True)
    )
    assert len(stacked) < len(unrolled)
    for name, array in unrolled.items():
        before, layers, after = name.partition("layers.")
        layer, _, rest = after.partition(".")
        hybrid = kind == "dflash2" and name.startswith("target")
        stack = f"{before}{'recurrent_' * (hybrid and layer != '2')}{layers}{rest}"
        rank = 0 if hybrid and layer == "2" else int(layer or 0)  # the last layer is the only one with attention
        np.testing.assert_array_equal(array, stacked[stack][rank] if layers else stacked[name])


@pytest.mark.parametrize("count", [1, 8])
def test_host_memory_holds_at_most_two_slices(tmp_path, count):
    """Most bytes of host memory while a weight of ones is loaded, without those that stay."""
    shape, devices = (1024, 4096), DEVICES[:count]
    placement = Placement("w", shape, (0, 0), shape)
    recipes = [WeightRecipe("target.w", "target", shape, "float32", (placement,), (None, MESH_AXIS))]
    save_file({"w": np.ones(shape, np.float32)}, tmp_path / "model.safetensors")
    load_weights(recipes, {"target": tmp_path}, devices)  # the first load allocates more
    tracemalloc.start()
    try:
        loaded = load_weights(recipes, {"target": tmp_path}, devices)
        left, peak = tracemalloc.get_traced_memory()  # a CPU device may keep the host's array
    finally:
        tracemalloc.stop()
    slice_bytes = loaded["target.w"].nbytes // count
    assert slice_bytes <= peak and peak - left < 2.1 * slice_bytes


# -- state


def test_kv_cache_is_split_and_other_state_replicated(make_up, count=8):
    pair = make_up("experts").programs(count).pair
    arrays = state_arrays(pair, parse_grid(GRID, pair.block))
    state = DeviceState(arrays, DEVICES[:count])
    for array, found in zip(arrays, state.read([array.name for array in arrays]), strict=True):
        assert (found.shape, str(found.dtype)) == (array.shape, array.dtype)
        assert not np.asarray(found).any()
        heads = found.shape[2] // count if found.ndim == 5 else None
        for shard in found.addressable_shards:
            assert shard.data.shape == (found.shape if heads is None else (*found.shape[:2], heads, *found.shape[3:]))
    everywhere = state.to_device(np.arange(3))
    assert {shard.device for shard in everywhere.addressable_shards} == set(DEVICES[:count])
    assert all(shard.data.tolist() == [0, 1, 2] for shard in everywhere.addressable_shards)


# -- tokens


@pytest.fixture(scope="session")
def build(make_up, pytestconfig):
    """Builds the bundle of a pair for `count` devices in pytest's cache: only changed programs are compiled again."""
    directory = pytestconfig.cache.mkdir("dflash-bundles")

    @functools.cache
    def build(kind: str, count: int) -> Path:
        path = directory / f"{kind} on {count}"
        grid = f"{GRID} rounds=2" if kind == "dspark" and count > 1 else GRID
        pair = make_up(kind.removesuffix(" int8"))
        weights = "int8" if kind.endswith("int8") else "float32"
        named = {"bundle": path, "buckets": grid, "platform": "cpu", "tensor_parallel": count, "weights": weights}
        named |= pair.places | {"sampling": "sample,prompt_logprobs" if kind == "dflash2" else "greedy"}
        named |= {"exact": "true", "replace": "true"}  # the cache may hold an earlier grid or pair
        named |= {"self_test": str(kind == "dspark" and count > 1).lower()}  # the answers test the others
        saved = flagsaver.save_flag_values(precompile.FLAGS)
        k = leave_out_k0() if count == 1 else nullcontext()
        with k, pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
            patch.setattr(sys, "argv", ["precompile", *(f"--{flag}={value}" for flag, value in named.items())])
            precompile.main()
        flagsaver.restore_flag_values(saved, precompile.FLAGS)
        assert left.value.code == 0
        return path

    return build


@pytest.fixture(scope="session")
def answer(build):
    """Tokens, drafted blocks and accepted counts of every prompt, with drafts, and on several devices without."""

    def answer(kind: str, count: int) -> list[list[tuple]]:
        with Engine.open(build(kind, count), k=7) as engine:
            ks = reversed(engine.manifest.grid.k)
            answers = [engine.generate_all(PROMPTS, replace(PARAMS, k=k, prefix_caching=False)) for k in ks]
            assert engine.stats().compile_events == 0
        return [[(one.token_ids, one.drafted, one.accepted) for one in results] for results in answers]

    return answer


@pytest.mark.parametrize(("kind", "count"), [("dspark", 2), ("experts int8", 8), ("dflash2", 4)])
def test_several_devices_give_the_tokens_of_one_device(answer, kind, count):
    """Compares every drafted block, every accepted count, and every token; without drafts the tokens."""
    (alone,), (shared, undrafted) = answer(kind, 1), answer(kind, count)
    assert shared == alone
    tokens = [tokens for tokens, _, _ in alone]
    assert [one[:1] for one in undrafted] == [(one,) for one in tokens]
    assert not any(any(drafted) for _, drafted, _ in undrafted)
    assert len({token for answer in tokens for token in answer}) > 6
    assert sum(sum(accepted) for _, _, accepted in alone) > 0


SAMPLED = [
    SamplingParams(max_tokens=20, stop_token_ids=(), seed=seed, logprobs=3, prompt_logprobs=2, **asked)
    for seed, asked in enumerate(
        (
            {"temperature": 1.0, "logit_bias": {5: 1.0}},
            {"temperature": 1.3, "top_k": 11, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.4},
            {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        )
    )
]


def test_sampled_answers_and_scores_are_those_of_one_device(build):
    found = []
    for count in (1, 4):
        with Engine.open(build("dflash2", count), k=7) as engine:
            found.append(engine.generate_all(PROMPTS[1:4], SAMPLED))
            assert engine.stats().compile_events == 0
    for one, other in zip(*found, strict=True):
        assert other.token_ids == one.token_ids and len(set(one.token_ids)) > 3
        scores = [[*result.prompt_logprobs[1:], *result.logprobs] for result in (one, other)]
        for alone, shared in zip(*scores, strict=True):
            assert [token for token, _ in shared.top] == [token for token, _ in alone.top]
            assert [shared.logprob, *(value for _, value in shared.top)] == pytest.approx(
                [alone.logprob, *(value for _, value in alone.top)], abs=1e-4
            )


def test_wrong_device_count_in_the_manifest_raises(build, tmp_path):
    """Loading an executable on another number of devices would abort the process."""
    path, copy = build("dflash2", 4), tmp_path / "bundle"
    copy.mkdir()
    (copy / "executables").symlink_to(path / "executables")
    manifest = read_manifest(path)
    environment = msgspec.structs.replace(manifest.environment, device_count=2, coordinates=("0", "1"))
    (copy / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, environment=environment)))
    with pytest.raises(CorruptBundle, match="compiled for 4 devices, but the manifest says 2. It was not loaded"):
        Engine.open(copy, preload=True)


def test_executable_for_other_device_ids_raises(build):
    path = build("dflash2", 4)
    entry = read_manifest(path).entries[0]
    with pytest.raises(
        IncompatibleBundle, match=r"compiled for the devices \[0, 1, 2, 3\], but the devices here are \[4, 5, 6, 7\]"
    ):
        load_executable(Store(path).read_executable(entry), entry.signature, DEVICES[4:], "here")
