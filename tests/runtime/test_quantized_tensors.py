"""Quantized checkpoints: the numbers that are read, hostile tensors, and tokens of a whole pair."""

import math
import random
import re
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.files.checkpoint_files import CONFIG_FILE
from dflash_aot.cache.weight_recipe import WeightFormats
from dflash_aot.runtime.weights.quantized_tensors import open_checkpoint
from dflash_aot.runtime.weights.safetensors_reader import FLOATS, FUSED_EXPERTS, FUSED_SCALES
from dflash_aot.runtime.weights.weight_loader import load_weights
from tests.conftest import GOLDEN
from tests.quantized_checkpoints import (
    FILE,
    make_section,
    pack,
    quantize_checkpoint,
    set_section,
    spread,
    store_fp8,
    store_int8,
)
from tests.runtime.conftest import MadeUp

CPU = jax.devices("cpu")[0]
NAME = "model.layers.0.mlp.up_proj"
WEIGHT, BLOCK = f"{NAME}.weight", (4, 6)
SCALE_INV, SCALE, PACKED, SHAPE = (f"{NAME}.weight_{kind}" for kind in ("scale_inv", "scale", "packed", "shape"))
DICE = np.random.default_rng(5)
MATRIX = DICE.standard_normal((11, 17)).astype(np.float32)  # the last blocks are ragged, the last int32 is filled up
FP8, INT8 = store_fp8(NAME, MATRIX, BLOCK), store_int8(NAME, MATRIX)
STORED = {"fp8": FP8, "int8": INT8, "packed": pack(NAME, INT8)}


@pytest.fixture
def write(tmp_path):
    """Writes a checkpoint of some tensors, and returns its directory."""

    def write_checkpoint(form, tensors, unquantized=(), block=BLOCK) -> Path:
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, tmp_path / FILE)
        set_section(tmp_path, make_section(form, list(unquantized), block))
        return tmp_path

    return write_checkpoint


def refusal(place: Path, name=WEIGHT, shape=MATRIX.shape, interleaved: bool = False) -> str:
    with pytest.raises(BadCheckpoint) as error:
        open_checkpoint(place, "target", interleaved).read(name, shape, FLOATS)
    return str(error.value)


def meant(form) -> np.ndarray:
    if form == "fp8":
        return FP8[WEIGHT].astype(np.float32) * spread(FP8[SCALE_INV], BLOCK, MATRIX.shape)
    return INT8[WEIGHT].astype(np.float32) * INT8[SCALE]


# -- numbers


def test_every_fp8_code_is_read_as_torch_reads_it(write, shape=(2, 127)):
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8).reshape(shape)
    scale = np.array([[0.3]], np.float32)
    tensors = {WEIGHT: codes.view(ml_dtypes.float8_e4m3fn), SCALE_INV: scale}
    found = open_checkpoint(write("fp8", tensors, block=(128, 128)), "target").read(WEIGHT, shape, FLOATS)
    expected = (torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(scale)).numpy()
    assert found.tobytes() == expected.tobytes()  # also the sign of zero
    assert {0.0, 448 * np.float32(0.3), np.float32(2**-9) * np.float32(0.3)} <= set(map(float, np.abs(found).ravel()))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_among_fp8_numbers_is_refused(write, code):
    codes = FP8[WEIGHT].copy()
    codes.view(np.uint8)[10, 16] = code
    assert refusal(write("fp8", {**FP8, WEIGHT: codes})).endswith(f"{FILE}: {WEIGHT} holds NaN: the file is damaged")


@pytest.mark.parametrize("form", STORED)
def test_any_slice_is_the_slice_of_the_whole(write, form):
    tensors = open_checkpoint(write(form, STORED[form]), "target")
    assert tensors.names() == {WEIGHT}
    whole = tensors.read(WEIGHT, MATRIX.shape, FLOATS)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole, meant(form))
    assert np.abs(whole - MATRIX).max() < 0.15
    dice = random.Random(3)
    for _ in range(200):
        part = tuple(tuple(sorted(dice.sample(range(size + 1), 2))) for size in MATRIX.shape)
        (top, bottom), (left, right) = part
        np.testing.assert_array_equal(
            tensors.read(WEIGHT, MATRIX.shape, FLOATS, part), whole[top:bottom, left:right], str(part)
        )


@pytest.mark.parametrize(("dtype", "flat"), [(np.float16, False), (ml_dtypes.bfloat16, True)])
def test_int8_scales_of_any_dtype_and_shape_are_read(write, dtype, flat):
    stored = store_int8(NAME, MATRIX, dtype, flat)
    found = open_checkpoint(write("int8", stored), "target").read(WEIGHT, MATRIX.shape, FLOATS)
    scales = stored[SCALE].astype(np.float32).reshape(-1, 1)
    np.testing.assert_array_equal(found, stored[WEIGHT].astype(np.float32) * scales)


