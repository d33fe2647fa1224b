"""Multi-round steps leave the state that as many single rounds leave, and give the tokens of these."""

import numpy as np
import pytest

KV = ("target_k", "target_v", "draft_k", "draft_v")
PROMPTS = [[9, 3, 2, 3, 8, 4], [5, 1, 7], [11, 2, 30, 4, 4, 19, 8]]
MAX_ROUNDS = 4  # as in the grid of `rig`
NONE = [-1] * 8
SAMPLING = [  # temperature, top_k, top_p, min_p, repetition, presence, frequency
    [0.9, 20, 0.95, 0.0, 1.2, 0.0, 0.5],
    [0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0],
    [1.3, 0, 1.0, 0.05, 1.0, 0.7, 0.0],
]
VERIFY = {"rounds": "verify", "sampled_rounds": "sampled_verify"}


def run_round(rig, arrays, k, rows, program, active):
    sizes = f"batch={rows} length=32 k={k}"
    sampled = program == "sampled_rounds"
    if k:
        arrays = rig.run(f"draft {sizes}", arrays, sampled=[sampled], penalised=[sampled])
    arrays = rig.run(f"{VERIFY[program]} {sizes}", arrays, active=active)
    arrays = rig.run(f"kv_write rows={rows} width={k + 1}", arrays, slots=range(rows))
    return arrays, np.where(np.array(active)[:, None], np.asarray(arrays["verdict"])[:, : 2 * k + 2], -1)


def run_singly(rig, arrays, k, rows, program, count, left, ends=None, active=None, stop_early=False):
    """What a multi-round step does, round by round: the arrays, the outcomes and what is left of `left`."""
    left, ends = np.array(left), ends or [NONE] * rows
    taking_part = np.array(active or [True] * rows)
    outcomes = np.full((MAX_ROUNDS, rows, 2 * k + 2), -1)
    for done in range(count):
        running = taking_part & (left > 0)
        if not running.any() or (done and stop_early and (running != taking_part).any()):
            break
        arrays, outcomes[done] = run_round(rig, arrays, k, rows, program, running.tolist())
        for row in np.flatnonzero(running):
            accepted, *tokens = outcomes[done, row].tolist()
            chosen = tokens[k : k + accepted + 1]
            left[row] = 0 if {*chosen} & {*ends[row]} else left[row] - len(chosen)
    return arrays, outcomes, left


def run_together(rig, arrays, k, rows, program, count, left, ends=None, active=None, stop_early=False):
    """A multi-round step; arguments and results as `run_singly`."""
    arrays = rig.run(
        f"{program} batch={rows} length=32 k={k} rounds={MAX_ROUNDS}",
        arrays,
        count=[count],
        left=left,
        ends=ends or [NONE] * rows,
        active=active or [True] * rows,
        stop_early=[stop_early],
        **({"penalised": [True]} if program == "sampled_rounds" and k else {}),
    )
    return arrays, np.asarray(arrays["verdicts"]), np.asarray(arrays["left_over"])


@pytest.fixture(scope="module")
def running(rig):
    arrays = rig.empty()
    for slot, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        arrays = rig.prefill(arrays, slot, prompt, width=16)
        given = {"starts": [0], "anchor": [-1], "slot_sampling": [sampling], "slot_seeds": [[slot, 17]]}
        arrays = rig.admit(arrays, slot, prompt, **given)
    return arrays


@pytest.fixture(params=[("rounds", 0), ("rounds", 3), ("sampled_rounds", 0), ("sampled_rounds", 3)], ids=str)
def step(request):
    return request.param


