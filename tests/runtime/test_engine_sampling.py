"""Sampling in the engine: a seed gives the same text whatever else runs, with the target's probabilities."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.runtime import Engine, SamplingParams
from tests.runtime.stepper import wait_until

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
def optimized_engine(bundle):
    """An engine whose executables are compiled as a user's build compiles them."""
    with Engine.open(bundle("sampled_small")) as engine:
        yield engine


@pytest.fixture(scope="module")
def dflash2_engine(bundle):
    with Engine.open(bundle("sampled_dflash2")) as engine:
        yield engine
        assert engine.stats().failures == 0


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
@pytest.mark.parametrize("name", ["len1", "len30", "len131"])
def test_seeded_text_is_the_same_for_every_k(engine, cases, asked, name):
    params = [sample(k=k, **asked) for k in (*KS, None)]
    texts = [engine.generate(cases[name].prompt, one).token_ids for one in params]
    assert len(texts[0]) == 30 and texts == texts[:1] * len(texts)
    assert texts[0] != cases[name].answer[:30]


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_seeded_text_of_optimized_executables_is_the_same_for_every_k(optimized_engine, cases, asked):
    texts = [optimized_engine.generate(cases["len30"].prompt, sample(k=k, **asked)).token_ids for k in (0, 7, None)]
    assert len(texts[0]) == 30 and texts == texts[:1] * 3


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_seeded_text_with_a_dflash2_draft_is_the_same_for_every_k(dflash2_engine, runs, asked):
    prompts = {prompt["name"]: prompt["prompt_ids"] for prompt in runs["dflash2"].facts["prompts"]}
    for name, seed in (("len5", 1), ("len30", 2)):
        results = [dflash2_engine.generate(prompts[name], sample(k=k, seed=seed, **asked)) for k in (0, 7, None)]
        texts = [result.token_ids for result in results]
        assert len(texts[0]) == 30 and texts == texts[:1] * 3


def test_seeded_text_is_the_same_beside_others_and_in_any_slot(engine, cases):
    names = ("len1", "len30", "len131")
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


def test_seeded_text_reaches_the_last_position(engine, cases):
    prompt = cases["len131"].prompt
    results = [
        engine.generate(prompt, SamplingParams(temperature=2.0, seed=1, stop_token_ids=(), k=k)) for k in (*KS, None)
    ]
    assert len(results[0].token_ids) == CAPACITY + 1 - len(prompt)
    assert [result.token_ids for result in results] == [results[0].token_ids] * len(results)


def test_text_continues_from_its_own_beginning(engine, cases):
    """Noise belongs to positions: a prompt that holds the text's start gets the rest."""
    prompt, params = cases["len5"].prompt, sample(temperature=3.0)
    whole = engine.generate(prompt, params).token_ids
    for cut in (1, 11, 12, 25):
        assert engine.generate(prompt + whole[:cut], params).token_ids[: 30 - cut] == whole[cut:]


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
@pytest.mark.parametrize("k", KS)
def test_sampling_without_choice_equals_greedy(engine, cases, asked, k):
    together = [cases[name] for name in ("len1", "len30", "len70", "len131", "random12")]
    results = engine.generate_all([case.prompt for case in together], sample(40, k=k, **asked))
    assert [result.token_ids for result in results] == [case.answer[:40] for case in together]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 64, 65, 66, 80, 81, 82])
def test_sampled_prompt_of_any_length_equals_greedy(engine, cases, length):
    """A sampled prompt's last token is not prefilled; a prompt of one token needs no prefill."""
    case = cases["len70"] if length > 40 else cases["len1"]
    prompt = (case.prompt + case.answer)[:length]
    greedy = engine.generate(prompt, replace(GREEDY, max_tokens=10, prefix_caching=False))
    chunks = engine.stats().prefill_chunks
    assert (
        engine.generate(prompt, sample(10, temperature=1.0, top_k=1, prefix_caching=False)).token_ids
        == greedy.token_ids
    )
    assert (engine.stats().prefill_chunks == chunks) == (length == 1)


