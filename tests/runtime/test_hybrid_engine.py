"""A hybrid target in an engine: random schedules with slot reuse, cancels and mixed K equal each request alone."""

import json
import random

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from dflash_aot.cache.arrays import KV_POOLS, RECURRENT_STATE
from dflash_aot.cache.signature import MOVE
from dflash_aot.compile import precompile
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.executables.self_test import SelfTestCaller
from dflash_aot.runtime.scheduler import scheduler
from tests.runtime.stepper import hold
from tests.runtime.traffic import THREADS, Tally, check_accounts, run_threads

GRID = "batch=3 length=96 k=0,7 prefill=16 rounds=3 page=8 kv_positions=160 saved_states=5"
TOKENS, EACH = 20, 240 // THREADS
SPICES = (
    {},
    {"logprobs": 2},
    {"temperature": 0.8, "seed": 3, "stop_token_ids": (4, 9)},
    {"temperature": 1.2, "seed": 4, "top_k": 9, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "logit_bias": {5: 1.5}},
)


@pytest.fixture(scope="module")
def hybrid_bundle(make_up, tmp_path_factory):
    pair, path = make_up("hybrid").places, tmp_path_factory.mktemp("hybrid") / "bundle"
    modes = ("greedy", "sample", "prompt_logprobs")
    precompile(
        pair["target"], pair["draft"], path, grid=GRID, platform="cpu", dtype="float32", sampling=modes, self_test=False
    )
    return path


def make_requests() -> list[tuple[list[int], dict]]:
    """Prompts of 1 to 50 tokens (up to four chunks), each with sampling parameters."""
    rng = random.Random(5)
    lengths = (1, 3, 16, 17, 50)
    return [([rng.randrange(31) for _ in range(size)], spice) for size in lengths for spice in SPICES]


def generate(engine: Engine, prompt: list[int], spice: dict, **options):
    params = SamplingParams(**{"max_tokens": TOKENS, "stop_token_ids": (), **spice})
    return engine.generate(prompt, params, **options)


@pytest.fixture(scope="module")
def alone(hybrid_bundle):
    """What each request gives alone, without a draft."""
    with Engine.open(hybrid_bundle, k=0, prefix_caching=False) as engine:
        return [generate(engine, *request).token_ids for request in make_requests()]


def test_prompt_logprobs_equal_those_of_transformers(hybrid_bundle, make_up):
    """Prompts of up to four chunks; the state of the recurrent layers goes from each to the next."""
    place = make_up("hybrid").places["target"]
    config = transformers.Qwen3_5TextConfig(**json.loads((place / "config.json").read_text()))
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    model.load_state_dict(load_file(place / "model.safetensors"))
    with Engine.open(hybrid_bundle, k=7) as engine:
        for prompt, _ in make_requests()[len(SPICES) :: len(SPICES)]:
            result = generate(engine, prompt, {"prompt_logprobs": 0})
            with torch.no_grad():
                expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), dim=-1).numpy()
            found = [score.logprob for score in result.prompt_logprobs[1:]]
            np.testing.assert_allclose(found, expected[range(len(prompt) - 1), prompt[1:]], atol=1e-4)


@pytest.mark.slow
def test_random_schedules_give_what_each_request_gives_alone(hybrid_bundle, alone):
    requests = make_requests()

    def send(engine: Engine, rng: random.Random) -> Tally:
        tally = Tally()
        for _ in range(EACH):
            number = rng.randrange(len(requests))
            prompt, spice = requests[number]
            tokens, k = rng.randint(1, TOKENS), rng.choice((None, 0, 7))
            params = SamplingParams(max_tokens=tokens, k=k, **{"stop_token_ids": (), **spice})
            stream = engine.stream(prompt, params, wait=True, priority=rng.randrange(3))
            if leaves := rng.random() < 0.4:
                for _ in zip(range(rng.randrange(4)), stream, strict=False):
                    pass
                stream.close()
            result = stream.result()
            tally.note(result)
            expected = alone[number][:tokens]
            if result.token_ids != (expected[: len(result.token_ids)] if leaves else expected):
                tally.wrong.append((number, k, result.token_ids, expected))
        return tally

    with Engine.open(hybrid_bundle, k="auto") as engine:
        tally = run_threads(lambda rng: send(engine, rng), seed=2)
        check_accounts(engine, tally)
        stats = engine.stats()
        assert min(stats.prefix_hits, stats.accepted, stats.state_evictions, stats.evictions) > 0
    assert tally.ends.total() == EACH * THREADS
    assert tally.ends["cancelled"] > 12


