"""The loader against a slow, obvious reader of the file format, and checkpoints that it refuses."""

import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path

import jax
import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.weight_recipe import MaskedMap, Placement, WeightRecipe
from dflash_aot.cache.errors import BadCheckpoint, DflashError
from dflash_aot.runtime.weights.weight_loader import load_weights

CPU = jax.devices("cpu")[0]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_slowly(path: Path) -> dict[str, np.ndarray]:
    """A safetensors file by its specification: a length, a JSON header, bytes. float32 only."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    header.pop("__metadata__", None)
    tensors = {}
    for name, facts in header.items():
        assert facts["dtype"] == "F32"
        start, end = facts["data_offsets"]
        tensors[name] = np.frombuffer(data[start:end], "<f4").reshape(facts["shape"])
    return tensors


def test_every_tensor_of_a_pair_arrives_where_its_recipe_says_and_every_argument_is_filled(golden, bundle):
    manifest = read_manifest(bundle(golden.key))
    places = {"target": golden.target, "draft": golden.draft}
    stored = {
        role: {
            name: tensor for file in sorted(place.glob("*.safetensors")) for name, tensor in read_slowly(file).items()
        }
        for role, place in places.items()
    }
    arguments = load_weights(manifest.weights, places, [CPU])
    assert list(arguments) == [recipe.name for recipe in manifest.weights]
    for recipe in manifest.weights:
        argument = np.asarray(arguments[recipe.name])
        assert (argument.shape, str(argument.dtype)) == (recipe.shape, recipe.dtype)
        assert arguments[recipe.name].devices() == {CPU}
        filled = 0
        for placement in recipe.placements:
            box = argument
            for axis, (start, extent) in enumerate(zip(placement.offset, placement.extent, strict=True)):
                box = np.take(box, range(start, start + extent), axis)
            tensor = stored[recipe.checkpoint].pop(placement.tensor)
            assert box.tobytes() == tensor.tobytes()
            filled += tensor.size
        assert filled == argument.size
    left = {name for tensors in stored.values() for name in tensors}
    assert left <= {"lm_head.weight"}  # which a tied checkpoint may carry beside the embedding, see the swa set


def recipe(name: str, *tensors: str, shape=(2, 3), dtype="float32", checkpoint="target") -> WeightRecipe:
    """Tensors of one shape stacked, or one tensor as it is."""
    if len(tensors) < 2:
        tensors = tensors or (name,)
        placements = (Placement(tensors[0], shape, (0,) * len(shape), shape),)
        return WeightRecipe(f"{checkpoint}.{name}", checkpoint, shape, dtype, placements)
    placements = tuple(
        Placement(tensor, shape, (index, *(0,) * len(shape)), (1, *shape)) for index, tensor in enumerate(tensors)
    )
    return WeightRecipe(f"{checkpoint}.{name}", checkpoint, (len(tensors), *shape), dtype, placements)


A = np.arange(6, dtype=np.float32).reshape(2, 3)
PLAN = (recipe("ab", "a", "b"), recipe("c", shape=(4,)))
SOUND = {"a": A, "b": A + 10, "c": np.ones(4, np.float32)}


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path


def load(place: Path, plan=PLAN, role="target") -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in load_weights(plan, {role: place}, [CPU]).items()}


def refusal(place: Path, plan=PLAN, role="target") -> str:
    with pytest.raises(BadCheckpoint) as error:
        load(place, plan, role)
    return str(error.value)


def test_tensors_are_stacked_in_the_order_of_the_recipe(place):
    save_file(SOUND, place / SINGLE)
    assert load(place)["target.ab"].tolist() == [A.tolist(), (A + 10).tolist()]


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_any_float_type_is_converted_to_the_served_one(place, stored, served):
    values = np.array([1 / 3, -2.5, 1e-3, 60000], np.float32)
    save_file({"c": values.astype(stored)}, place / SINGLE)
    found = load(place, [recipe("c", shape=(4,), dtype=served)])["target.c"]
    assert str(found.dtype) == served
    np.testing.assert_array_equal(found, values.astype(stored).astype(served))


@pytest.mark.parametrize("name", SOUND)
def test_a_missing_tensor_is_named(place, name):
    save_file({other: tensor for other, tensor in SOUND.items() if other != name}, place / SINGLE)
    assert f"missing: {name}" in refusal(place)


def test_a_tensor_left_over_is_named(place):
    save_file({**SOUND, "bias": A}, place / SINGLE)
    assert "bias" in refusal(place) and "no place for" in refusal(place)


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1), (2, 4), (0, 3)])
def test_a_misshapen_tensor_is_refused_with_both_shapes(place, shape):
    save_file({**SOUND, "b": np.zeros(shape, np.float32)}, place / SINGLE)
    assert f"b is {list(shape)}" in refusal(place) and "[2, 3]" in refusal(place)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_single_value_that_is_not_finite_is_found(place, value, stored):
    poisoned = (A + 10).astype(stored)
    poisoned[1, 2] = value
    save_file({**SOUND, "b": poisoned}, place / SINGLE)
    assert "b holds NaN or infinity" in refusal(place)


def test_infinities_that_cancel_are_found(place):
    poisoned = A.copy()
    poisoned[0, 0], poisoned[1, 1] = math.inf, -math.inf
    save_file({**SOUND, "a": poisoned}, place / SINGLE)
    assert "a holds NaN or infinity" in refusal(place)


def test_finite_values_whose_sum_overflows_are_sound(place):
    huge = np.full((2, 3), 3e38, np.float32)
    save_file({**SOUND, "a": huge}, place / SINGLE)
    np.testing.assert_array_equal(load(place)["target.ab"][0], huge)


@pytest.mark.parametrize("kind", [np.int32, np.int8, np.uint8, np.bool_, np.float64])
def test_a_tensor_of_another_type_is_refused(place, kind):
    save_file({**SOUND, "b": np.ones((2, 3), kind)}, place / SINGLE)
    assert "expected one of BF16, F16, F32" in refusal(place)


def test_a_file_cut_anywhere_is_refused(place):
    save_file(SOUND, place / SINGLE)
    whole = (place / SINGLE).read_bytes()
    for size in (0, 4, 8, 20, len(whole) - 30, len(whole) - 1):
        (place / SINGLE).write_bytes(whole[:size])
        assert "not a whole safetensors file" in refusal(place)


def test_a_file_of_something_else_is_refused(place):
    (place / SINGLE).write_bytes(b"\x80\x04K\x01." * 50)
    assert "not a whole safetensors file" in refusal(place)


def test_a_directory_without_weights_is_refused(place):
    assert "holds no weights" in refusal(place)


def test_a_directory_in_the_place_of_the_file_is_refused(place):
    (place / SINGLE).mkdir()
    assert SINGLE in refusal(place)


def write_shards(place: Path, where: dict[str, str], tensors=SOUND) -> None:
    (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for file in set(where.values()):
        save_file({name: tensors[name] for name, at in where.items() if at == file}, place / file)


PLACES = {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}


def test_shards_are_read_as_the_index_says(place):
    write_shards(place, PLACES)
    save_file({"a": A}, place / SINGLE)  # left behind by an earlier version: the index counts
    assert load(place)["target.ab"].tolist() == [A.tolist(), (A + 10).tolist()]


def test_a_missing_shard_is_named(place):
    write_shards(place, PLACES)
    (place / "two.safetensors").unlink()
    assert "two.safetensors does not exist" in refusal(place)


def test_a_truncated_shard_is_named(place):
    write_shards(place, PLACES)
    whole = (place / "two.safetensors").read_bytes()
    (place / "two.safetensors").write_bytes(whole[:-1])
    assert "two.safetensors is not a whole safetensors file" in refusal(place)


def test_a_tensor_that_is_not_in_its_shard_is_named(place):
    write_shards(place, PLACES)
    save_file({"a": A}, place / "one.safetensors")
    assert "one.safetensors lacks c" in refusal(place)


def test_a_tensor_in_two_shards_is_refused(place):
    """The index names the first; which of the two is meant cannot be known."""
    write_shards(place, PLACES)
    save_file({"b": A + 10, "a": A + 99}, place / "two.safetensors")
    assert "a" in refusal(place) and "two.safetensors" in refusal(place)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/tmp/outside.safetensors", "sub/one.safetensors", "", ".."]
)
def test_an_index_that_points_outside_is_refused(place, file):
    inside = place / "inside"
    inside.mkdir()
    save_file({"b": A}, place / "outside.safetensors")
    write_shards(inside, {name: at for name, at in PLACES.items() if name != "b"})
    (inside / INDEX).write_text(json.dumps({"weight_map": {**PLACES, "b": file}}))
    refusal(inside)


@pytest.mark.parametrize("file", ["a\0b", "\ud800", "a" * 5000])
def test_an_index_that_names_what_no_file_can_be_called_is_refused(place, file):
    (place / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    refusal(place)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\ud800", "[" * 100_000]
)
def test_an_index_that_is_none_is_refused(place, text):
    (place / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert INDEX in refusal(place)


def test_a_tied_target_may_carry_its_head(place):
    save_file({**SOUND, "lm_head.weight": A}, place / SINGLE)
    assert set(load(place)) == {"target.ab", "target.c"}


def test_a_draft_with_a_head_of_its_own_is_refused(place):
    """It was trained with that head: served with the target's, nearly nothing would be accepted."""
    plan = [recipe("a", checkpoint="draft")]
    save_file({"a": A, "lm_head.weight": A}, place / SINGLE)
    assert "lm_head.weight" in refusal(place, plan, "draft")


