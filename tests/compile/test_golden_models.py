"""Both models against the reference implementation, without kv cache and programs."""

import dataclasses
import json

import numpy as np
import pytest
from msgspec import structs

from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.compile.models.block_convolution import convolve

DFLASH2 = ["dflash2", "dflash2_speculators", "dflash2_sliding"]
TOLERANCE = 1e-4  # two independent float32 implementations agreed within 2.5e-5


def prompts_with(golden, name):
    """Prompts of the golden set that have this tensor, each with the tensor."""
    found = [
        (p, golden.arrays[f"{p['key']}.{name}"])
        for p in golden.facts["prompts"]
        if f"{p['key']}.{name}" in golden.arrays
    ]
    assert found, f"{golden.directory.name} has no {name}"
    return found


def assert_close(actual, expected, where):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=str(where))


def committed(prompt, cycle):
    """All tokens committed before a cycle, without the anchor."""
    new = [prompt["first_token"], *(token for past in prompt["cycles"][:cycle] for token in past["committed"])]
    return [*prompt["prompt_ids"], *new][: prompt["cycles"][cycle]["start"]]


@pytest.fixture(params=["tied", "untied", "swa", "llama"], scope="session")
def golden(request, runs):
    """Runs with all intermediate tensors of the reference."""
    return runs[request.param]


@pytest.fixture(scope="session")
def models(golden, load_models):
    return load_models(golden.target, golden.draft)


@pytest.fixture(scope="session")
def models_of_reading(reading, load_models):
    return load_models(reading.target, reading.draft)


@pytest.mark.parametrize("reading", ["tied", "untied", "swa", "llama", "llama3rope", "pruned"], indirect=True)
def test_prompt_features_equal_the_reference(reading, models_of_reading):
    for prompt, expected in prompts_with(reading, "context_features"):
        assert_close(models_of_reading.features(prompt["prompt_ids"]), expected, prompt["name"])


def test_prompt_logits_equal_the_reference(reading, models_of_reading):
    for prompt, expected in prompts_with(reading, "prefill_logits_last"):
        logits = models_of_reading.read(prompt["prompt_ids"], models_of_reading.draft.target_layer_ids)[0][-1]
        assert_close(logits, expected, prompt["name"])
        assert logits.argmax() == prompt["first_token"]


def test_first_block_draft_logits_equal_the_reference(reading, models_of_reading):
    for prompt, expected in prompts_with(reading, "cycle0_draft_logits"):
        features = models_of_reading.features(prompt["prompt_ids"])
        assert_close(models_of_reading.draft_logits(features, prompt["first_token"]), expected, prompt["name"])


@pytest.mark.parametrize(
    "reading",
    ["tied", "untied", "swa", "anchored", "anchored_noncausal", "llama", "pruned", "softcap", *DFLASH2],
    indirect=True,
)
def test_first_block_hidden_states_equal_the_reference(reading, models_of_reading):
    for prompt, expected in prompts_with(reading, "cycle0_draft_hidden"):
        features = models_of_reading.features(prompt["prompt_ids"])
        assert_close(models_of_reading.draft_hidden(features, prompt["first_token"]), expected, prompt["name"])


@pytest.mark.parametrize("reading", DFLASH2, indirect=True)
def test_first_block_candidates_and_scores_equal_the_reference(reading, models_of_reading):
    """Scores given the drafted token before, for the candidates in the order of falling logits."""
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


@pytest.mark.parametrize("reading", DFLASH2, indirect=True)
def test_convolutions_equal_the_reference(reading, models_of_reading):
    """Of every layer, before and after attention and MLP; coefficients depend on the normed input of the sublayer."""
    layers, compared = models_of_reading.dflash.layers, 0
    for sublayer in ("attention", "mlp"):
        names = [f"debug.draft_{sublayer}_conv_{part}" for part in ("input", "prepared", "before_finish", "finished")]
        for prompt, inputs in prompts_with(reading, names[0]):
            prepared, before_finish, finished = (reading.arrays[f"{prompt['key']}.{name}"] for name in names[1:])
            for index, h in enumerate(inputs):
                convolved, after = getattr(layers[index], f"{sublayer}_conv").convolve_input(h[None])
                assert_close(convolved[0], prepared[index], f"{sublayer} {index} before")
                assert_close(convolve(before_finish[None, index], after)[0], finished[index], f"{sublayer} {index}")
                compared += 1
    assert compared == 2 * models_of_reading.draft.decoder.layers


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


