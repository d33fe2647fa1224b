"""A round and a chunk in one call, or chunks of several prompts, leave what calls of their own leave."""

import numpy as np
import pytest

PROMPTS = [[9, 3, 2, 3, 8, 4], [5, 1, 7], [11, 2, 30, 4, 4, 19, 8, 40, 3]]
VERIFY = {"mixed": "verify", "sampled_mixed": "sampled_verify", "constrained_mixed": "constrained_verify"}
BUCKET = "batch=3 length=32 k={k}"
GRID = "batch=3 length=32 k=0,3 prefill=8 page=5 mixed=1"
PACKED = "batch=4 length=32 k=0 prefill=8,24 page=5 packed=3"
RINGS = ("sliding_k", "sliding_v")


@pytest.fixture(scope="module")
def models(small, runs, load_models):
    gemma = runs["gemma_text"]
    return {"small": small, "gemma": load_models(gemma.target, gemma.draft)}


@pytest.fixture(scope="module")
def rigs(models, make_rig):
    return {name: make_rig(one, GRID) for name, one in models.items()}


def compare_kv(pair, found, expected):
    """But for page 0, which holds what no row reads."""
    for name in ("target_k", "target_v", *RINGS * (pair == "gemma")):
        np.testing.assert_allclose(found[name][:, 1:], expected[name][:, 1:], atol=1e-4, err_msg=name)


CASES = [("small", "mixed", 0), *(("small", program, 3) for program in VERIFY), ("gemma", "mixed", 3)]


@pytest.mark.parametrize(("pair", "program", "k"), CASES)
def test_mixed_call_leaves_what_a_verification_and_a_chunk_leave(rigs, pair, program, k):
    mixing, bucket = rigs[pair], BUCKET.format(k=k)
    arrays = mixing.empty()
    for slot, prompt in enumerate(PROMPTS[:2]):
        arrays = mixing.prefill(arrays, slot, prompt, width=8)
        arrays = mixing.admit(arrays, slot, prompt, temperature=1.3 * slot, slot_seeds=[[0, slot]])
    arrays = mixing.prefill(arrays, 2, PROMPTS[2][:3], width=8)
    if k:
        arrays = mixing.run(f"draft {bucket}", arrays)
    masks = {"allowed": np.full((3, k + 1, 2), 0x55555555)} if program.startswith("constrained") else {}
    rows = {"active": [True, True, False], "pages": mixing.grid.separate_tables([0, 1, 2]), **masks}
    rows["pages"][2] = [0] * len(rows["pages"][2])  # as the engine's, of a row without a request
    left = PROMPTS[2][3:]
    chunk = {"tokens": [[*left, 0, 0]], "slots": [2], "gives_first": [True]}
    place = {"starts": [3], "counts": [len(left)], "pages": mixing.grid.separate_tables([2])}

    apart = mixing.run(f"{VERIFY[program]} {bucket}", arrays, **rows)
    verified = {name: apart[name] for name in ("verdict", "features", "starts")}
    apart = mixing.run("prefill prefill=8 length=32", apart, **chunk, **place)
    renamed = {f"chunk_{name}": value for name, value in place.items()}
    found = mixing.run(f"{program} {bucket} prefill=8", arrays, **rows, **chunk, **renamed)

    expected = {**apart, "chunk_features": apart["features"], **verified}
    columns = 2 * k + 2  # log-probabilities follow
    np.testing.assert_array_equal(found["verdict"][:, :columns], expected["verdict"][:, :columns])
    for name in ("starts", "lengths", "anchors", "first", "counts"):
        np.testing.assert_array_equal(found[name], expected[name], name)
    compare_kv(pair, found, expected)
    np.testing.assert_allclose(found["features"][:2], expected["features"][:2], atol=1e-4)
    tokens = len(left)
    np.testing.assert_allclose(found["chunk_features"][:, :tokens], apart["features"][:, :tokens], atol=1e-4)


@pytest.mark.parametrize("pair", ["small", "gemma"])
def test_packed_chunks_leave_what_chunks_of_their_own_leave(models, make_rig, pair):
    """One continues its prompt, one is whole and gives no token; a row without a prompt changes no slot."""
    packing = make_rig(models[pair], PACKED)
    before = packing.prefill(packing.empty(), 0, PROMPTS[1], width=8)
    before = packing.prefill(before, 2, PROMPTS[2][:3], width=8)
    rows = [(2, 3, PROMPTS[2][3:], True), (1, 0, PROMPTS[0], False)]
    apart, features, first = before, [], []
    for slot, start, tokens, gives_first in rows:
        padded = [[*tokens, *[0] * (8 - len(tokens))]]
        chunk = {"tokens": padded, "slots": [slot], "gives_first": [gives_first], "starts": [start]}
        apart = packing.run("prefill prefill=8 length=32", apart, **chunk, counts=[len(tokens)])
        features.append(apart["features"][0, : len(tokens)])
        first.append(int(apart["first"][0]))

    tables = [*packing.grid.separate_tables([2, 1]), [0] * packing.grid.row_pages]
    found = packing.run(
        "packed_prefill rows=3 prefill=8 length=32",
        before,
        tokens=[[*tokens, *[0] * (8 - len(tokens))] for *_, tokens, _ in rows] + [[0] * 8],
        slots=[2, 1, 0],
        starts=[3, 0, 0],
        counts=[len(tokens) for *_, tokens, _ in rows] + [0],
        gives_first=[True, False, False],
        pages=tables,
    )
    assert found["first"].tolist() == [*first, 0]
    for name in ("lengths", "anchors"):
        np.testing.assert_array_equal(found[name], apart[name], name)
    compare_kv(pair, found, apart)
    for row, expected in enumerate(features):
        np.testing.assert_allclose(found["features"][row, : len(expected)], expected, atol=1e-4)