@pytest.mark.parametrize("k", [*KS, None])
def test_greedy_requests_beside_sampled_ones_keep_their_text(engine, cases, k):
    names = [name for name in cases if len(cases[name].answer) >= 40]
    greedy = [(cases[name].prompt, replace(GREEDY, k=k)) for name in names]
    sampled = [
        (cases[name].prompt, sample(35, k=k, **asked)) for name, asked in zip(names, ASKED.values(), strict=False)
    ]
    mixed = [one for pair in zip(greedy, sampled, strict=True) for one in pair]
    results = engine.generate_all([prompt for prompt, _ in mixed], [params for _, params in mixed])
    assert [result.token_ids for result in results[::2]] == [cases[name].answer[:40] for name in names]
    assert all(result.logprobs is None for result in results[::2])


def test_slot_forgets_the_sampling_state_of_its_last_request(engine, cases):
    """Greedy requests in sampled rounds, and sampled requests with fewer parameters."""
    case = cases["len5"]
    plain = sample(20, temperature=3.0)
    alone = engine.generate(case.prompt, plain).token_ids
    heavy = sample(5, temperature=2.0, repetition_penalty=5.0, logit_bias={token: 50.0 for token in range(100)})
    engine.generate_all([case.prompt] * 3, heavy)
    together = engine.generate_all([case.prompt] * 4, [plain, replace(GREEDY, max_tokens=20), plain, plain])
    assert [result.token_ids for result in together] == [alone, case.answer[:20], alone, alone]


def test_stats_count_sampled_rounds(engine, cases):
    def count(sampled: bool) -> int:
        return sum(rounds for (_, one), rounds in engine.stats().bucket_rounds.items() if one is sampled)

    def settle() -> tuple[int, int]:
        wait_until(lambda: engine._loop.is_idle)
        return count(True), count(False)

    before = settle()
    engine.generate(cases["len5"].prompt, replace(GREEDY, k=0))
    between = settle()
    assert between[0] == before[0] and between[1] >= before[1] + 39
    engine.generate(cases["len5"].prompt, sample(40, temperature=1.0, k=0))
    after = settle()
    assert after[0] >= between[0] + 40 and after[1] == between[1]


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
    for k in KS:
        results = engine.generate_all([case.prompt for case in together], sample(24, k=k, **asked))
        texts = [result.token_ids for result in results]
        assert [len(text) for text in texts] == [24] * 3 and texts != [case.answer[:24] for case in together]
        for case, text in zip(together, texts, strict=True):
            assert choose_slowly(logits, case.prompt, text, **asked) == list(text)


def test_slow_path_without_penalties_is_greedy(cases, logits):
    case = cases["len30"]
    assert choose_slowly(logits, case.prompt, case.answer[:20]) == case.answer[:20]


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


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("asked", [{}, *(ASKED[name] for name in ("hot", "top_k", "penalties", "bias"))])
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


def test_stream_carries_log_probabilities_of_its_tokens(engine, cases):
    params = sample(25, temperature=1.0, logprobs=2)
    stream = engine.stream(cases["len30"].prompt, params)
    deltas = list(stream)
    assert all([one.token_id for one in delta.logprobs] == list(delta.token_ids) for delta in deltas)
    assert [one for delta in deltas for one in delta.logprobs] == stream.result().logprobs


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
    for name in ("len1", "len30", "random12"):
        prompt = cases[name].prompt
        for limits in (asked, {}):
            text = engine.generate(prompt, sample(40, temperature=temperature, **limits)).token_ids
            rows = map(log_softmax, logits([*prompt, *text])[len(prompt) - 1 : -1] / temperature)
            drawn = [allowed(row)[token] for row, token in zip(rows, text, strict=True)]
            assert all(drawn) or not limits
            outside += drawn.count(False)
    assert outside > 20  # without limits other tokens are drawn


@pytest.mark.parametrize("k", [0, 7])
def test_pairs_of_tokens_follow_their_probabilities(engine, cases, logits, k):
    """Two draws of the two likeliest tokens give four texts; chi-squared (3 degrees) is below 16.3 in 99.9 %."""
    prompt, draws, temperature = cases["random12"].prompt, 600, 1.5
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


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.1},
        {"logprobs": 0},
        {"logit_bias": {1: 1.0}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
    ],
)
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


def test_concurrent_sampling_equals_sampling_alone(engine, cases):
    asked = [(cases[name].prompt, sample(15, seed, temperature=3.0)) for name in ("len1", "len70") for seed in range(8)]
    alone = [engine.generate(prompt, params).token_ids for prompt, params in asked]
    with ThreadPoolExecutor(8) as pool:
        assert [result.token_ids for result in pool.map(lambda one: engine.generate(*one), asked)] == alone