def check_equal(rig, running, step, count=MAX_ROUNDS, **given):
    """Asserts that both ways give the same outcomes and leave the same state. Returns the outcomes, and `left`."""
    (program, k), rows = step, 3
    given.setdefault("left", [99] * rows)
    single, outcomes, left = run_singly(rig, running, k, rows, program, count, **given)
    together, verdicts, left_over = run_together(rig, running, k, rows, program, count, **given)
    np.testing.assert_array_equal(verdicts, outcomes)
    np.testing.assert_array_equal(left_over, left)
    for name in ("lengths", "anchors", *(("counts",) if program == "sampled_rounds" else ())):
        np.testing.assert_array_equal(together[name], single[name], err_msg=name)
    tables = rig.grid.separate_tables(range(rows))
    for row, table in enumerate(tables):
        length = int(single["lengths"][row])
        for name in KV:
            one, other = (_read_kv(arrays[name], table, length) for arrays in (single, together))
            np.testing.assert_allclose(one, other, atol=1e-5, err_msg=f"{name} of row {row}")
    return outcomes, left


def _read_kv(pool, table, length):
    pages = np.asarray(pool)[:, np.array(table)].swapaxes(1, 2)
    return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])[:, :, :length]


@pytest.mark.parametrize("count", [1, MAX_ROUNDS])
def test_multi_round_step_equals_single_rounds(rig, running, step, count):
    outcomes, _ = check_equal(rig, running, step, count)
    assert (outcomes[:count] >= 0).all() and (outcomes[count:] == -1).all()


def test_rows_without_tokens_left_or_request_stay_inactive(rig, running, step):
    outcomes, left = check_equal(rig, running, step, left=[1, 99, 2])
    ran = (outcomes[:, :, 0] >= 0).sum(axis=0).tolist()
    assert ran[0] == 1 and ran[1] == MAX_ROUNDS and 1 <= ran[2] <= 2
    assert left[0] <= 0 and left[2] <= 0 < left[1]
    outcomes, left = check_equal(rig, running, step, active=[True, False, True], left=[2, 5, 1])
    assert (outcomes[:, 1] == -1).all() and left[1] == 5
    assert (outcomes[2:] == -1).all(), "no row has tokens left after two rounds"


def test_early_stop_ends_after_a_row_is_done(rig, running, step):
    outcomes, _ = check_equal(rig, running, step, left=[99, 1, 99], stop_early=True)
    assert (outcomes[0] >= 0).all() and (outcomes[1:] == -1).all()
    outcomes, _ = check_equal(rig, running, step, stop_early=True)
    assert (outcomes >= 0).all(), "no row is done"


def test_early_stop_counts_rows_that_were_done_before(rig, running):
    """The place is free already, and every other row gets a token. A row without a request does not count."""
    outcomes, _ = check_equal(rig, running, ("rounds", 3), left=[99, 0, 99], stop_early=True)
    assert (outcomes[0, [0, 2]] >= 0).all() and (outcomes[0, 1] == -1).all() and (outcomes[1:] == -1).all()
    active = [True, False, True]
    outcomes, _ = check_equal(rig, running, ("rounds", 3), left=[99, 0, 99], active=active, stop_early=True)
    assert (outcomes[:, [0, 2]] >= 0).all()


def test_committed_stop_token_ends_its_row_only(rig, running, step):
    k = step[1]
    outcomes, _ = check_equal(rig, running, step)
    accepted, *tokens = outcomes[1, 1].tolist()
    stop = tokens[k + accepted]
    ends = [[stop, *NONE[1:]] if row == 1 else NONE for row in range(3)]
    ended, left = check_equal(rig, running, step, ends=ends)
    assert 1 <= (ended[:, 1, 0] >= 0).sum() <= 2 and left[1] == 0
    assert (ended[:, [0, 2]] >= 0).all()


def test_rejected_stop_token_ends_no_row(rig, running):
    outcomes, _ = check_equal(rig, running, ("rounds", 3))
    first = outcomes[:, 0].tolist()
    kept = {token for accepted, *tokens in first for token in tokens[3 : 3 + accepted + 1]}
    rejected = {token for _, *tokens in first for token in tokens} - kept
    assert rejected, "the test needs another prompt"
    again, _ = check_equal(rig, running, ("rounds", 3), ends=[[*rejected, *NONE][:8], NONE, NONE])
    np.testing.assert_array_equal(again, outcomes)
