"""Prefill, draft, verify and kv_write against the traces of the reference, several prompts in one batch."""

import numpy as np

BATCH, LENGTH, CHUNK = 5, 208, 32  # 13 prompts, so the last batch has free rows


def test_rounds_of_every_prompt_equal_the_reference(runs, load_models, make_rig):
    """In the run with sliding windows. The other runs go through an engine: runtime/test_golden_runs.py."""
    run = runs["swa"]
    models, block = load_models(run.target, run.draft), run.facts["block_size"]
    bucket = f"batch={BATCH} length={LENGTH} k={block - 1}"
    rig = make_rig(models, f"{bucket} prefill={CHUNK}")
    for first in range(0, len(run.facts["prompts"]), BATCH):
        prompts, arrays = run.facts["prompts"][first : first + BATCH], rig.empty()
        for slot, prompt in enumerate(prompts):
            arrays = rig.prefill(arrays, slot, prompt["prompt_ids"], CHUNK, padding=slot)
        assert arrays["anchors"].tolist()[: len(prompts)] == [prompt["first_token"] for prompt in prompts]
        assert arrays["lengths"].tolist()[: len(prompts)] == [len(prompt["prompt_ids"]) for prompt in prompts]
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
