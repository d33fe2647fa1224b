"""Rings of kv pages: a slot's sliding layers see their window after chunks with padding, idle rounds and a move."""

import numpy as np
import pytest

WIDTH = 32  # of chunks, more than a ring's 24 positions
VERIFY = "verify batch=2 length=96 k=7"


@pytest.fixture(scope="module")
def models(runs, load_models):
    return load_models(runs["gemma_text"].target, runs["gemma_text"].draft)


@pytest.fixture(scope="module")
def rig(models, make_rig):
    return make_rig(models, f"batch=2 length=96 k=0,7 prefill={WIDTH} page=4")


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