def test_the_checkpoint_that_is_wrong_is_named(place):
    for role in ("target", "draft"):
        (place / role).mkdir()
        save_file({"a": A}, place / role / SINGLE)
    plan = [recipe("a"), recipe("a", checkpoint="draft"), recipe("b", checkpoint="draft")]
    with pytest.raises(BadCheckpoint, match="/draft: .*missing: b"):
        load_weights(plan, {role: place / role for role in ("target", "draft")}, [CPU])


def test_what_is_loaded_does_not_change_with_the_file(place):
    save_file(SOUND, place / SINGLE)
    arguments = load_weights(PLAN, {"target": place}, [CPU])
    shutil.copyfile("/dev/null", place / SINGLE)
    assert np.asarray(arguments["target.ab"]).tolist() == [A.tolist(), (A + 10).tolist()]


def test_what_a_draft_kept_of_its_verifier_is_not_looked_at(place):
    spare = {"verifier_lm_head.weight": np.full(3, math.nan, np.float32), "verifier_norm.weight": A}
    save_file({**SOUND, **spare}, place / SINGLE)
    plan = [recipe("ab", "a", "b", checkpoint="draft"), recipe("c", shape=(4,), checkpoint="draft")]
    assert set(load(place, plan, "draft")) == {"draft.ab", "draft.c"}
    assert "2 tensors that this architecture has no place for: verifier_" in refusal(place)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_fused_projections_are_refused_by_name(place, role):
    save_file({"a": A, "layers.0.self_attn.qkv_proj.weight": A}, place / SINGLE)
    plan = [recipe("a", checkpoint=role), recipe("layers.0.self_attn.q_proj.weight", checkpoint=role)]
    assert "layers.0.self_attn.qkv_proj.weight: fused q, k and v projections" in refusal(place, plan, role)


