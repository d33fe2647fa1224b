"""Hybrid targets: the programs' recurrent states against those of the reference, by layer and cycle."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_aot.cache.arrays import KV_POOLS
from dflash_aot.cache.signature import MAX_STOP_TOKENS

TOLERANCE = 1e-4
BATCH, LENGTH, K = 3, 288, 7
GRID = f"batch={BATCH} length={LENGTH} k=0,{K} prefill=16,128 saved_states=2 offload=1"
BUCKET = f"batch={BATCH} length={LENGTH} k={K}"
STATES = ("recurrent_states", "conv_states")
NO_ENDS = [[-1] * MAX_STOP_TOKENS] * BATCH
RANKS = {0: 0, 6: 5}  # of the reference's layers among the layers with a state


@pytest.fixture(scope="module")
def hybrid(runs):
    return runs["hybrid_text"]


@pytest.fixture(scope="module")
def models(hybrid, load_models):
    return load_models(hybrid.target, hybrid.draft)


@pytest.fixture(scope="module")
def rig(models, make_rig):
    return make_rig(models, GRID)


def regroup(channels: np.ndarray, sizes) -> np.ndarray:
    """Channels [.., C] in the reference's order (all queries, keys, values), grouped by key head."""
    keys, heads = sizes.key_heads * sizes.key_dim, sizes.key_heads
    parts = np.split(channels, [keys, 2 * keys], axis=-1)
    grouped = [part.reshape(*channels.shape[:-1], heads, -1) for part in parts]
    return np.concatenate(grouped, axis=-1).reshape(channels.shape)


def find_differences(arrays, slot: int, golden, name: str, sizes) -> list[str]:
    """Which of the states that the reference stored under a name differ from a slot's."""
    wrong, compared = [], 0
    for layer, rank in RANKS.items():
        if (key := f"{name}.layer{layer}.recurrent") not in golden.arrays:
            continue
        expected = golden.arrays[key]
        window = regroup(golden.arrays[f"{name}.layer{layer}.conv"].T, sizes)
        pairs = {key: (arrays["recurrent_states"], expected), f"{name} window": (arrays["conv_states"], window)}
        for what, (found, wanted) in pairs.items():
            compared += 1
            if not np.allclose(found[rank, slot], wanted, rtol=0, atol=TOLERANCE):
                wrong.append(f"{what}, layer {layer}")
    assert compared, f"the reference has no {name}"
    return wrong


def test_state_after_a_prompt_equals_the_reference(hybrid, models, rig):
    """Prompts of 1 to 200 tokens, in a slot that held another request, with padding behind the last chunk."""
    for prompt in hybrid.facts["prompts"]:
        arrays = rig.prefill(rig.empty(), 1, prompt["prompt_ids"], 16, padding=5)
        name = f"{prompt['key']}.state_prompt"
        assert not find_differences(arrays, 1, hybrid, name, models.target.recurrent)


def start(rig, prompts):
    arrays = rig.empty()
    for slot, prompt in enumerate(prompts):
        arrays = rig.prefill(arrays, slot, prompt["prompt_ids"], 128)
    return arrays


def run_round(rig, arrays, active):
    arrays = rig.run(f"draft {BUCKET}", arrays)
    arrays = rig.run(f"verify {BUCKET}", arrays, active=active, ends=NO_ENDS)
    return rig.run(f"kv_write rows={BATCH} width={K + 1}", arrays, slots=range(BATCH))


def test_block_and_state_of_each_cycle_equal_the_reference(hybrid, models, rig):
    compared, prompts = 0, hybrid.facts["prompts"]
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        cycles = [prompt["cycles"] for prompt in batch] + [[]] * (BATCH - len(batch))
        arrays = start(rig, batch)
        for cycle in range(max(map(len, cycles))):
            active = np.array([cycle < len(one) for one in cycles])
            arrays = run_round(rig, arrays, active)
            blocks = [one[cycle]["block"] for one in cycles if cycle < len(one)]
            assert arrays["block"][active].tolist() == blocks
            for slot, prompt in enumerate(batch):
                name = f"{prompt['key']}.state_cycle{cycle}"
                if any(key.startswith(f"{name}.") for key in hybrid.arrays):
                    compared += 1
                    assert not find_differences(arrays, slot, hybrid, name, models.target.recurrent)
    assert compared > 20


@pytest.fixture(scope="module")
def started(hybrid, rig):
    return start(rig, hybrid.facts["prompts"][3:6])


def test_idle_rows_and_other_slots_keep_their_state(hybrid, rig, started):
    arrays = started
    after = run_round(rig, arrays, [True, False, True])
    for name in STATES:
        np.testing.assert_array_equal(after[name][:, 1], arrays[name][:, 1])
        assert not np.array_equal(after[name][:, 0], arrays[name][:, 0])
    after = rig.prefill(arrays, 1, hybrid.facts["prompts"][0]["prompt_ids"], 16)
    for name in STATES:
        np.testing.assert_array_equal(after[name][:, [0, 2]], arrays[name][:, [0, 2]])


def test_round_at_length_zero_starts_from_zeros(hybrid, models, rig):
    anchor = hybrid.facts["prompts"][0]["prompt_ids"][0]
    arrays = {**rig.empty(), "lengths": jnp.zeros(BATCH, jnp.int32), "anchors": jnp.full(BATCH, anchor, jnp.int32)}
    bucket = f"verify batch={BATCH} length={LENGTH} k=0"
    after = rig.run(bucket, arrays, active=[True] * BATCH, ends=NO_ENDS)
    assert not find_differences(after, 2, hybrid, "p00.state_prompt", models.target.recurrent)


@pytest.mark.parametrize("source, destination, pages", [(2, 0, (0, 0)), (2, BATCH, (4, 16)), (BATCH + 1, 1, (17, 5))])
def test_move_copies_a_slot_saves_its_state_or_restores_it(rig, started, source, destination, pages):
    arrays = {**started, **{name: started[name].at[:, BATCH + 1].set(7) for name in STATES}}
    arrays |= {name: started[name].at[:, 17].set(8) for name in ("target_k", "target_v", "draft_k", "draft_v")}
    places = {"source": source, "destination": destination, "source_page": pages[0], "destination_page": pages[1]}
    moved = rig.run("move", arrays, length=[9], **{name: [number] for name, number in places.items()})
    for name, array in arrays.items():
        copied = places if name in STATES else {}
        if name.startswith(("target_", "draft_")) and array.ndim == 5:
            copied = dict(zip(("source", "destination"), pages, strict=True))
        expected = np.array(array)
        if copied:
            expected[:, copied["destination"]] = expected[:, copied["source"]]
        elif name in ("lengths", "anchors") and max(source, destination) < BATCH:
            expected[destination] = expected[source]
        elif name == "lengths" and source >= BATCH:
            expected[destination] = 9
        np.testing.assert_array_equal(moved[name], expected, name)


def test_page_and_state_come_back_from_their_copies(rig, started):
    kept = dict(started)
    copied = rig.run("read_state", rig.run("read_page", started, index=[4]), index=[2])
    arrays = rig.run("write_state", rig.run("write_page", copied, index=[9]), index=[0], length=[21])
    for name, array in kept.items():
        expected = np.array(array)
        if name in (*STATES, *KV_POOLS):
            source, destination = (2, 0) if name in STATES else (4, 9)
            expected[:, destination] = expected[:, source]
        elif name == "lengths":
            expected[0] = 21
        np.testing.assert_array_equal(arrays[name], expected, name)