@pytest.mark.parametrize("form", ["int8", "packed"])
def test_integers_and_scales_are_read_as_stored(write, form):
    values = np.arange(-128, 128).astype(np.int8).reshape(16, 16)
    stored = {WEIGHT: values, SCALE: np.linspace(1, 2, 16, dtype=np.float32)[:, None]}
    tensors = open_checkpoint(write(form, pack(NAME, stored) if form == "packed" else stored), "target")
    assert tensors.reads_integers(WEIGHT)
    np.testing.assert_array_equal(tensors.read_integers(WEIGHT, (16, 16), ((3, 9), (5, 12))), values[3:9, 5:12])
    np.testing.assert_array_equal(tensors.read_scales(WEIGHT, (16, 16), (3, 9)), stored[SCALE][3:9, 0])


def test_block_of_zeros_may_have_a_scale_of_zero(write):
    weight = MATRIX.copy()
    weight[:4, :6] = 0
    stored = store_fp8(NAME, np.where(weight == 0, 1, weight), BLOCK)
    stored[WEIGHT][:4, :6], stored[SCALE_INV][0, 0] = 0, 0
    assert not open_checkpoint(write("fp8", stored), "target").read(WEIGHT, MATRIX.shape, FLOATS)[:4, :6].any()


# -- hostile tensors


@pytest.mark.parametrize(("form", "name"), [("fp8", SCALE_INV), ("int8", SCALE), ("packed", SCALE)])
def test_scale_that_is_negative_or_not_finite_is_refused(write, form, name):
    for value in (-1.0, math.nan, -math.inf, 3e38):
        scales = STORED[form][name].copy()
        scales[1, 0] = value
        message = refusal(write(form, {**STORED[form], name: scales}))
        if math.isfinite(value):
            assert f"{FILE}: {name}[1, 0] is {value:g}, expected a finite scale of at least 0" in message
        else:
            assert f"{FILE}: {name} holds NaN or infinity" in message


@pytest.mark.parametrize(("form", "name", "row"), [("fp8", SCALE_INV, 4), ("int8", SCALE, 1), ("packed", SCALE, 1)])
def test_scale_of_zero_for_other_numbers_is_refused(write, form, name, row):
    scales = STORED[form][name].copy()
    scales[1, 0] = 0
    place = write(form, {**STORED[form], name: scales})
    values = PACKED if form == "packed" else WEIGHT
    assert f"{name} is 0 where {values}[{row}, 0] is not" in refusal(place)
    if form != "fp8":
        with pytest.raises(BadCheckpoint, match="is 0 where"):
            open_checkpoint(place, "target").read_scales(WEIGHT, MATRIX.shape, (0, 11))


UNFIT = [
    ("fp8", {SCALE_INV: None}, f"{WEIGHT} is F8_E4M3, but {SCALE_INV} is missing"),
    ("int8", {SCALE: None}, f"{WEIGHT} is I8, but {SCALE} is missing"),
    ("packed", {SCALE: None}, f"{PACKED} is there, but {SCALE} is missing"),
    ("packed", {SHAPE: None}, f"{PACKED} is there, but {SHAPE} is missing"),
    ("packed", {PACKED: None}, f"{SCALE} is there, but {PACKED} is missing"),
    ("fp8", {WEIGHT: None}, f"{SCALE_INV} is there, but {WEIGHT} is missing"),
    ("fp8", {WEIGHT: MATRIX}, f"{WEIGHT} is F32, but has {SCALE_INV}: expected F8_E4M3"),
    ("int8", {WEIGHT: MATRIX}, f"{WEIGHT} is F32, but has {SCALE}: expected I8"),
    ("fp8", {SCALE_INV: np.ones((3, 3), np.int8)}, f"{SCALE_INV} is I8, expected one of BF16, F16, F32"),
    ("fp8", {SCALE_INV: np.ones(3, np.float32)}, f"{SCALE_INV} is [3], but {WEIGHT} is [11, 17]: expected [3, 3]"),
    ("int8", {SCALE: np.ones(1, np.float32)}, f"{SCALE} is [1], but {WEIGHT} is [11, 17]: expected [11, 1] or [11]"),
    ("packed", {SHAPE: np.array([11, 21])}, f"{SHAPE} is [11, 21], but {PACKED} is [11, 5]"),
    ("packed", {SHAPE: np.array([12, 17])}, f"{SHAPE} is [12, 17], but {PACKED} is [11, 5]"),
    ("packed", {SHAPE: np.array([11, 17, 1])}, f"{SHAPE} is [3], but"),
    ("int8", {WEIGHT: np.zeros(11, np.int8)}, f"{WEIGHT} is [11], expected a matrix"),
]