@pytest.fixture
def places(tmp_path) -> dict[str, Path]:
    """A directory for each of a pair."""
    found = {role: tmp_path / role for role in ("target", "draft")}
    for directory in found.values():
        directory.mkdir()
    return found


def borrowing(shape=(2, 3)) -> list[WeightRecipe]:
    """A draft's embedding, which is the target's where it has none."""
    own = recipe("embed", shape=shape, checkpoint="draft")
    return [
        recipe("embed"),
        msgspec.structs.replace(own, otherwise="target.embed"),
        recipe("fc", shape=(4,), checkpoint="draft"),
    ]


def test_an_embedding_that_is_left_out_is_the_targets_and_on_the_device_once(places):
    save_file({"embed": A}, places["target"] / SINGLE)
    save_file({"fc": SOUND["c"]}, places["draft"] / SINGLE)
    arguments = load_weights(borrowing(), places, [CPU])
    assert arguments["draft.embed"] is arguments["target.embed"]
    np.testing.assert_array_equal(arguments["draft.embed"], A)


def test_an_embedding_of_the_drafts_own_comes_first(places):
    save_file({"embed": A}, places["target"] / SINGLE)
    save_file({"embed": A + 10, "fc": SOUND["c"]}, places["draft"] / SINGLE)
    arguments = load_weights(borrowing(), places, [CPU])
    np.testing.assert_array_equal(arguments["draft.embed"], A + 10)
    np.testing.assert_array_equal(arguments["target.embed"], A)


