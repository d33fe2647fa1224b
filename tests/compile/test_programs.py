"""What must not show in any output: padding, neighbours, buckets, rejected rows, the slot's past."""

import jax.numpy as jnp
import numpy as np
import pytest

KV = ("target_k", "target_v", "draft_k", "draft_v")
STATE = (*KV, "lengths", "anchors")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3]]
BUCKET = "batch=3 length=32 k=3"
CAPACITY = 32


@pytest.fixture(scope="module")
def running(rig):
    """Three slots behind their prefill."""
    arrays = rig.empty()
    for slot, prompt in enumerate(PROMPTS):
        arrays = rig.prefill(arrays, slot, prompt, width=16)
    return arrays


def written(arrays, name, slot):
    """The kv of a slot up to its length, as it may be read."""
    return np.asarray(arrays[name])[:, slot, :, : int(arrays["lengths"][slot])]


def scribbled(arrays):
    """Other numbers in every position that no slot has committed."""
    free = np.arange(arrays["target_k"].shape[3]) >= np.asarray(arrays["lengths"])[:, None]
    return {**arrays, **{name: jnp.where(free[None, :, None, :, None], 1e3, arrays[name]) for name in KV}}


def assert_same(left, right, names):
    for name in names:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_padding_of_a_chunk_changes_nothing(rig):
    one, other = (rig.prefill(rig.empty(), 1, PROMPTS[0], width=16, padding=padding) for padding in (0, 40))
    assert_same(one, other, ("lengths", "anchors", "first"))
    np.testing.assert_array_equal(one["features"][:, :5], other["features"][:, :5])
    assert not np.array_equal(one["features"][:, 5:], other["features"][:, 5:])
    for name in KV:
        np.testing.assert_array_equal(written(one, name, 1), written(other, name, 1), err_msg=name)


def test_chunks_leave_what_one_prefill_leaves(rig):
    whole, chunked = (rig.prefill(rig.empty(), 2, PROMPTS[2], width=width) for width in (16, 4))
    assert_same(whole, chunked, ("lengths", "anchors"))
    for name in KV:
        np.testing.assert_allclose(written(whole, name, 2), written(chunked, name, 2), atol=1e-5, err_msg=name)


def test_the_last_request_of_a_slot_leaves_no_trace(rig):
    used = rig.prefill(rig.empty(), 0, PROMPTS[2], width=16)
    fresh, reused = (rig.prefill(arrays, 0, PROMPTS[0], width=16) for arrays in (rig.empty(), used))
    fresh, reused = (rig.run("draft batch=1 length=32 k=3", arrays) for arrays in (fresh, reused))
    assert_same(fresh, reused, ("block",))
    fresh, reused = (rig.run("verify batch=1 length=32 k=3", arrays, active=[True]) for arrays in (fresh, reused))
    assert_same(fresh, reused, ("verdict", "features"))


def test_a_draft_reads_nothing_behind_the_lengths(rig, running):
    clean, dirty = (rig.run(f"draft {BUCKET}", arrays) for arrays in (running, scribbled(running)))
    assert_same(clean, dirty, ("block",))


def test_a_draft_reads_what_lies_before_the_lengths(rig, running):
    """The test above can fail: the same scribble one position earlier shows."""
    short = scribbled({**running, "lengths": running["lengths"] - 4})
    dirty = rig.run(f"draft {BUCKET}", {**short, "lengths": running["lengths"]})
    assert dirty["block"].tolist() != rig.run(f"draft {BUCKET}", running)["block"].tolist()


def test_a_verification_reads_nothing_behind_its_rows(rig, running):
    arrays = rig.run(f"draft {BUCKET}", running)
    clean, dirty = (rig.run(f"verify {BUCKET}", a, active=[True] * 3) for a in (arrays, scribbled(arrays)))
    assert_same(clean, dirty, ("verdict", "features", "lengths", "anchors"))


def test_a_row_that_is_not_active_stays_where_it_is(rig, running):
    arrays = rig.run(f"draft {BUCKET}", running)
    after = rig.run(f"verify {BUCKET}", arrays, active=[True, False, True])
    assert (after["lengths"] > running["lengths"]).tolist() == [True, False, True]
    assert after["anchors"][1] == running["anchors"][1]
    for name in KV:
        np.testing.assert_array_equal(written(running, name, 1), written(after, name, 1), err_msg=name)


def test_slots_outside_the_bucket_are_not_touched(rig, running):
    arrays = rig.run("draft batch=2 length=32 k=3", running)
    arrays = rig.run("verify batch=2 length=32 k=3", arrays, active=[True, True])
    arrays = rig.run("kv_write rows=2 width=4", arrays, slots=[0, 1])
    assert arrays["lengths"][2] == running["lengths"][2]
    assert arrays["anchors"][2] == running["anchors"][2]
    for name in KV:
        np.testing.assert_array_equal(arrays[name][:, 2], running[name][:, 2], err_msg=name)


def test_prefill_touches_no_other_slot(rig, running):
    after = rig.prefill(running, 1, PROMPTS[2], width=4)
    for slot in (0, 2):
        assert after["lengths"][slot] == running["lengths"][slot]
        assert after["anchors"][slot] == running["anchors"][slot]
        for name in KV:
            np.testing.assert_array_equal(after[name][:, slot], running[name][:, slot], err_msg=name)


