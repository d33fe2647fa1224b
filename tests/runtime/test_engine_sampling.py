"""Sampling in the engine: a seed gives the same text whatever else runs."""

from typing import Any

import pytest

from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.runtime import Engine, SamplingParams

KS = (0, 3, 7)
# The target is confident: only a high temperature changes its choices.
ASKED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.0},
    "hot": {"temperature": 8.0},
    "top_k": {"temperature": 4.0, "top_k": 12},
    "top_p": {"temperature": 3.0, "top_p": 0.7},
    "min_p": {"temperature": 4.0, "min_p": 0.1},
    "penalties": {"temperature": 1.5, "repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "bias": {"temperature": 2.0, "logit_bias": {3: 4.0, 489: -100.0}},
    "all": {
        "temperature": 2.5,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.001,
        "frequency_penalty": 0.5,
        "logit_bias": {5: 1.0},
        "logprobs": 4,
    },
}


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.open(bundle("sampled")) as engine:
        yield engine
        assert (engine.stats().compile_events, engine.stats().failures) == (0, 0)


def sample(tokens: int = 30, seed: int = 5, **asked: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, stop_token_ids=(), seed=seed, **asked)


# -- the same seed, the same text


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_seeded_text_is_the_same_for_every_k(engine, cases, asked):
    for name in ("len1", "len131"):
        texts = [engine.generate(cases[name].prompt, sample(k=k, **asked)).token_ids for k in (*KS, None)]
        assert len(texts[0]) == 30 and texts == texts[:1] * len(texts)
        assert texts[0] != cases[name].answer[:30]


@pytest.mark.parametrize("name", ["sampled_small", "sampled_dflash2"])
def test_seeded_text_of_other_bundles_depends_on_no_k(bundle, runs, name):
    """Of executables that are optimized, and of a DFlash2 draft."""
    prompts = {prompt["name"]: prompt["prompt_ids"] for prompt in runs["dflash2"].facts["prompts"]}
    with Engine.open(bundle(name)) as engine:
        for asked in ASKED.values():
            texts = [engine.generate(prompts["len30"], sample(k=k, **asked)).token_ids for k in (0, 7, None)]
            assert len(texts[0]) == 30 and texts == texts[:1] * 3
        assert engine.stats().failures == 0


def test_seeded_text_depends_on_no_company_or_slot(engine, cases):
    names = ("len1", "len131")
    asked = [
        (cases[name].prompt, sample(12 + 5 * i, i, **one)) for i, one in enumerate(ASKED.values()) for name in names
    ]
    alone = [engine.generate(prompt, params).token_ids for prompt, params in asked]
    together = engine.generate_all([prompt for prompt, _ in asked], [params for _, params in asked])
    assert [result.token_ids for result in together] == alone
    backwards = engine.generate_all([prompt for prompt, _ in asked[::-1]], [params for _, params in asked[::-1]])
    assert [result.token_ids for result in backwards[::-1]] == alone


# -- sampling without a choice is greedy


def test_sampling_without_choice_equals_greedy(engine, cases):
    together = [cases[name] for name in ("len1", "len30", "random12")]
    for asked in (
        {"logprobs": 2},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1e-5},
    ):
        results = engine.generate_all([case.prompt for case in together], sample(40, **asked))
        assert [result.token_ids for result in results] == [case.answer[:40] for case in together]


# -- refusals


@pytest.mark.parametrize("asked", [{"temperature": 0.1}, {"logprobs": 0}])
def test_greedy_bundle_refuses_sampling_with_the_command(serve, asked):
    words = f"only greedy executables, .* {next(iter(asked))}.*dflash-precompile .*--sampling greedy,sample"
    with pytest.raises(GridMiss, match=words) as refusal:
        serve("tiny", 3).generate([1], SamplingParams(**asked))
    assert str(refusal.value).count("--sampling") == 1


def test_bias_of_an_unknown_token_is_refused(engine):
    with pytest.raises(BadInput, match="logit_bias holds 512.*0 to 511"):
        engine.generate([1], SamplingParams(logit_bias={512: 1.0}))
