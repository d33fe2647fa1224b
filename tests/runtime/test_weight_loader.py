"""Weight loading: against a reference reader of the safetensors format, and invalid checkpoints."""

import json
import math
import os
from pathlib import Path

import jax
import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.weight_recipe import MaskedMap, Placement, WeightRecipe
from dflash_aot.runtime.weights.safetensors_reader import FLOATS, CheckpointTensors, to_numpy_slices
from dflash_aot.runtime.weights.weight_loader import fingerprint_weights, load_weights

CPU = jax.devices("cpu")[0]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def recipe(name: str, *tensors: str, shape=(2, 3), dtype="float32", checkpoint="target") -> WeightRecipe:
    """A recipe that stacks tensors of one shape, or takes one tensor."""
    if len(tensors) < 2:
        tensors = tensors or (name,)
        placements = (Placement(tensors[0], shape, (0,) * len(shape), shape),)
        return WeightRecipe(f"{checkpoint}.{name}", checkpoint, shape, dtype, placements)
    placements = tuple(
        Placement(tensor, shape, (index, *(0,) * len(shape)), (1, *shape)) for index, tensor in enumerate(tensors)
    )
    return WeightRecipe(f"{checkpoint}.{name}", checkpoint, (len(tensors), *shape), dtype, placements)


A = np.arange(6, dtype=np.float32).reshape(2, 3)
RECIPES = (recipe("ab", "a", "b"), recipe("c", shape=(4,)))
VALID = {"a": A, "b": A + 10, "c": np.ones(4, np.float32)}


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path


def load(place: Path, recipes=RECIPES, role="target") -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in load_weights(recipes, {role: place}, [CPU]).items()}


def refusal(place: Path, recipes=RECIPES, role="target") -> str:
    with pytest.raises(BadCheckpoint) as error:
        load(place, recipes, role)
    return str(error.value)


def test_bare_parameter_may_be_stored_as_a_modules_weight(place):
    """As some checkpoints spell the codebooks of DFlash2."""
    save_file({"a": VALID["a"], "b.weight": VALID["b"], "c.weight": VALID["c"]}, place / SINGLE)
    assert load(place)["target.ab"].tolist() == [A.tolist(), (A + 10).tolist()]


@pytest.mark.parametrize(
    ("stored", "served"), [(np.float16, "bfloat16"), (ml_dtypes.bfloat16, "float32"), (np.float32, "bfloat16")]
)
def test_stored_float_dtype_is_converted_to_the_served_dtype(place, stored, served):
    values = np.array([1 / 3, -2.5, 1e-3, 60000], np.float32)
    save_file({"c": values.astype(stored)}, place / SINGLE)
    found = load(place, [recipe("c", shape=(4,), dtype=served)])["target.c"]
    assert str(found.dtype) == served
    np.testing.assert_array_equal(found, values.astype(stored).astype(served))


def with_value(value: float, stored=np.float32) -> np.ndarray:
    values = (A + 10).astype(stored)
    values[1, 2] = value
    return values


UNFIT = [
    ({"b": None}, "missing: b"),
    ({"bias": A}, "no place for: bias"),
    ({"c.weight": VALID["c"]}, "no place for: c.weight"),  # c is stored in both spellings
    *(({"b": np.zeros(shape, np.float32)}, f"b is {list(shape)}") for shape in ((3, 2), (6,), (2, 3, 1), (0, 3))),
    *(({"b": np.ones((2, 3), kind)}, "expected one of BF16, F16, F32") for kind in (np.int32, np.float64)),
    ({"b": with_value(math.nan)}, "b holds NaN or infinity"),
    ({"b": with_value(math.inf, np.float16)}, "b holds NaN or infinity"),
    ({"b": with_value(-math.inf, ml_dtypes.bfloat16)}, "b holds NaN or infinity"),
    ({"b": np.array([[math.inf, 0, 0], [0, -math.inf, 0]], np.float32)}, "b holds NaN or infinity"),
]


@pytest.mark.parametrize(("changes", "words"), UNFIT)
def test_tensors_that_do_not_fit_are_refused(place, changes, words):
    save_file({name: tensor for name, tensor in {**VALID, **changes}.items() if tensor is not None}, place / SINGLE)
    assert words in refusal(place)


