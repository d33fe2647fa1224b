"""Sampling in the engine: a seed gives the same text whatever else runs, with the target's probabilities."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.runtime import Engine, SamplingParams

KS = (0, 3, 7)
VOCABULARY, CAPACITY = 512, 208
GREEDY = SamplingParams(max_tokens=40, stop_token_ids=())
Logits = Callable[[Sequence[int]], np.ndarray]
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


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_seeded_text_is_the_same_for_every_k(engine, cases, asked):
    for name in ("len1", "len131"):
        texts = [engine.generate(cases[name].prompt, sample(k=k, **asked)).token_ids for k in (*KS, None)]
        assert len(texts[0]) == 30 and texts == texts[:1] * len(texts)
        assert texts[0] != cases[name].answer[:30]


@pytest.mark.parametrize("name", ["sampled_small", "sampled_dflash2"])
def test_seeded_text_of_other_bundles_is_the_same_for_every_k(bundle, runs, name):
    """Of executables that are optimized, and of a DFlash2 draft."""
    prompts = {prompt["name"]: prompt["prompt_ids"] for prompt in runs["dflash2"].facts["prompts"]}
    with Engine.open(bundle(name)) as engine:
        for asked in ASKED.values():
            texts = [engine.generate(prompts["len30"], sample(k=k, **asked)).token_ids for k in (0, 7, None)]
            assert len(texts[0]) == 30 and texts == texts[:1] * 3
        assert engine.stats().failures == 0


def test_seeded_text_is_the_same_beside_others_and_in_any_slot(engine, cases):
    names = ("len1", "len131")
    asked = [
        (cases[name].prompt, sample(12 + 5 * i, i, **one)) for i, one in enumerate(ASKED.values()) for name in names
    ]
    alone = [engine.generate(prompt, params).token_ids for prompt, params in asked]
    together = engine.generate_all([prompt for prompt, _ in asked], [params for _, params in asked])
    assert [result.token_ids for result in together] == alone
    backwards = engine.generate_all([prompt for prompt, _ in asked[::-1]], [params for _, params in asked[::-1]])
    assert [result.token_ids for result in backwards[::-1]] == alone


def test_moved_sampled_request_goes_on_where_it_was(engine, cases):
    prompt, params, moves = cases["len30"].prompt, sample(50, **ASKED["all"]), engine.stats().moves
    alone = engine.generate(prompt, params)
    prompts = [cases["len5"].prompt, cases["len1"].prompt, prompt]
    *_, together = engine.generate_all(prompts, [sample(2, temperature=1.0), replace(GREEDY, max_tokens=3), params])
    assert together.token_ids == alone.token_ids
    assert [one.token_id for one in together.logprobs] == together.token_ids
    assert engine.stats().moves > moves


def test_seeds_give_different_texts(engine, cases):
    seeds = [0, 1, 2, -1, 1 << 32, (1 << 63) - 1, -(1 << 63), None, None]
    params = [replace(sample(temperature=4.0), seed=seed) for seed in seeds]
    texts = {tuple(result.token_ids) for result in engine.generate_all([cases["len5"].prompt] * len(seeds), params)}
    assert len(texts) == len(seeds)


# -- sampling without a choice is greedy


CERTAIN: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "no bias": {"logit_bias": {1: 0.0}},
    "top_k": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.0, "min_p": 1.0},
    "cold": {"temperature": 1e-5},
    "colder": {"temperature": 1e-44},
}


@pytest.mark.parametrize("asked", CERTAIN.values(), ids=CERTAIN)
def test_sampling_without_choice_equals_greedy(engine, cases, asked):
    together = [cases[name] for name in ("len1", "len30", "random12")]
    for k in (0, 7):
        results = engine.generate_all([case.prompt for case in together], sample(40, k=k, **asked))
        assert [result.token_ids for result in results] == [case.answer[:40] for case in together]


@pytest.mark.parametrize("length", [1, 2, 17, 18, 65, 81])
def test_sampled_prompt_of_any_length_equals_greedy(engine, cases, length):
    """A sampled prompt's last token is not prefilled; a prompt of one token needs no prefill."""
    case = cases["len70"] if length > 40 else cases["len1"]
    prompt = (case.prompt + case.answer)[:length]
    greedy = engine.generate(prompt, replace(GREEDY, max_tokens=10, prefix_caching=False))
    chunks = engine.stats().prefill_chunks
    sampled = engine.generate(prompt, sample(10, temperature=1.0, top_k=1, prefix_caching=False))
    assert sampled.token_ids == greedy.token_ids
    assert (engine.stats().prefill_chunks == chunks) == (length == 1)


