"""Multi-round steps leave the state that as many single rounds leave."""

from functools import reduce

import numpy as np
import pytest

KV = ("target_k", "target_v", "draft_k", "draft_v")
PROMPT = [9, 3, 2, 3, 8, 4]
MAX_ROUNDS = 4  # as in the grid of `rig`
NO_STOP_TOKENS = [-1] * 8


def run_round(rig, arrays, k):
    """One round: draft, verify, kv_write."""
    if k:
        arrays = rig.run(f"draft batch=1 length=32 k={k}", arrays)
    arrays = rig.run(f"verify batch=1 length=32 k={k}", arrays, active=[True])
    arrays = rig.run(f"kv_write rows=1 width={k + 1}", arrays, slots=[0])
    return {**arrays, "all": [*arrays.get("all", []), arrays["verdict"][0].tolist()]}


def run_rounds(rig, arrays, k, count=MAX_ROUNDS, left=99, ends=NO_STOP_TOKENS):
    label = f"rounds batch=1 length=32 k={k} rounds={MAX_ROUNDS}"
    return rig.run(label, arrays, count=[count], left=[left], ends=ends)


@pytest.fixture(scope="module")
def running(rig):
    return rig.prefill(rig.empty(), 0, PROMPT, width=16)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("count", [1, MAX_ROUNDS])
def test_multi_round_step_equals_single_rounds(rig, running, k, count):
    single = reduce(lambda arrays, _: run_round(rig, arrays, k), range(count), running)
    together = run_rounds(rig, running, k, count)
    assert together["verdicts"][:count].tolist() == single["all"]
    assert (np.asarray(together["verdicts"][count:]) == -1).all()
    committed = sum(accepted + 1 for accepted, *_ in single["all"])
    assert together["left_over"].tolist() == [99 - committed]
    for name in ("lengths", "anchors"):
        assert together[name][0] == single[name][0]
    length = len(PROMPT) + committed
    for name in KV:
        one, other = (np.asarray(arrays[name])[:, 0, :, :length] for arrays in (single, together))
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("k", [0, 3])
def test_multi_round_step_ends_when_no_tokens_are_left(rig, running, k):
    verdicts = run_rounds(rig, running, k)["verdicts"].tolist()
    first_two = sum(accepted + 1 for accepted, *_ in verdicts[:2])
    short = run_rounds(rig, running, k, left=first_two)
    assert short["verdicts"].tolist() == [*verdicts[:2], *[[-1] * (2 * k + 2)] * 2]
    assert short["left_over"].tolist() == [0]
    assert run_rounds(rig, running, k, left=first_two + 1)["verdicts"].tolist()[2] == verdicts[2]


@pytest.mark.parametrize("k", [0, 3])
def test_committed_stop_token_ends_the_multi_round_step(rig, running, k):
    verdicts = run_rounds(rig, running, k)["verdicts"].tolist()
    accepted, *tokens = verdicts[1]
    stop = tokens[k + accepted]
    seen = [token for one in verdicts[:1] for token in one[k + 1 : k + 2 + one[0]]]
    assert stop not in seen, "the test needs another prompt"
    ended = run_rounds(rig, running, k, ends=[-1, stop, *[-1] * 6])
    assert ended["verdicts"].tolist() == [*verdicts[:2], *[[-1] * (2 * k + 2)] * 2]
    assert ended["left_over"].tolist() == [0]


def test_rejected_stop_token_does_not_end_the_multi_round_step(rig, running):
    verdicts = run_rounds(rig, running, 3)["verdicts"].tolist()
    kept = {token for accepted, *tokens in verdicts for token in tokens[3 : 3 + accepted + 1]}
    rejected = {token for _, *tokens in verdicts for token in tokens} - kept
    assert rejected, "the test needs another prompt"
    ends = [*rejected][:8]
    again = run_rounds(rig, running, 3, ends=[*ends, *[-1] * (8 - len(ends))])
    assert again["verdicts"].tolist() == verdicts


@pytest.mark.parametrize("k", [0, 3])
def test_multi_round_step_with_no_tokens_left_changes_nothing(rig, running, k):
    after = run_rounds(rig, running, k, left=0)
    assert (np.asarray(after["verdicts"]) == -1).all() and after["left_over"].tolist() == [0]
    length = len(PROMPT)
    for name in (*KV, "lengths", "anchors"):
        before, now = np.asarray(running[name]), np.asarray(after[name])
        if name in KV:
            before, now = before[:, 0, :, :length], now[:, 0, :, :length]
        np.testing.assert_array_equal(before, now, err_msg=name)
