"""Prefill, draft, verify and kv_write against the traces of the reference, several prompts in one batch."""

import numpy as np
import pytest

BATCH, LENGTH, CHUNK = 5, 208, 32  # 13 prompts, so the last batch has free rows


@pytest.fixture(params=["tied", "untied", "swa", "flash"], scope="session")
def traced(request, runs):
    """The other readings run through an engine: runtime/test_golden_runs.py."""
    return runs[request.param]


@pytest.fixture(scope="session")
def start(traced, load_models, make_rig):
    """The programs, and batches of prompts with the arrays after their prefill."""
    models, prompts = load_models(traced.target, traced.draft), traced.facts["prompts"]
    rig = make_rig(models, f"batch={BATCH} length={LENGTH} k={models.draft.block - 1} prefill={CHUNK}")
    batches = []
    for first in range(0, len(prompts), BATCH):
        batch, arrays = prompts[first : first + BATCH], rig.empty()
        for slot, prompt in enumerate(batch):
            arrays = rig.prefill(arrays, slot, prompt["prompt_ids"], CHUNK, padding=slot)
        batches.append((batch, arrays))
    return rig, batches


def test_prefill_chooses_the_first_tokens_of_the_reference(start):
    _, batches = start
    for prompts, arrays in batches:
        assert arrays["anchors"].tolist()[: len(prompts)] == [prompt["first_token"] for prompt in prompts]
        assert arrays["lengths"].tolist()[: len(prompts)] == [len(prompt["prompt_ids"]) for prompt in prompts]


def test_every_round_of_every_prompt_equals_the_reference(traced, start):
    rig, batches = start
    block = traced.facts["block_size"]
    bucket = f"batch={BATCH} length={LENGTH} k={block - 1}"
    for prompts, arrays in batches:
        cycles = [prompt["cycles"] for prompt in prompts] + [[]] * (BATCH - len(prompts))
        for round_ in range(max(map(len, cycles))):
            active = [round_ < len(trace) for trace in cycles]
            arrays = rig.run(f"draft {bucket}", arrays)
            arrays = rig.run(f"verify {bucket}", arrays, active=active)
            arrays = rig.run(f"kv_write rows={BATCH} width={block}", arrays, slots=range(BATCH))
            starts, blocks, verdict = (np.asarray(arrays[name]).tolist() for name in ("starts", "block", "verdict"))
            for slot in np.flatnonzero(active):
                accepted, drafted, chosen = verdict[slot][0], verdict[slot][1:block], verdict[slot][block:]
                found = {
                    "start": starts[slot],
                    "block": blocks[slot],
                    "posterior": chosen,
                    "acceptance": accepted,
                    "committed": [*drafted[:accepted], chosen[accepted]],
                }
                expected = cycles[slot][round_]
                assert found == {name: expected[name] for name in found}, f"{prompts[slot]['name']}, round {round_}"