def test_next_turn_of_a_chat_starts_within_the_answer(hybrid_bundle, monkeypatch):
    """Wherever the answer is cut, and even where it ended within a block of accepted tokens."""
    monkeypatch.setattr(scheduler, "ANSWER_TOKENS", 16)
    prompt = [5, 3, 8, 3, 9]
    params = SamplingParams(max_tokens=90, stop_token_ids=())
    with Engine.open(hybrid_bundle, k=7) as engine:
        answer = engine.generate(prompt, params).token_ids
        for turn, end in enumerate((1, 2, 17, 31, 32, 33, 50, 69)):
            chat = {"k": turn % 2 * 7, "cache_salt": str(turn)}
            first = generate(engine, prompt, {**chat, "max_tokens": end})
            assert first.token_ids == answer[:end]
            after = generate(engine, prompt + answer[:end], {**chat, "max_tokens": 20})
            assert after.token_ids == answer[end : end + 20]
            # with K = 0 nothing is computed beyond the answer; else states are saved every 16 tokens or a step later
            least = len(prompt) + (end - 1 if not chat["k"] else max(0, end - 16 - 2 * 24))
            assert after.cached_tokens >= least


@pytest.mark.parametrize(("k", "spice"), [(0, {}), (7, {"temperature": 0.8, "seed": 3})], ids=["greedy", "sampled"])
def test_next_turn_starts_where_a_stop_token_ended_the_answer(hybrid_bundle, spice, k):
    """Whatever the device had accepted or begun after it; the last token of the first prompt may be a stop token."""
    prompt = [5, 3, 8, 3, 9]
    with Engine.open(hybrid_bundle, k=k) as engine:
        answer = generate(engine, prompt, {**spice, "max_tokens": 90, "cache_salt": "whole"}).token_ids
        stops = [token for token in dict.fromkeys(answer[:70]) if token != answer[0]]
        assert len(stops) > 3
        for stop in stops:
            end = answer.index(stop) + 1
            chat = {**spice, "cache_salt": str(stop)}
            first = generate(engine, prompt, {**chat, "stop_token_ids": (stop,), "max_tokens": 90})
            assert (first.token_ids, first.finish_reason) == (answer[:end], "stop")
            after = generate(engine, prompt + answer[:end], {**chat, "max_tokens": 20})
            assert after.token_ids == answer[end : end + 20]
            if stop != prompt[-1] or not spice:
                assert after.cached_tokens == len(prompt) + end - 1


def test_preempted_requests_continue_where_they_were(hybrid_bundle):
    """Two of them have pages for their prompts, one for its answer."""
    prompts = [[start] * 50 for start in (3, 4, 5)]
    with Engine.open(hybrid_bundle, k=7) as engine:
        options = {"max_tokens": 47, "temperature": 0.8, "seed": 3}
        alone = [generate(engine, one, {**options, "prefix_caching": False}).token_ids for one in prompts]
        with hold(engine):
            params = SamplingParams(stop_token_ids=(), **options)
            streams = [engine.stream(one, params) for one in prompts]
        assert [stream.result().token_ids for stream in streams] == alone
        assert engine.stats().preemptions > 0


def test_third_request_starts_behind_what_the_first_two_share(hybrid_bundle):
    shared = [number % 29 for number in range(41)]
    with Engine.open(hybrid_bundle, k=7) as engine:
        cached = [generate(engine, [*shared, 30, *[number] * 20], {}).cached_tokens for number in range(3)]
    assert cached == [0, 0, 40]


def test_restored_state_waits_for_its_prefill_while_others_decode(hybrid_bundle):
    prefix = [number * 7 % 29 for number in range(30)]
    with Engine.open(hybrid_bundle, k=7) as engine:
        alone = generate(engine, [*prefix, 4], {"prefix_caching": False}).token_ids
    with Engine.open(hybrid_bundle, k=7) as engine:
        generate(engine, prefix, {"max_tokens": 1})
        options = SamplingParams(max_tokens=90, stop_token_ids=()), SamplingParams(max_tokens=1, stop_token_ids=())
        first, second = (engine.stream([5] * size, one) for size, one in zip((3, 80), options, strict=True))
        third = generate(engine, [*prefix, 4], {}, priority=1)  # in a slot that was never used
        assert (third.token_ids, third.cached_tokens) == (alone, 30)
        assert len(first.result().token_ids) == 90 and second.result().finish_reason == "length"


def test_self_test_restores_a_state_and_copies_it(hybrid_bundle):
    with Engine.open(hybrid_bundle) as engine:
        manifest, bundle = engine.manifest, engine._bundle
        caller = SelfTestCaller(manifest.arrays_by_name(), manifest.target.facts.decoder.vocab, jax.devices()[:1])
        outputs = {output.name: output for output in caller.run(bundle.find(MOVE))}
    for name in RECURRENT_STATE:
        values, before = outputs[name].values, outputs[name].before
        for slot in (0, 1):
            np.testing.assert_array_equal(values[:, slot], before[:, manifest.grid.slots])
    for name in KV_POOLS:
        np.testing.assert_array_equal(outputs[name].values[:, 0], outputs[name].before[:, 1])
    lengths = outputs["lengths"]
    assert lengths.values[0] == lengths.values[1] != lengths.before[0]