def test_tensors_that_do_not_fit_are_refused(write):
    for form, changes, words in UNFIT:
        tensors = {name: tensor for name, tensor in {**STORED[form], **changes}.items() if tensor is not None}
        assert f"{FILE}: {words}" in refusal(write(form, tensors))


@pytest.mark.parametrize("form", STORED)
def test_checkpoint_of_another_shape_or_list_is_refused(write, form):
    """The list names the modules that are not quantized."""
    key, down = "modules_to_not_convert" if form == "fp8" else "ignore", f"{NAME[:-7]}down_proj"
    message = refusal(write(form, STORED[form]), shape=(11, 18))
    assert f"{WEIGHT} is [11, 17], but its config.json implies [11, 18]" in message
    message = refusal(write(form, {**STORED[form], "fc.weight": MATRIX, f"{down}.weight": MATRIX}))
    assert f"{down}.weight is F32, but by " in message
    assert f"quantization_config.{key} {down} is quantized: expected " in message
    assert refusal(write(form, STORED[form], [NAME])).endswith(f"says that {NAME} is not quantized")
    entries = ["h.0.mlp"] if form == "fp8" else ["re:.*transformer.*", "Linear"]
    assert "names no module of this checkpoint" in refusal(write(form, STORED[form], entries))


@pytest.mark.parametrize("form", STORED)
def test_head_and_router_may_be_either(write, form):
    assert open_checkpoint(write(form, STORED[form], ["lm_head"]), "target").names() == {WEIGHT}  # there is no head
    plain = {"lm_head.weight": MATRIX, f"{NAME[:-7]}gate.weight": MATRIX}
    tensors = open_checkpoint(write(form, {**STORED[form], **plain}, ["lm_head"]), "target")
    assert tensors.names() == {WEIGHT, *plain}
    for name in plain:
        np.testing.assert_array_equal(tensors.read(name, MATRIX.shape, FLOATS), MATRIX)


# -- whole pairs


@pytest.mark.parametrize(
    ("kind", "layers", "form", "stacked"),
    [("dense", 3 * 7, "packed", False), ("hybrid", 7 + 2 * (5 + 3), "int8", True)],  # 3 sections of a tensor
)
def test_int8_arguments_are_the_stored_integers_and_scales(make_up, tmp_path, form, stacked, kind, layers):
    pair = make_up(kind)
    made = quantize_checkpoint(pair.places["target"], tmp_path / "target", "int8", [])
    stored = made.stored
    if form == "packed":
        made = quantize_checkpoint(pair.places["target"], tmp_path / "packed", form, [])
    places = {"target": made.directory, "draft": pair.places["draft"]}
    recipes = pair.programs(stacked=stacked, formats=WeightFormats("int8", "int8")).recipes()
    arguments = load_weights(recipes, places, [CPU])
    compared = 0
    for recipe in recipes:
        half = {"int8_values": "weight", "int8_scales": "weight_scale"}.get(recipe.encoding)
        for placement in recipe.placements if half else ():
            name = f"{placement.tensor.removesuffix('weight')}{half}"
            if recipe.checkpoint == "target" and f"{placement.tensor}_scale" in stored:
                place = tuple(slice(at, at + size) for at, size in zip(placement.offset, placement.extent, strict=True))
                found = np.asarray(arguments[recipe.name])[place]
                rows = slice(*placement.rows) if placement.rows else slice(None)
                expected = (stored[name] if half == "weight" else stored[name].astype(np.float32))[rows]
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found.ravel(), expected.ravel())
                compared += 1
    assert compared == 2 * layers