@pytest.mark.parametrize("cycle", [0, 1, 2])
def test_verification_logits_equal_the_reference(golden, models, cycle):
    for prompt, expected in prompts_with(golden, f"cycle{cycle}_target_logits"):
        block = prompt["cycles"][cycle]["block"]
        logits, _ = models.read(committed(prompt, cycle) + block, models.draft.target_layer_ids)
        assert_close(logits[-len(block) :], expected, prompt["name"])


@pytest.mark.parametrize("cycle", [1, 2])
def test_later_blocks_condition_on_the_committed_tokens(golden, models, cycle):
    for prompt, expected in prompts_with(golden, f"cycle{cycle}_draft_logits"):
        features = models.features(committed(prompt, cycle))
        new = golden.arrays[f"{prompt['key']}.cycle{cycle}_new_context_features"]
        assert_close(features[-len(new) :], new, prompt["name"])
        assert_close(models.draft_logits(features, prompt["cycles"][cycle]["block"][0]), expected, prompt["name"])


def test_every_target_layer_equals_the_reference(golden, models):
    layers = models.target.decoder.layers
    for prompt, (embedded, *hidden, normed) in prompts_with(golden, "debug.target_hidden_states"):
        _, features = models.read(prompt["prompt_ids"], tuple(range(layers)))
        found = np.split(features, layers, axis=-1)
        assert_close(models.embed(prompt["prompt_ids"]), embedded, "embedding")
        for index, expected in enumerate(hidden):
            assert_close(found[index], expected, f"layer {index}")
        assert_close(models.causal_lm.model.norm(found[-1]), normed, "final norm")


def test_draft_context_equals_the_reference(golden, models):
    draft = models.dflash
    for prompt, expected in prompts_with(golden, "debug.draft_fc_out"):
        projected = draft.fc(golden.arrays[f"{prompt['key']}.context_features"])
        assert_close(projected, expected, "fc")
        assert_close(draft.hidden_norm(projected), golden.arrays[f"{prompt['key']}.debug.draft_context_hidden"], "norm")


def test_block_embedding_equals_the_reference(golden, models):
    for prompt, expected in prompts_with(golden, "debug.draft_noise_embedding"):
        ids = models.block_ids(prompt["first_token"])
        assert ids == golden.arrays[f"{prompt['key']}.debug.draft_block_input_ids"].tolist()
        assert_close(models.embed(ids), expected, "embedding of the block")


def test_every_draft_layer_equals_the_reference(golden, models):
    for prompt, outputs in prompts_with(golden, "debug.draft_layer_outputs"):
        features = models.features(prompt["prompt_ids"])
        for index, output in enumerate(outputs):
            found = models.first_layers(index + 1).draft_hidden(features, prompt["first_token"])
            assert_close(found, models.dflash.norm(output), f"layer {index}, normed")


def test_rotary_frequencies_equal_the_reference(golden, models):
    for role, decoder in (("target", models.target.decoder), ("draft", models.draft.decoder)):
        expected = golden.arrays[f"rope.{role}_inv_freq"]
        np.testing.assert_allclose(decoder.rope.inverse_frequencies(), expected, rtol=1e-6)


@pytest.mark.parametrize("key", ["tied", "llama3rope"])
def test_newer_config_layouts_give_the_same_facts(runs, golden_directory, key):
    run = runs[key]

    def newer(place):
        path = golden_directory / "alt_configs" / f"{run.directory.name}.{place.name}.v5.config.json"
        return ConfigFile(path, json.loads(path.read_text()))

    target = read_target(read_config(run.target))
    assert read_target(newer(run.target)) == target
    assert read_draft(newer(run.draft), target) == read_draft(read_config(run.draft), target)


def test_comparison_fails_for_an_aux_layer_that_is_off_by_one(tied, load_models):
    models = load_models(tied.target, tied.draft)
    late = dataclasses.replace(models, draft=structs.replace(models.draft, target_layer_ids=(2, 4)))
    prompt, expected = prompts_with(tied, "context_features")[3]
    with pytest.raises(AssertionError, match="len30"):
        assert_close(late.features(prompt["prompt_ids"]), expected, prompt["name"])