def test_a_bucket_never_changes_a_token(rig, running):
    def first_row(bucket, batch):
        arrays = rig.run(f"draft {bucket}", running)
        arrays = rig.run(f"verify {bucket}", arrays, active=[True] * batch)
        return {name: arrays[name][:1] for name in ("block", "verdict", "lengths", "anchors")}

    expected = first_row("batch=1 length=16 k=3", 1)
    for batch in (1, 2, 3):
        assert_same(first_row(f"batch={batch} length=32 k=3", batch), expected, expected)


def test_fewer_tokens_are_the_beginning_of_more(rig, running):
    few, many = (rig.run(f"draft batch=3 length=32 k={k}", running)["block"] for k in (1, 3))
    np.testing.assert_array_equal(few, many[:, :2])


def decoded_one_by_one(rig, arrays, steps):
    """The state behind `steps` rounds of plain decoding, and each round's choice and features."""
    chosen, features = [], []
    for _ in range(steps):
        arrays = rig.run("verify batch=3 length=32 k=0", arrays, active=[True] * 3)
        chosen.append(arrays["verdict"][:, 1])
        features.append(arrays["features"][:, 0])
    return arrays, np.stack(chosen, axis=1), np.stack(features, axis=1)


def test_a_whole_verification_is_as_many_single_steps(rig, running):
    after, chosen, features = decoded_one_by_one(rig, running, 4)
    block = np.concatenate([running["anchors"][:, None], chosen[:, :3]], axis=1)
    at_once = rig.run(f"verify {BUCKET}", running, block=block, active=[True] * 3)
    assert at_once["verdict"][:, 0].tolist() == [3, 3, 3]
    assert at_once["verdict"][:, 4:].tolist() == chosen.tolist()
    assert_same(at_once, after, ("lengths", "anchors"))
    np.testing.assert_allclose(at_once["features"], features, atol=1e-4)
    for name in ("target_k", "target_v"):
        for slot in range(3):
            np.testing.assert_allclose(written(at_once, name, slot), written(after, name, slot), atol=1e-4)


def test_decoding_goes_on_from_a_rejected_block_as_if_it_had_not_been(rig, running):
    _, chosen, _ = decoded_one_by_one(rig, running, 3)
    wrong = np.asarray(chosen[:, [0, 0, 0]] + 1) % 47
    block = np.concatenate([running["anchors"][:, None], wrong], axis=1)
    rejected = rig.run(f"verify {BUCKET}", running, block=block, active=[True] * 3)
    assert rejected["verdict"][:, 0].tolist() == [0, 0, 0]
    _, rest, _ = decoded_one_by_one(rig, rejected, 2)
    assert rest.tolist() == chosen[:, 1:].tolist()


@pytest.mark.parametrize("width", [4, 16])
def test_the_last_chunk_of_a_full_slot_does_not_slide_back(rig, width):
    prompt = [*range(40)][:CAPACITY]
    before = rig.prefill(rig.empty(), 0, prompt[:30], width=width)
    after = rig.prefill(before, 0, prompt[30:], width=width, start=30)
    assert after["lengths"][0] == CAPACITY
    for name in KV:
        np.testing.assert_array_equal(written(before, name, 0), written(after, name, 0)[:, :, :30], err_msg=name)
    whole = rig.prefill(rig.empty(), 0, prompt, width=4)
    for name in KV:
        np.testing.assert_allclose(written(after, name, 0), written(whole, name, 0), atol=1e-4, err_msg=name)


def test_a_round_of_a_full_slot_does_not_slide_back(rig):
    full = rig.prefill(rig.empty(), 0, [*range(CAPACITY)], width=16)
    arrays = rig.run("draft batch=1 length=32 k=3", full)
    arrays = rig.run("verify batch=1 length=32 k=3", arrays, active=[False])
    arrays = rig.run("kv_write rows=1 width=4", arrays, slots=[0])
    for name in KV:
        np.testing.assert_array_equal(written(arrays, name, 0), written(full, name, 0), err_msg=name)


def test_features_go_to_the_slots_that_are_named(rig, running):
    arrays = rig.run(f"draft {BUCKET}", running)
    arrays = rig.run(f"verify {BUCKET}", arrays, active=[True] * 3)
    order = [2, 0, 1]
    picked = {name: arrays[name][np.array(order)] for name in ("features", "starts")}
    together = rig.run("kv_write rows=3 width=4", running, slots=order, **picked)
    single = running
    for slot in range(3):
        row = {name: arrays[name][slot : slot + 1] for name in ("features", "starts")}
        single = rig.run("kv_write rows=1 width=4", single, slots=[slot], **row)
    for name in ("draft_k", "draft_v"):
        np.testing.assert_allclose(together[name], single[name], atol=1e-5, err_msg=name)
        assert not np.array_equal(together[name], running[name])


def test_a_move_copies_one_slot_over_another_and_nothing_else(rig, running):
    moved = rig.run("move", running, source=[2], destination=[0])
    for name in STATE:
        slots = 0 if name in ("lengths", "anchors") else 1
        expected = np.take(running[name], [2, 1, 2], axis=slots)
        np.testing.assert_array_equal(moved[name], expected, err_msg=name)