def test_a_targets_embedding_that_does_not_fit_is_refused(places):
    save_file({"embed": A}, places["target"] / SINGLE)
    save_file({"fc": SOUND["c"]}, places["draft"] / SINGLE)
    with pytest.raises(
        BadCheckpoint, match=r"/draft: embed is missing, and the target's embed is \[2, 3\], not \[2, 4\]"
    ):
        load_weights(borrowing((2, 4)), places, [CPU])


def test_what_nothing_can_stand_in_for_is_still_missing(places):
    save_file({"embed": A}, places["target"] / SINGLE)
    save_file({"embed": A}, places["draft"] / SINGLE)
    with pytest.raises(BadCheckpoint, match="/draft: 1 tensors are missing: fc"):
        load_weights(borrowing(), places, [CPU])


MET = [1, 4, 6]  # of a vocabulary of 8
MASK = np.isin(np.arange(8), MET)
OFFSETS = np.array([1, 3, 4])
MAPPING = WeightRecipe(
    "draft.d2t", "draft", (3,), "int32", (Placement("d2t", (3,), (0,), (3,)),), mapped=MaskedMap("t2d", 8)
)


def write_map(place: Path, offsets, mask=MASK) -> None:
    save_file({"d2t": np.array(offsets), "t2d": np.array(mask)}, place / SINGLE)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_a_map_into_the_targets_vocabulary_arrives_as_offsets(place, kind):
    write_map(place, OFFSETS.astype(kind))
    found = load(place, [MAPPING], "draft")["draft.d2t"]
    assert found.dtype == np.int32
    assert (np.arange(3) + found).tolist() == MET


@pytest.mark.parametrize(("tokens", "words"), [([1, 4, 6], "outside the vocabulary"), ([1, 2, 3], "disagree on")])
def test_a_map_of_tokens_where_offsets_are_meant_is_called_that(place, tokens, words):
    write_map(place, tokens, np.isin(np.arange(8), tokens))
    assert words in (found := refusal(place, [MAPPING], "draft"))
    assert "it holds tokens, expected is each one's distance from its row" in found


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([-1, 3, 4], "leads 1 of 3 rows outside the vocabulary of 8"),
        ([1, 3, 6], "leads 1 of 3 rows outside"),
        ([1, 2**62, -(2**63)], "leads 2 of 3 rows outside"),
        ([1, 2**63 - 1, 2**63 - 1], "leads 2 of 3 rows outside"),
        ([1, 0, 4], "leads 3 rows to only 2 different tokens"),
        ([1, 3, 5], "and t2d disagree on 2 tokens"),
    ],
)
def test_a_map_that_leads_elsewhere_is_refused(place, offsets, words):
    write_map(place, offsets)
    found = refusal(place, [MAPPING], "draft")
    assert words in found and "it holds tokens" not in found


@pytest.mark.parametrize("flipped", range(8))
def test_a_mask_that_disagrees_in_one_token_is_refused(place, flipped):
    write_map(place, OFFSETS, MASK ^ (np.arange(8) == flipped))
    assert "d2t and t2d disagree on 1 tokens" in refusal(place, [MAPPING], "draft")


@pytest.mark.parametrize("kind", [np.float32, np.uint32, np.int16, np.bool_])
def test_a_map_of_another_type_is_refused(place, kind):
    write_map(place, OFFSETS.astype(kind))
    assert "expected one of I32, I64" in refusal(place, [MAPPING], "draft")


def test_a_mask_of_another_type_is_refused(place):
    write_map(place, OFFSETS, MASK.astype(np.uint8))
    assert "t2d is U8, expected one of BOOL" in refusal(place, [MAPPING], "draft")