def test_slot_forgets_the_sampling_state_of_its_last_request(engine, cases):
    """Greedy requests in sampled rounds, and sampled requests with fewer parameters."""
    case = cases["len5"]
    plain = sample(20, temperature=3.0)
    alone = engine.generate(case.prompt, plain).token_ids
    heavy = sample(5, temperature=2.0, repetition_penalty=5.0, logit_bias={token: 50.0 for token in range(100)})
    engine.generate_all([case.prompt] * 3, heavy)
    together = engine.generate_all([case.prompt] * 4, [plain, replace(GREEDY, max_tokens=20), plain, plain])
    assert [result.token_ids for result in together] == [alone, case.answer[:20], alone, alone]


# -- against the slow, obvious path


def choose_slowly(
    logits: Logits,
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
) -> list[int]:
    """The greedy choice behind each beginning of a text, with penalties applied token by token.

    It equals the text if, and only if, greedy decoding token by token generates the text.
    """
    chosen = []
    for place, raw in enumerate(logits([*prompt, *text])[len(prompt) - 1 : -1]):
        row, before = raw.copy(), list(text[:place])
        for token, bias in (logit_bias or {}).items():
            row[token] += bias
        for token in {*prompt, *before}:
            row[token] *= repetition_penalty if row[token] < 0 else 1 / repetition_penalty
        for token in set(before):
            row[token] -= presence_penalty + frequency_penalty * before.count(token)
        runner_up, best = np.sort(row)[-2:]
        assert best - runner_up > 1e-4, "no case for a test: two tokens are as good as equal"
        chosen.append(int(row.argmax()))
    return chosen


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 3.0},
    "rewarded repetition": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 8.0},
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -2.0},
    "bias": {"logit_bias": {489: -5.0, 17: 4.0}},
    "all": {
        "repetition_penalty": 1.5,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "logit_bias": {2: 9.0, 0: -100.0},
    },
}


@pytest.mark.parametrize("asked", PENALTIES.values(), ids=PENALTIES)
def test_penalties_and_bias_equal_the_slow_path(engine, cases, logits, asked):
    together = [cases[name] for name in ("len1", "len5", "len30")]
    for k in (0, 7):
        results = engine.generate_all([case.prompt for case in together], sample(24, k=k, **asked))
        texts = [result.token_ids for result in results]
        assert [len(text) for text in texts] == [24] * 3 and texts != [case.answer[:24] for case in together]
        for case, text in zip(together, texts, strict=True):
            assert choose_slowly(logits, case.prompt, text, **asked) == list(text)


def test_bias_of_100_bans_or_forces_a_token(engine, cases):
    case = cases["len1"]
    banned = set(case.answer[:5])
    for temperature in (0.0, 1.0):
        asked = {"temperature": temperature, "logit_bias": dict.fromkeys(banned, -100.0)}
        assert not banned & set(engine.generate(case.prompt, sample(40, **asked)).token_ids)
        forced = engine.generate(case.prompt, sample(40, temperature=temperature, logit_bias={77: 100.0}))
        assert forced.token_ids == [77] * 40
    stopped = engine.generate(case.prompt, SamplingParams(logit_bias={77: 100.0}, stop_token_ids=[77], logprobs=0))
    assert (stopped.token_ids, stopped.finish_reason, len(stopped.logprobs)) == ([77], "stop", 1)


