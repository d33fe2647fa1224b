"""Programs do not depend on padding, other rows, the bucket, rejected rows or a slot's earlier request."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_aot.cache.arrays import KV_POOLS as KV
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.signature import CATALOGUE, PROGRAMS, ProgramName
from dflash_aot.compile.analysis.hlo import parse_module
from dflash_aot.compile.analysis.inspection import inspect_module
from dflash_aot.compile.programs.lowering import lower_program
from dflash_aot.compile.programs.programs import BODIES, TracedPrograms
from tests.compile.conftest import read_slots
from tests.compile.quick import QUICK

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3]]
BUCKET = "batch=3 length=32 k=3"
CAPACITY = 32


def test_every_program_has_both_halves():
    assert BODIES.keys() == PROGRAMS.keys() == {*get_args(ProgramName)}
    assert {body.program for body in BODIES.values()} == {*CATALOGUE}
    for name, (program, mode) in PROGRAMS.items():
        body = BODIES[name]
        assert body.program is program and body.figures.keys() == program.names.keys() and mode in body.figures


@pytest.fixture(scope="module")
def running(rig):
    arrays = rig.empty()
    for slot, prompt in enumerate(PROMPTS):
        arrays = rig.prefill(arrays, slot, prompt, width=16)
    return arrays


@pytest.fixture(scope="module")
def read_committed(rig):
    """Arrays, the name of a pool, a slot → the kv of the slot up to its length."""
    return lambda arrays, name, slot: read_slots(arrays, name, rig.grid)[:, slot, :, : int(arrays["lengths"][slot])]


@pytest.fixture(scope="module")
def overwrite_uncommitted(rig):
    """Arrays → the same with other kv in every position that no slot has committed, and in page 0."""
    tables, page = np.array(rig.grid.separate_tables(range(rig.grid.slots))), rig.grid.page

    def overwrite(arrays):
        free = np.ones((1 + rig.grid.pool_pages, page), bool)
        positions = np.arange(tables.shape[1] * page).reshape(-1, page)
        free[tables] = positions >= np.asarray(arrays["lengths"])[:, None, None]
        return {**arrays, **{name: jnp.where(free[None, :, None, :, None], 1e3, arrays[name]) for name in KV}}

    return overwrite


def assert_same(left, right, names):
    for name in names:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_prefill_does_not_depend_on_padding(rig, read_committed):
    one, other = (rig.prefill(rig.empty(), 1, PROMPTS[0], width=16, padding=padding) for padding in (0, 40))
    assert_same(one, other, ("lengths", "anchors", "first"))
    np.testing.assert_array_equal(one["features"][:, :5], other["features"][:, :5])
    assert not np.array_equal(one["features"][:, 5:], other["features"][:, 5:])
    for name in KV:
        np.testing.assert_array_equal(read_committed(one, name, 1), read_committed(other, name, 1), err_msg=name)


def test_prefill_chooses_a_token_only_where_asked(rig, running):
    chunk = {"tokens": [[7, 8, 9, 1]], "slots": [1], "starts": [0], "counts": [3]}
    with_token, without = (
        rig.run("prefill prefill=4 length=32", running, **chunk, gives_first=[gives]) for gives in (True, False)
    )
    assert with_token["anchors"][1] == with_token["first"][0] != running["anchors"][1]
    assert (without["anchors"].tolist(), without["first"].tolist()) == (running["anchors"].tolist(), [0])
    assert_same(with_token, without, ("target_k", "target_v", "lengths", "features"))


def test_draft_reads_nothing_behind_the_length(rig, running, overwrite_uncommitted):
    clean, dirty = (rig.run(f"draft {BUCKET}", arrays) for arrays in (running, overwrite_uncommitted(running)))
    assert_same(clean, dirty, ("block",))
    # Positions before the length change the block.
    short = overwrite_uncommitted({**running, "lengths": running["lengths"] - 4})
    dirty = rig.run(f"draft {BUCKET}", {**short, "lengths": running["lengths"]})
    assert dirty["block"].tolist() != rig.run(f"draft {BUCKET}", running)["block"].tolist()


def test_verify_reads_nothing_behind_its_block(rig, running, overwrite_uncommitted):
    arrays = rig.run(f"draft {BUCKET}", running)
    clean, dirty = (rig.run(f"verify {BUCKET}", a, active=[True] * 3) for a in (arrays, overwrite_uncommitted(arrays)))
    assert_same(clean, dirty, ("verdict", "features", "lengths", "anchors"))


def test_inactive_row_does_not_advance(rig, running, read_committed):
    arrays = rig.run(f"draft {BUCKET}", running)
    after = rig.run(f"verify {BUCKET}", arrays, active=[True, False, True])
    assert (after["lengths"] > running["lengths"]).tolist() == [True, False, True]
    anchors = {**running, "anchors": np.full_like(running["anchors"], 3)}  # a token that the row would not choose
    kept = rig.run(f"verify {BUCKET}", anchors, block=arrays["block"], active=[True, False, True])["anchors"]
    assert (kept[1], after["anchors"][1]) == (3, running["anchors"][1])
    for name in KV:
        np.testing.assert_array_equal(read_committed(running, name, 1), read_committed(after, name, 1), err_msg=name)


def assert_same_slot(rig, left, right, slot):
    assert left["lengths"][slot] == right["lengths"][slot]
    assert left["anchors"][slot] == right["anchors"][slot]
    for name in KV:
        one, other = (read_slots(state, name, rig.grid)[:, slot] for state in (left, right))
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_other_slots_do_not_change(rig, running):
    arrays = rig.run("draft batch=2 length=32 k=3", running)
    arrays = rig.run("verify batch=2 length=32 k=3", arrays, active=[True, True])
    arrays = rig.run("kv_write rows=2 width=4", arrays, slots=[0, 1])
    assert_same_slot(rig, arrays, running, 2)
    prefilled = rig.prefill(running, 1, PROMPTS[2], width=4)
    for slot in (0, 2):
        assert_same_slot(rig, prefilled, running, slot)


def test_smaller_k_drafts_a_prefix_of_larger_k(rig, running):
    few, many = (rig.run(f"draft batch=3 length=32 k={k}", running)["block"] for k in (1, 3))
    np.testing.assert_array_equal(few, many[:, :2])


def decode_step_by_step(rig, arrays, steps):
    chosen, features = [], []
    for _ in range(steps):
        arrays = rig.run("verify batch=3 length=32 k=0", arrays, active=[True] * 3)
        chosen.append(arrays["verdict"][:, 1])
        features.append(arrays["features"][:, 0])
    return arrays, np.stack(chosen, axis=1), np.stack(features, axis=1)


def test_verify_of_a_block_equals_single_steps(rig, running, read_committed):
    after, chosen, features = decode_step_by_step(rig, running, 4)
    block = np.concatenate([running["anchors"][:, None], chosen[:, :3]], axis=1)
    at_once = rig.run(f"verify {BUCKET}", running, block=block, active=[True] * 3)
    assert at_once["verdict"][:, 0].tolist() == [3, 3, 3]
    assert at_once["verdict"][:, 4:].tolist() == chosen.tolist()
    assert_same(at_once, after, ("lengths", "anchors"))
    np.testing.assert_allclose(at_once["features"], features, atol=1e-4)
    for name in ("target_k", "target_v"):
        for slot in range(3):
            np.testing.assert_allclose(
                read_committed(at_once, name, slot), read_committed(after, name, slot), atol=1e-4
            )


def test_round_of_a_full_slot_keeps_earlier_positions(rig, read_committed):
    full = rig.prefill(rig.empty(), 0, [*range(CAPACITY)], width=16)
    arrays = rig.run("draft batch=1 length=32 k=3", full)
    arrays = rig.run("verify batch=1 length=32 k=3", arrays, active=[False])
    arrays = rig.run("kv_write rows=1 width=4", arrays, slots=[0])
    for name in KV:
        np.testing.assert_array_equal(read_committed(arrays, name, 0), read_committed(full, name, 0), err_msg=name)


def test_kv_write_writes_to_the_given_slots(rig, running):
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


LARGE_POOLS = parse_grid("batch=1,8 length=8192 k=0,3 prefill=64 rounds=4", block=4)


@pytest.mark.parametrize(
    "label",
    [
        "prefill prefill=64 length=8192",
        "verify batch=8 length=8192 k=3",
        "kv_write rows=8 width=4",
        "rounds batch=1 length=8192 k=0 rounds=4",
        "sampled_rounds batch=8 length=8192 k=3 rounds=4",
    ],
)
def test_no_kv_pool_is_copied_on_cpu(small, label):
    source = TracedPrograms(small.programs, LARGE_POOLS)
    (signature,) = (one for one in source.signatures if one.label == label)
    lowered = lower_program(source.export(signature), signature, source.known, jax.devices()[:1])
    inputs = [*signature.weights, *signature.state, *(one.name for one in signature.arguments)]
    outputs = [*signature.donated, *(one.name for one in signature.results)]
    found = inspect_module(parse_module(lowered.compile(QUICK).as_text()), inputs, outputs)
    assert [(one.buffer, one.bytes) for one in found.copies if one.buffer in KV] == []
