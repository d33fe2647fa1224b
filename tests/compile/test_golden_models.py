"""Both models against the reference implementation, without kv cache and programs."""

import numpy as np
import pytest

DFLASH2 = ["dflash2", "dflash2_sliding"]
TOLERANCE = 1e-4  # two independent float32 implementations agreed within 2.5e-5


def prompts_with(golden, name):
    found = [
        (p, golden.arrays[f"{p['key']}.{name}"])
        for p in golden.facts["prompts"]
        if f"{p['key']}.{name}" in golden.arrays
    ]
    assert found, f"{golden.directory.name} has no {name}"
    return found


def assert_close(actual, expected, where):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=str(where))


@pytest.fixture(scope="session")
def models_of_reading(reading, load_models):
    return load_models(reading.target, reading.draft)


def test_prompt_logits_equal_the_reference(reading, models_of_reading):
    for prompt, expected in prompts_with(reading, "prefill_logits_last"):
        logits = models_of_reading.read(prompt["prompt_ids"], models_of_reading.draft.target_layer_ids)[0][-1]
        assert_close(logits, expected, prompt["name"])
        assert logits.argmax() == prompt["first_token"]


def test_first_block_draft_logits_equal_the_reference(reading, models_of_reading):
    for prompt, expected in prompts_with(reading, "cycle0_draft_logits"):
        features = models_of_reading.features(prompt["prompt_ids"])
        assert_close(models_of_reading.draft_logits(features, prompt["first_token"]), expected, prompt["name"])


@pytest.mark.parametrize("reading", DFLASH2, indirect=True)
def test_first_block_candidates_and_scores_equal_the_reference(reading, models_of_reading):
    for prompt, expected in prompts_with(reading, "cycle_candidates"):
        if not prompt["cycles"]:
            continue
        block = prompt["cycles"][0]["block"]
        tokens, scores = models_of_reading.draft_candidates(
            models_of_reading.features(prompt["prompt_ids"]), prompt["first_token"]
        )
        assert (prompt["name"], tokens.tolist()) == (prompt["name"], expected[0].tolist())
        before = [
            tokens.shape[1] - 1,
            *(list(row).index(token) for row, token in zip(tokens[:-1], block[1:-1], strict=True)),
        ]
        found = scores[np.arange(len(before)), before]
        assert_close(found, reading.arrays[f"{prompt['key']}.cycle_selector_scores"][0], prompt["name"])


def test_scores_of_a_markov_head_equal_the_reference(runs, load_models):
    """Without the bias of the token before, and with it."""
    run = runs["dspark"]
    models = load_models(run.target, run.draft)
    biased = {prompt["name"]: logits for prompt, logits in prompts_with(run, "cycle0_draft_logits")}
    for prompt, base in prompts_with(run, "cycle0_base_logits"):
        block = prompt["cycles"][0]["block"]
        logits = models.draft_logits(models.features(prompt["prompt_ids"]), block[0])
        assert_close(logits, base, prompt["name"])
        every = np.tile(np.arange(logits.shape[1], dtype=np.int32), (1, len(logits), 1))
        scores = models.dflash.markov_head.scores(logits[None], every, every, np.array(block[:1]))[0]
        before = [-1, *block[1:-1]]  # the anchor is the last of the tokens before the first position
        found = np.asarray(scores)[np.arange(len(before)), before]
        assert_close(found, biased[prompt["name"]], prompt["name"])


def test_pruned_vocabulary_choices_equal_the_reference(runs, load_models):
    run = runs["pruned"]
    models = load_models(run.target, run.draft)
    for prompt, expected in prompts_with(run, "cycle_draft_vocab_ids"):
        features = models.features(prompt["output_ids"])
        for cycle, own in zip(prompt["cycles"], expected, strict=True):
            start, block = cycle["start"], cycle["block"]
            chosen = models.draft_logits(features[:start], block[0]).argmax(-1)
            assert (prompt["name"], chosen.tolist()) == (prompt["name"], own.tolist())
            assert models.dflash.to_target(chosen).tolist() == block[1:]