@pytest.mark.parametrize(("k", "asked"), [(0, ASKED["bias"]), (3, ASKED["top_k"]), (7, {}), (7, ASKED["penalties"])])
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


# What may be drawn of a row of log-probabilities, temperature included.
LIMITS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "top_k": ({"top_k": 4}, lambda row: row >= np.sort(row)[-4] - 1e-4),
    "top_p": ({"top_p": 0.6}, lambda row: sum_above(row) < 0.6 + 1e-4),
    "min_p": ({"min_p": 0.1}, lambda row: row >= row.max() + np.log(0.1) - 1e-4),
}


def sum_above(row: np.ndarray) -> np.ndarray:
    """For each token the probability mass of all likelier ones."""
    order = np.argsort(-row)
    mass = np.exp(row[order]).cumsum() - np.exp(row[order])
    return mass[np.argsort(order)]


@pytest.mark.parametrize(("asked", "allowed"), LIMITS.values(), ids=LIMITS)
def test_top_k_top_p_and_min_p_follow_the_target_probabilities(engine, cases, logits, asked, allowed):
    temperature, outside = 4.0, 0
    for name in ("len1", "random12"):
        prompt = cases[name].prompt
        for limits in (asked, {}):
            text = engine.generate(prompt, sample(40, temperature=temperature, **limits)).token_ids
            rows = map(log_softmax, logits([*prompt, *text])[len(prompt) - 1 : -1] / temperature)
            drawn = [allowed(row)[token] for row, token in zip(rows, text, strict=True)]
            assert all(drawn) or not limits
            outside += drawn.count(False)
    assert outside > 12  # without limits other tokens are drawn


def test_pairs_of_tokens_follow_their_probabilities(engine, cases, logits, k=7):
    """Two draws of the two likeliest tokens give four texts; chi-squared (3 degrees) is below 16.3 in 99.9 %."""
    prompt, draws, temperature = cases["random12"].prompt, 300, 1.5
    odds = {}
    first = log_softmax(logits(prompt)[-1] / temperature)
    for one in np.argsort(-first)[:2].tolist():
        second = log_softmax(logits([*prompt, one])[-1] / temperature)
        for two in np.argsort(-second)[:2].tolist():
            pairs = np.exp(np.sort(first)[-2:]), np.exp(np.sort(second)[-2:])
            odds[one, two] = np.exp(first[one]) / pairs[0].sum() * np.exp(second[two]) / pairs[1].sum()
    params = [sample(2, seed, temperature=temperature, top_k=2, k=k) for seed in range(draws)]
    texts = [tuple(result.token_ids) for result in engine.generate_all([prompt] * draws, params)]
    assert set(texts) <= set(odds)
    expected = {text: draws * share for text, share in odds.items()}
    assert min(expected.values()) > 5
    assert sum((texts.count(text) - count) ** 2 / count for text, count in expected.items()) < 16.3


# -- refusals


@pytest.mark.parametrize("asked", [{"temperature": 0.1}, {"logprobs": 0}])
def test_greedy_bundle_refuses_sampling_with_the_command(serve, asked):
    words = f"greedy executables only.* {next(iter(asked))}.*dflash-precompile .*--sampling greedy,sample"
    with pytest.raises(GridMiss, match=words) as refusal:
        serve("tiny", 3).generate([1], SamplingParams(**asked))
    assert str(refusal.value).count("--sampling") == 1


def test_neutral_parameters_need_no_sampling(serve, cases):
    params = SamplingParams(max_tokens=5, stop_token_ids=(), seed=3, top_k=5, top_p=0.5, min_p=0.5, logit_bias={})
    assert serve("tiny", 3).generate(cases["len5"].prompt, params).token_ids == cases["len5"].answer[:5]


def test_bias_of_an_unknown_token_is_refused(engine):
    with pytest.raises(BadInput, match="logit_bias holds 512.*0 to 511"):
        engine.generate([1], SamplingParams(logit_bias={VOCABULARY: 1.0}))
