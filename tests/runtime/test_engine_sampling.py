"""Sampling in the engine: a seed gives the same text whatever else runs, with the target's probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dflash_aot.runtime import Engine, SamplingParams

GREEDY = SamplingParams(max_tokens=40, stop_token_ids=())
Logits = Callable[[Sequence[int]], np.ndarray]
# The target is confident: only a high temperature changes its choices.
ASKED: dict[str, dict[str, Any]] = {
    "hot": {"temperature": 8.0},
    "top_k": {"temperature": 4.0, "top_k": 12},
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


@pytest.fixture(scope="module")
def logits(tied) -> Logits:
    """Token ids → the target's logits behind each, float64 [T, V], computed by transformers in one pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tied.target, dtype=torch.float32).eval()

    @cache
    def compute(tokens: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].double().numpy()

    return lambda tokens: compute(tuple(tokens))


def log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def sample(tokens: int = 30, seed: int = 5, **asked: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, stop_token_ids=(), seed=seed, **asked)


# -- the same seed, the same text


@pytest.mark.parametrize("name", ["sampled_small", "sampled_dflash2"])
def test_seeded_text_of_other_bundles_depends_on_no_k(bundle, runs, name):
    """Of executables that are optimized, and of a DFlash2 draft."""
    prompts = {prompt["name"]: prompt["prompt_ids"] for prompt in runs["dflash2"].facts["prompts"]}
    with Engine.open(bundle(name)) as engine:
        for asked in ASKED.values():
            texts = [engine.generate(prompts["len30"], sample(k=k, **asked)).token_ids for k in (0, 7, None)]
            assert len(texts[0]) == 30 and texts == texts[:1] * 3
        assert engine.stats().failures == 0


def test_seeds_give_different_texts(engine, cases):
    seeds = [0, 1, 2, -1, 1 << 32, (1 << 63) - 1, -(1 << 63), None, None]
    params = [replace(sample(temperature=4.0), seed=seed) for seed in seeds]
    texts = {tuple(result.token_ids) for result in engine.generate_all([cases["len5"].prompt] * len(seeds), params)}
    assert len(texts) == len(seeds)


# -- sampling without a choice is greedy


@pytest.mark.parametrize("length", [1, 2, 17, 81])
def test_sampled_prompt_of_any_length_equals_greedy(engine, cases, length):
    """A sampled prompt's last token is not prefilled; a prompt of one token needs no prefill."""
    case = cases["len70"] if length > 40 else cases["len1"]
    prompt = (case.prompt + case.answer)[:length]
    greedy = engine.generate(prompt, replace(GREEDY, max_tokens=10, prefix_caching=False))
    chunks = engine.stats().prefill_chunks
    sampled = engine.generate(prompt, sample(10, temperature=1.0, top_k=1, prefix_caching=False))
    assert sampled.token_ids == greedy.token_ids
    assert (engine.stats().prefill_chunks == chunks) == (length == 1)


# -- against transformers


@pytest.mark.parametrize(("k", "asked"), [(0, ASKED["bias"]), (7, ASKED["top_k"]), (7, {}), (7, ASKED["penalties"])])
def test_log_probabilities_are_those_of_the_raw_logits(engine, cases, logits, asked, k):
    together = [cases[name] for name in ("len1", "len70", "len131")]
    wanted = (5, 20, 0)
    params = [sample(20, k=k, **{**asked, "logprobs": count}) for count in wanted]
    results = engine.generate_all([case.prompt for case in together], params)
    for case, result, count in zip(together, results, wanted, strict=True):
        rows = logits([*case.prompt, *result.token_ids])[len(case.prompt) - 1 : -1]
        assert [one.token_id for one in result.logprobs] == result.token_ids
        for row, told in zip(map(log_softmax, rows), result.logprobs, strict=True):
            assert told.logprob == pytest.approx(row[told.token_id], abs=2e-4)
            ids, values = zip(*told.top, strict=True) if told.top else ((), ())
            assert len(ids) == len(set(ids)) == count
            np.testing.assert_allclose(values, row[list(ids)], atol=2e-4)
            np.testing.assert_allclose(values, np.sort(row)[::-1][:count], atol=2e-4)
