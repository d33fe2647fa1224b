"""Rings of kv pages: a slot's sliding layers see their window after chunks with padding, idle rounds and a move."""

import numpy as np
import pytest

from dflash_aot.compile.programs.programs import Programs, Roofline

WIDTH = 32  # of chunks, more than a ring's 24 positions
VERIFY = "verify batch=2 length=96 k=7"


@pytest.fixture(scope="module")
def models(runs, load_models):
    return load_models(runs["gemma_text"].target, runs["gemma_text"].draft)


@pytest.fixture(scope="module")
def rig(models, make_rig):
    return make_rig(models, f"batch=2 length=96 k=0,7 prefill={WIDTH} page=4")


def test_ring_is_no_longer_than_the_text(runs, models, make_rig):
    """The window has 12 positions, the longest text 8."""
    rig, tokens = make_rig(models, "batch=2 length=8 k=0,1 prefill=8 page=2"), runs["gemma_text"].facts["prompts"][-1]
    tokens = tokens["output_ids"][:10]
    pool = rig.empty()["sliding_k"]
    assert pool.shape[1] == 1 + 2 * (4 + 2)  # pages of 8 positions and of a block, by slots
    signatures = Programs(models.target, models.draft, "float32").list_signatures(rig.grid)
    move = next(one for one in signatures if one.program == "move")
    cost = Roofline(models.target, models.draft, "float32", rig.grid).cost(move)
    assert cost.bytes == 2 * 2 * 6 * pool[:, 0].nbytes  # of keys and values, read and written
    for length in (1, 7, 8):
        arrays = rig.prefill(rig.empty(), 1, tokens[:length], 8, padding=5)
        blocks = [tokens[length : length + 2]] * 2
        arrays = rig.run("verify batch=2 length=8 k=1", arrays, block=blocks, active=[False, True])
        np.testing.assert_allclose(arrays["features"][1], models.features(tokens[: length + 2])[length:], 0, 1e-4)


@pytest.mark.parametrize("length", [1, 12, 31, 33, 60, 80])
def test_block_sees_the_window_before_it(runs, models, rig, length):
    tokens = max((prompt["output_ids"] for prompt in runs["gemma_text"].facts["prompts"]), key=len)
    arrays = rig.prefill(rig.empty(), 1, tokens[:length], WIDTH, padding=5)
    idle = [[7] * 8] * 2
    arrays = rig.run(VERIFY, arrays, block=idle, active=[False, False])
    arrays = rig.run("move", arrays, source=[1], destination=[0])
    block = tokens[length : length + 8]
    pages = rig.grid.separate_tables([1, 0])
    arrays = rig.run(VERIFY, arrays, block=[block, block], active=[True, False], pages=pages)
    expected = models.features(tokens[: length + 8])[length:]
    np.testing.assert_allclose(arrays["features"][0], expected, rtol=0, atol=1e-4)