def test_experts_in_mxfp4_are_read_exactly(golden_directory, tmp_path):
    place, experts = golden_directory / "gptoss-tiny" / "target_mxfp4", "model.layers.1.mlp.experts"
    tensors, stored = open_checkpoint(place, "target", interleaved=True), load_file(place / FILE)
    for fused, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        packed = (torch.tensor(stored[f"{experts}.{fused}_{kind}"]) for kind in ("blocks", "scales"))
        expected = convert_moe_packed_tensors(*packed, dtype=torch.float32).mT.numpy()
        for at, name in enumerate(names):
            matrix = expected[5, at :: len(names)]
            found = tensors.read(f"{experts}.5.{name}.weight", matrix.shape, FLOATS, ((3, 64), (5, 38)))
            np.testing.assert_array_equal(found, matrix[3:64, 5:38])
    stored[f"{experts}.down_proj_scales"][5, 3, 1] = 255
    save_file(stored, tmp_path / FILE)
    shutil.copy(place / CONFIG_FILE, tmp_path)
    name = f"{experts}.5.down_proj.weight"
    words = f"{tmp_path / FILE}: {name}_scales[3, 1] is nan, expected a finite scale of at least 0"
    assert refusal(tmp_path, name, (64, 64), interleaved=True).startswith(words)
    found = {f"{experts}.down_proj_scales": stored[f"{experts}.down_proj_scales"][:7]}
    save_file(stored | found, tmp_path / FILE)
    words = f"{experts}.down_proj_scales is [7, 64, 2], but {experts}.down_proj_blocks is [8, 64, 2, 16]: "
    assert f"{words}expected [8, 64, 2]. Download or convert" in refusal(tmp_path, interleaved=True)
    fused, scales = np.zeros((8, 64, 64), ml_dtypes.float8_e4m3fn), np.ones((8, 4, 3), np.float32)
    save_file({f"{experts}.down_proj": fused, f"{experts}.down_proj_scale_inv": scales}, tmp_path / FILE)
    set_section(tmp_path, make_section("fp8", [], (16, 24)))
    words = f"{experts}.down_proj is F8_E4M3: experts in one tensor are supported in MXFP4 in gpt-oss's layout and as "
    assert words in refusal(tmp_path, interleaved=True)


def fuse_experts(stored):
    """All experts of a layer in one tensor, as transformers stores them."""
    stored = dict(stored)
    places = {name.partition(".0.up_proj")[0] for name in stored if re.match(r"model.*\.experts\.0\.up_proj", name)}
    for place in places:
        for fused, names in FUSED_EXPERTS.items():
            for kind in ("", FUSED_SCALES):
                parts = [stored.pop(f"{place}.{expert}.{name}.weight{kind}") for expert in range(12) for name in names]
                stored[f"{place}.{fused}{kind}"] = np.stack(parts).reshape(12, -1, parts[0].shape[1])
    return stored


@pytest.mark.parametrize(("weights", "fused"), [("plain", False), ("int8", False), ("int8", True)])
def test_fp8_of_a_hybrid_with_experts_is_read_as_dequantized(tmp_path, weights, fused):
    """In the published layout: the config lists neither the vision tower nor the mtp layers."""
    pair = MadeUp({"target": GOLDEN / "qwen35moe-tiny/target_experts", "draft": GOLDEN / "qwen35moe-tiny/draft"})
    names = (name.removesuffix(".weight") for name in load_file(pair.places["target"] / FILE))
    plain = [name for name in names if re.search(r"in_proj_[ab]|visual|^mtp", name)]
    block = (8, 24)  # 24 rows of an expert's gate
    made = quantize_checkpoint(pair.places["target"], tmp_path / "target", "fp8", plain, block)
    assert sum("_scale_inv" in name for name in made.stored) == 4 * 3 + 4 + 5 * 3 * (12 + 1)
    recipes = [one for one in pair.programs(formats=WeightFormats(weights)).recipes() if one.checkpoint == "target"]
    without_scales = {"model.visual.extra.weight": np.ones((3, 5), np.int8)}
    stored = fuse_experts(made.stored) if fused else made.stored
    save_file({**stored, **without_scales}, made.directory / FILE)
    listed = [name for name in plain if "in_proj" in name]
    set_section(made.directory, make_section("fp8", listed, block))
    save_file(made.meant, tmp_path / FILE)
    expected = load_weights(recipes, {"target": tmp_path}, [CPU])
    for name, array in load_weights(recipes, {"target": made.directory}, [CPU]).items():
        np.testing.assert_array_equal(array, expected[name], name)
    if fused:
        experts = next(name.removesuffix("down_proj") for name in stored if name.endswith("experts.down_proj"))
        scales = stored[f"{experts}down_proj_scale_inv"]
        for other in (np.ones(12, np.float32), scales[:11], np.concatenate([scales, scales])):
            save_file(stored | {f"{experts}down_proj_scale_inv": other}, made.directory / FILE)
            words = f"{experts}down_proj_scale_inv is {list(other.shape)}, but {experts}down_proj is [12, 48, 24]: "
            assert f"{words}expected [12, 6, 1]. Download or convert" in refusal(made.directory)
        save_file({name: one for name, one in stored.items() if "gate_up" in name}, made.directory / FILE)
        set_section(made.directory, make_section("fp8", [], (16, 24)))
        assert "experts.gate_up_proj has blocks of 16 rows, and the gate of an expert has 24 rows" in refusal(
            made.directory
        )