def test_a_map_or_mask_of_another_size_is_refused(place):
    write_map(place, [1, 3])
    assert "d2t is [2], its config.json makes it [3]" in refusal(place, [MAPPING], "draft")
    write_map(place, OFFSETS, MASK[:7])
    assert "t2d is [7], its config.json makes it [8]" in refusal(place, [MAPPING], "draft")


@pytest.mark.parametrize(("kept", "lost"), [("d2t", "t2d"), ("t2d", "d2t")])
def test_a_map_without_its_mask_or_a_mask_alone_is_refused(place, kept, lost):
    save_file({kept: {"d2t": OFFSETS, "t2d": MASK}[kept]}, place / SINGLE)
    assert f"missing: {lost}" in refusal(place, [MAPPING], "draft")


def test_a_map_of_a_draft_with_a_full_vocabulary_has_no_place(place):
    save_file({"a": A, "d2t": OFFSETS, "t2d": MASK}, place / SINGLE)
    assert "no place for: d2t, t2d" in refusal(place, [recipe("a", checkpoint="draft")], "draft")


NUMBERS = (0, 1, 2, -1, 3, 5, 7, 8, 24, 1 << 31, (1 << 63) - 1, 1 << 64, 1.5, "3", None, [], {}, True)
DTYPES = ("F32", "F16", "BF16", "F64", "I64", "BOOL", "U8", "F8_E4M3", "F4", "C64", "f32", "", None, 3)
NAMES = ("a", "b", "c", "__metadata__", "verifier_x", "", "\0", "ä" * 99, "lm_head.weight")


def mutate_header(rng: random.Random, header: dict) -> bytes:
    """One fact of one tensor, another name for it, or its loss."""
    name = rng.choice(list(header))
    facts = header[name]
    match rng.randrange(6):
        case 0:
            facts["dtype"] = rng.choice(DTYPES)
        case 1:
            shape = facts["shape"]
            shape.insert(rng.randrange(len(shape) + 1), rng.choice(NUMBERS))
        case 2:
            facts["shape"] = rng.choice([[6], [3, 2], [2, 3], [], None, 6, [0], [1 << 32, 1 << 32, 0]])
        case 3:
            facts["data_offsets"][rng.randrange(2)] = rng.choice(NUMBERS)
        case 4:
            header[rng.choice(NAMES)] = header.pop(name)
        case 5:
            header[name] = rng.choice(NUMBERS)
    return json.dumps(header, ensure_ascii=rng.random() < 0.5).encode()


def mutate(rng: random.Random, whole: bytes) -> bytes:
    """Bits, lengths, cuts, or what the header says."""
    size = int.from_bytes(whole[:8], "little")
    content, header = bytearray(whole), whole[8 : 8 + size]
    match rng.randrange(4):
        case 0:
            for _ in range(rng.randrange(1, 4)):
                content[rng.randrange(8 + size)] = rng.randrange(256)
        case 1:
            length = rng.choice([size + rng.randrange(-9, 9), rng.getrandbits(rng.randrange(1, 64))])
            content[:8] = length.to_bytes(8, "little")
        case 2:
            at, gone = rng.randrange(len(content)), rng.randrange(5)
            content[at : at + gone] = rng.randbytes(rng.randrange(5))
        case 3:
            text = mutate_header(rng, json.loads(header))
            content[: 8 + size] = len(text).to_bytes(8, "little") + text
    return bytes(content)


def outcome(place: Path) -> str:
    """What loading comes to; any other error than our own goes through."""
    try:
        found = load(place)
    except DflashError as error:
        return type(error).__name__
    assert {name: array.shape for name, array in found.items()} == {"target.ab": (2, 2, 3), "target.c": (4,)}
    assert all(np.isfinite(array).all() for array in found.values())
    return "loaded"


def test_a_mutated_file_is_loaded_or_refused_and_nothing_else(place):
    save_file(SOUND, place / SINGLE)
    whole, rng = (place / SINGLE).read_bytes(), random.Random(17)
    outcomes: Counter[str] = Counter()
    for _ in range(2500):
        (place / SINGLE).unlink()  # a new file: the one before may still be mapped
        (place / SINGLE).write_bytes(mutate(rng, whole))
        outcomes[outcome(place)] += 1
    assert outcomes.keys() == {"loaded", "BadCheckpoint"}
    assert min(outcomes.values()) > 50
