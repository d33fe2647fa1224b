"""Multi-round steps: several rounds of a single request in one dispatch give the tokens of single rounds."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from dflash_aot.cache.signature import MAX_STOP_TOKENS
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.speculation.cost_model import BurstLength
from tests.runtime.toy import (
    BLOCK,
    SAMPLED,
    ToyEngine,
    always,
    by_first_token,
    continue_alone,
    programs,
)

PLAIN = "batch=1,2 length=32,128 k=0,3,7 prefill=8"
BURSTS = f"{PLAIN} rounds=4"
PROMPT = [3, 1, 4, 1, 5]


def serve(buckets: str, prompt: Sequence[int], tokens: int, **asked: Any) -> tuple[ToyEngine, Any]:
    device = {name: asked.pop(name) for name in ("right", "k") if name in asked}
    engine = ToyEngine(buckets, **device)
    request = engine.submit(prompt, tokens, **asked)
    engine.run()
    engine.check(request)
    return engine, request


@pytest.mark.parametrize("k", [0, 3, 7])
@pytest.mark.parametrize("right", [0, 2, BLOCK])
def test_multi_round_steps_give_the_tokens_of_single_rounds(k: int, right: int):
    _, plain = serve(PLAIN, PROMPT, 60, k=k, right=always(right), trace=True)
    engine, request = serve(BURSTS, PROMPT, 60, k=k, right=always(right), trace=True)
    assert engine.calls("rounds"), "nothing was dispatched together"
    assert (request.token_ids, request.accepted, request.drafted) == (plain.token_ids, plain.accepted, plain.drafted)


def test_multi_round_steps_run_no_needless_round():
    engine, request = serve(BURSTS, PROMPT, 60, k=3, right=always(2))
    assert engine.bundle.ran == len(request.accepted) == engine.loop.stats().rounds
    assert len(engine.calls("rounds")) < engine.bundle.ran and not engine.calls("verify")


def test_device_stops_at_an_end_token():
    alone = continue_alone(PROMPT, 60)
    stop = next(token for place, token in enumerate(alone) if place > 30 and token not in alone[:place])
    _, plain = serve(PLAIN, PROMPT, 60, k=3, right=always(1), stop_token_ids=[stop])
    engine, request = serve(BURSTS, PROMPT, 60, k=3, right=always(1), stop_token_ids=[stop])
    assert request.finish_reason == "stop" and request.accepted == plain.accepted
    assert engine.bundle.ran == len(request.accepted)


def test_host_finds_end_tokens_beyond_those_of_the_device():
    alone = continue_alone(PROMPT, 60)
    stop = next(token for place, token in enumerate(alone) if place > 30 and token not in alone[:place])
    absent = [token for token in range(-MAX_STOP_TOKENS - 5, 0)]
    assert len(absent) > MAX_STOP_TOKENS
    _, request = serve(BURSTS, PROMPT, 60, k=3, right=always(1), stop_token_ids=[*absent, stop])
    assert request.finish_reason == "stop" and request.token_ids[-1] == stop


@pytest.mark.parametrize("tokens", [120, 121, 123, 124])  # 124: to the grid's end, and one beyond it that has no kv
def test_multi_round_step_shrinks_near_the_capacity(tokens: int):
    engine, request = serve(BURSTS, PROMPT, tokens, k=7, right=always(7))
    assert len(request.token_ids) == tokens and engine.calls("rounds")


def test_only_a_single_request_gets_multi_round_steps():
    engine = ToyEngine(BURSTS, k=3, right=always(1))
    first = engine.submit(PROMPT, 90)
    for _ in range(4):
        engine.step()
    assert "rounds" in programs(engine.steps[-1])
    second = engine.submit([2, 7], 12)
    together = []
    while second.finish_reason is None:
        engine.step()
        together += [call for call in engine.steps[-1] if call.program == "rounds"]
    assert not together
    engine.run()
    assert "rounds" in programs([call for step in engine.steps[-6:] for call in step])
    engine.check(first)
    engine.check(second)


def test_sampled_request_gets_single_rounds():
    engine, _ = serve(BURSTS, PROMPT, 40, k=3, **SAMPLED)
    assert not engine.calls("rounds")


def test_cancelled_request_frees_its_slot_after_a_multi_round_step():
    engine = ToyEngine("batch=1 length=128 k=0,3 prefill=8 rounds=4", k=3, right=always(1))
    first, second = engine.submit(PROMPT, 90), engine.submit([2, 7], 40)
    while not engine.calls("rounds"):
        engine.step()
    first.cancel()
    engine.run()
    assert first.finish_reason == "cancelled" and second.finish_reason == "length"
    engine.check(first)
    engine.check(second)


def test_failed_multi_round_step_ends_its_request_only():
    engine = ToyEngine(BURSTS, k=3, right=always(1))
    for broken in ("rounds", "read rounds"):
        first = engine.submit(PROMPT, 60)
        engine.bundle.fail(broken)
        engine.run()
        assert first.finish_reason == "error" and "was told to fail" in (first.error or "")
        engine.check(first)
    last = engine.submit(PROMPT, 60)
    engine.run()
    engine.check(last)


def test_random_multi_round_schedules_give_each_its_own_text():
    rng = random.Random(5)
    for _ in range(40):
        engine = ToyEngine(BURSTS, k=rng.choice([0, 3, 7]), right=by_first_token)
        for _ in range(rng.randrange(1, 7)):
            request = engine.submit(
                [rng.randrange(8) for _ in range(rng.randrange(1, 20))],
                rng.randrange(1, 100),
                stop_token_ids=rng.sample(range(97), rng.randrange(3)),
            )
            for _ in range(rng.randrange(12)):
                engine.step()
            if rng.random() < 0.2:
                request.cancel()
        engine.run()
        for request in engine.requests:
            engine.check(request)


def test_burst_length_follows_round_times():
    pace, bucket = BurstLength(max_rounds=8, burst_seconds=0.05), ToyEngine(BURSTS).grid.fit(1, 8, 3)
    assert pace.choose(bucket, room=9) == 1, "no time is known yet"
    pace.note_round_time(bucket, 0.01)
    assert pace.choose(bucket, room=9) == 5
    assert pace.choose(bucket, room=2) == 2
    pace.note_round_time(bucket, 0.03)  # the mean is 0.015 now
    assert pace.choose(bucket, room=9) == 3
    for _ in range(40):
        pace.note_round_time(bucket, 0.2)
    assert pace.choose(bucket, room=9) == 1


@pytest.mark.parametrize("k", [0, 7])
def test_real_bundle_gives_the_same_tokens_with_and_without_multi_rounds(bundle: Any, k: int):
    prompts = [[5, 9, 200, 31], list(range(40, 100))]
    params = SamplingParams(max_tokens=90, stop_token_ids=())
    with Engine.open(bundle("one row"), k=k) as engine:
        plain = [engine.generate(prompt, params) for prompt in prompts]
    with Engine.open(bundle("bursts"), k=k) as engine:
        burst = [engine.generate(prompt, params) for prompt in prompts]
        calls = engine.stats()
    assert [one.token_ids for one in burst] == [one.token_ids for one in plain]
    assert [one.accepted for one in burst] == [one.accepted for one in plain]
    assert calls.rounds == sum(len(one.accepted) for one in burst) and calls.compile_events == 0