def test_finite_values_whose_sum_overflows_are_loaded(place):
    huge = np.full((2, 3), 3e38, np.float32)
    save_file({**VALID, "a": huge}, place / SINGLE)
    np.testing.assert_array_equal(load(place)["target.ab"][0], huge)


def test_truncated_or_missing_file_raises(place):
    assert "holds no weights" in refusal(place)
    save_file(VALID, place / SINGLE)
    whole = (place / SINGLE).read_bytes()
    for size in (0, 4, 8, 20, len(whole) - 30, len(whole) - 1):
        (place / SINGLE).write_bytes(whole[:size])
        assert "not a complete safetensors file" in refusal(place)


def write_shards(place: Path, where: dict[str, str], tensors=VALID) -> None:
    (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for file in set(where.values()):
        save_file({name: tensors[name] for name, at in where.items() if at == file}, place / file)


PLACES = {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}


def test_index_decides_where_tensors_are_read(place):
    write_shards(place, PLACES)
    save_file({"a": A}, place / SINGLE)  # left over from an earlier version: the index decides
    assert load(place)["target.ab"].tolist() == [A.tolist(), (A + 10).tolist()]


def test_shards_that_do_not_fit_the_index_are_named(place):
    write_shards(place, PLACES)
    save_file({"b": A + 10, "a": A + 99}, place / "two.safetensors")  # a is in both
    assert "a" in refusal(place) and "two.safetensors" in refusal(place)
    save_file({"a": A}, place / "one.safetensors")
    save_file({"b": A}, place / "two.safetensors")
    assert "one.safetensors lacks c" in refusal(place)
    write_shards(place, PLACES)
    (place / "two.safetensors").unlink()
    assert "two.safetensors does not exist" in refusal(place)


def test_index_that_points_outside_the_directory_raises(place):
    inside = place / "inside"
    inside.mkdir()
    save_file({"b": A}, place / "outside.safetensors")
    write_shards(inside, {name: at for name, at in PLACES.items() if name != "b"})
    for file in ("../outside.safetensors", f"{place}/outside.safetensors", "sub/one.safetensors", "", ".."):
        (inside / INDEX).write_text(json.dumps({"weight_map": {**PLACES, "b": file}}))
        refusal(inside)


def test_invalid_index_raises(place):
    for file in ("a\0b", "\ud800", "a" * 5000):
        (place / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
        refusal(place)
    for text in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\ud800", "[" * 100_000):
        (place / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
        assert INDEX in refusal(place)


def test_head_is_ignored_of_a_tied_target_only(place, caplog):
    """A draft was trained with its head: with the target's, nearly nothing would be accepted."""
    embedding = recipe("model.embed_tokens.weight")
    for head, warnings in [(A, 0), (-A, 1), (A.astype(np.float16), 1)]:
        save_file({**VALID, "model.embed_tokens.weight": A, "lm_head.weight": head}, place / SINGLE)
        caplog.clear()
        assert set(load(place, (*RECIPES, embedding))) == {"target.ab", "target.c", embedding.name}
        assert caplog.text.count("lm_head.weight differs from model.embed_tokens.weight and is not used") == warnings
    recipes = [recipe("ab", "a", "b", checkpoint="draft"), recipe("c", shape=(4,), checkpoint="draft")]
    assert "lm_head.weight" in refusal(place, recipes, "draft")


def test_invalid_checkpoint_of_the_pair_is_named(place):
    for role in ("target", "draft"):
        (place / role).mkdir()
        save_file({"a": A}, place / role / SINGLE)
    recipes = [recipe("a"), recipe("a", checkpoint="draft"), recipe("b", checkpoint="draft")]
    with pytest.raises(BadCheckpoint, match="/draft: .*missing: b"):
        load_weights(recipes, {role: place / role for role in ("target", "draft")}, [CPU])


def test_file_that_changes_while_it_is_read_is_named(place):
    save_file({**VALID, "c": np.ones((300, 40, 8), np.float32)}, place / SINGLE)
    tensors = CheckpointTensors(place)
    whole, size = tensors.read("c", (300, 40, 8), FLOATS), (place / SINGLE).stat().st_size
    for part in [
        ((2, 3), (0, 40), (3, 5)),
        ((0, 300), (7, 8), (0, 8)),
        ((9, 10), (8, 9), (1, 2)),
        ((4, 6), (1, 3), (2, 3)),
    ]:
        assert np.array_equal(tensors.read("c", (300, 40, 8), FLOATS, part), whole[to_numpy_slices(part)])
    tensors.check_unchanged()
    os.truncate(place / SINGLE, size - 5)  # a mapped page behind the end would end this process
    with pytest.raises(BadCheckpoint, match=f"{SINGLE} became shorter while it was read. Is a copy"):
        tensors.read("c", (300, 40, 8), FLOATS)
    with pytest.raises(BadCheckpoint, match=f"{SINGLE} changed while it was read"):
        tensors.check_unchanged()


def test_fingerprint_tells_weights_apart_and_not_how_they_are_stored(place):
    large = np.random.default_rng(1).standard_normal((300, 400), np.float32)
    tensors = {**VALID, "large": large, "ids": np.arange(4, dtype=np.int16)}

    def fingerprint(folder: str, *shards: dict[str, np.ndarray]) -> str:
        (place / folder).mkdir()
        if len(shards) > 1:
            files = {name: f"{at}.safetensors" for at, shard in enumerate(shards) for name in shard}
            (place / folder / INDEX).write_text(json.dumps({"weight_map": files}))
        for at, shard in enumerate(shards):
            save_file(shard, place / folder / (SINGLE if len(shards) == 1 else f"{at}.safetensors"))
        return fingerprint_weights({"target": place / folder})

    known = fingerprint("whole", tensors)
    names = sorted(tensors, reverse=True)
    assert fingerprint("shards", *({name: tensors[name]} for name in names)) == known
    changed = [{**tensors, "large": large * np.float32(1.01)}, {**tensors, "a": A + 1}, {**tensors, "d": A}]
    changed += [{**tensors, "large": large.reshape(400, 300)}]
    found = {fingerprint(str(at), one) for at, one in enumerate(changed)}
    assert len(found | {known}) == 5 and all(len(one) == 12 for one in found)


def test_verifier_tensors_of_a_draft_are_ignored(place):
    spare = {"verifier_lm_head.weight": np.full(3, math.nan, np.float32), "verifier_norm.weight": A}
    save_file({**VALID, **spare}, place / SINGLE)
    recipes = [recipe("ab", "a", "b", checkpoint="draft"), recipe("c", shape=(4,), checkpoint="draft")]
    assert set(load(place, recipes, "draft")) == {"draft.ab", "draft.c"}
    assert "2 tensors that this architecture has no place for: verifier_" in refusal(place)


def test_buffers_of_rotary_embeddings_are_ignored(place):
    buffers = ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached", "model.rotary_emb.sin_cached")
    save_file({**VALID, **dict.fromkeys(buffers, A)}, place / SINGLE)
    assert set(load(place)) == {"target.ab", "target.c"}
    recipes = [recipe("ab", "a", "b", checkpoint="draft"), recipe("c", shape=(4,), checkpoint="draft")]
    assert set(load(place, recipes, "draft")) == {"draft.ab", "draft.c"}


def test_fused_projections_are_named_in_the_error(place, role="draft"):
    save_file({"a": A, "layers.0.self_attn.qkv_proj.weight": A}, place / SINGLE)
    recipes = [recipe("a", checkpoint=role), recipe("layers.0.self_attn.q_proj.weight", checkpoint=role)]
    assert "layers.0.self_attn.qkv_proj.weight: fused q, k and v projections" in refusal(place, recipes, role)


@pytest.fixture
def places(tmp_path) -> dict[str, Path]:
    """A directory for each checkpoint of a pair."""
    found = {role: tmp_path / role for role in ("target", "draft")}
    for directory in found.values():
        directory.mkdir()
    return found


def shared_embedding(shape=(2, 3)) -> list[WeightRecipe]:
    """Recipes of a draft that uses the target's embedding if it has none itself."""
    own = recipe("embed", shape=shape, checkpoint="draft")
    return [
        recipe("embed"),
        msgspec.structs.replace(own, otherwise="target.embed"),
        recipe("fc", shape=(4,), checkpoint="draft"),
    ]


def test_draft_uses_its_own_embedding_or_the_targets(places):
    save_file({"embed": A}, places["target"] / SINGLE)
    save_file({"fc": VALID["c"]}, places["draft"] / SINGLE)
    shared = load_weights(shared_embedding(), places, [CPU])
    assert shared["draft.embed"] is shared["target.embed"]
    with pytest.raises(BadCheckpoint, match=r"embed is missing, and the target's embed is \[2, 3\], not \[2, 4\]"):
        load_weights(shared_embedding((2, 4)), places, [CPU])
    save_file({"embed": A + 10, "fc": VALID["c"]}, places["draft"] / SINGLE)
    own = load_weights(shared_embedding(), places, [CPU])
    np.testing.assert_array_equal(own["draft.embed"], A + 10)
    np.testing.assert_array_equal(own["target.embed"], A)


REACHED = [1, 4, 6]  # of a vocabulary of 8
MASK = np.isin(np.arange(8), REACHED)
OFFSETS = np.array([1, 3, 4])
MAPPING = WeightRecipe(
    "draft.d2t", "draft", (3,), "int32", (Placement("d2t", (3,), (0,), (3,)),), mapped=MaskedMap("t2d", 8)
)


def write_map(place: Path, offsets, mask=MASK) -> None:
    save_file({"d2t": np.array(offsets), "t2d": np.array(mask)}, place / SINGLE)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_vocabulary_map_is_loaded_as_offsets(place, kind):
    write_map(place, OFFSETS.astype(kind))
    found = load(place, [MAPPING], "draft")["draft.d2t"]
    assert found.dtype == np.int32 and (np.arange(3) + found).tolist() == REACHED


def test_vocabulary_map_of_tokens_instead_of_offsets_raises(place):
    for tokens, words in (([1, 4, 6], "outside the vocabulary"), ([1, 2, 3], "disagree on")):
        write_map(place, tokens, np.isin(np.arange(8), tokens))
        assert words in (found := refusal(place, [MAPPING], "draft"))
        assert "it holds tokens, expected is each one's distance from its row" in found


UNFIT_MAPS = [
    ([-1, 3, 4], MASK, "leads 1 of 3 rows outside the vocabulary of 8"),
    ([1, 3, 6], MASK, "leads 1 of 3 rows outside"),
    ([1, 2**62, -(2**63)], MASK, "leads 2 of 3 rows outside"),
    ([1, 2**63 - 1, 2**63 - 1], MASK, "leads 2 of 3 rows outside"),
    ([1, 0, 4], MASK, "leads 3 rows to only 2 different tokens"),
    ([1, 3, 5], MASK, "and t2d disagree on 2 tokens"),
    *((OFFSETS, MASK ^ (np.arange(8) == flipped), "d2t and t2d disagree on 1 tokens") for flipped in range(8)),
    (OFFSETS.astype(np.float32), MASK, "expected one of I32, I64"),
    (OFFSETS.astype(np.int16), MASK, "expected one of I32, I64"),
    (OFFSETS, MASK.astype(np.uint8), "t2d is U8, expected one of BOOL"),
    ([1, 3], MASK, "d2t is [2], but its config.json implies [3]"),
    (OFFSETS, MASK[:7], "t2d is [7], but its config.json implies [8]"),
]


def test_vocabulary_maps_that_do_not_fit_raise(place):
    for offsets, mask, words in UNFIT_MAPS:
        write_map(place, offsets, mask)
        found = refusal(place, [MAPPING], "draft")
        assert words in found and "it holds tokens" not in found
    for kept, lost, tensor in (("d2t", "t2d", OFFSETS), ("t2d", "d2t", MASK)):
        save_file({kept: tensor}, place / SINGLE)
        assert f"missing: {lost}" in refusal(place, [MAPPING], "draft")
