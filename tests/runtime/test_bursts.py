"""Several rounds of a row that is alone, in one dispatch: nothing of it is to be seen but in what the host calls."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from dflash_aot.cache.signature import MAX_STOP_TOKENS
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.speculation.burst_length import BurstLength
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
    request = engine.ask(prompt, tokens, **asked)
    engine.run()
    engine.check(request)
    return engine, request


@pytest.mark.parametrize("k", [0, 3, 7])
@pytest.mark.parametrize("right", [0, 2, BLOCK])
def test_tokens_and_rounds_are_those_of_one_round_at_a_time(k: int, right: int):
    _, plain = serve(PLAIN, PROMPT, 60, k=k, right=always(right), trace=True)
    engine, request = serve(BURSTS, PROMPT, 60, k=k, right=always(right), trace=True)
    assert engine.calls("rounds"), "nothing was dispatched together"
    assert (request.token_ids, request.accepted, request.drafted) == (plain.token_ids, plain.accepted, plain.drafted)


def test_no_round_runs_for_nothing_though_the_next_dispatch_goes_out_before_the_last_is_read():
    engine, request = serve(BURSTS, PROMPT, 60, k=3, right=always(2))
    assert engine.bundle.ran == len(request.accepted) == engine.loop.stats().rounds
    assert len(engine.calls("rounds")) < engine.bundle.ran and not engine.calls("verify")


def test_the_device_stops_at_a_token_that_ends_the_answer():
    alone = continue_alone(PROMPT, 60)
    stop = next(token for place, token in enumerate(alone) if place > 30 and token not in alone[:place])
    _, plain = serve(PLAIN, PROMPT, 60, k=3, right=always(1), stop_ids=[stop])
    engine, request = serve(BURSTS, PROMPT, 60, k=3, right=always(1), stop_ids=[stop])
    assert request.finish_reason == "stop" and request.accepted == plain.accepted
    assert engine.bundle.ran == len(request.accepted)


def test_of_more_ends_than_the_device_looks_for_the_host_sees_the_others():
    alone = continue_alone(PROMPT, 60)
    stop = next(token for place, token in enumerate(alone) if place > 30 and token not in alone[:place])
    absent = [token for token in range(-MAX_STOP_TOKENS - 5, 0)]
    assert len(absent) > MAX_STOP_TOKENS
    _, request = serve(BURSTS, PROMPT, 60, k=3, right=always(1), stop_ids=[*absent, stop])
    assert request.finish_reason == "stop" and request.token_ids[-1] == stop


@pytest.mark.parametrize("tokens", [120, 121, 123, 124])  # 124: to the grid's end, and one beyond it that has no kv
def test_at_the_end_of_the_grid_rounds_get_fewer_and_nothing_is_written_beyond(tokens: int):
    engine, request = serve(BURSTS, PROMPT, tokens, k=7, right=always(7))
    assert len(request.token_ids) == tokens and engine.calls("rounds")


def test_who_is_not_alone_gets_a_round_at_a_time_and_goes_on_together_when_it_is():
    engine = ToyEngine(BURSTS, k=3, right=always(1))
    first = engine.ask(PROMPT, 90)
    for _ in range(4):
        engine.step()
    assert "rounds" in programs(engine.steps[-1])
    second = engine.ask([2, 7], 12)
    together = []
    while second.finish_reason is None:
        engine.step()
        together += [call for call in engine.steps[-1] if call.program == "rounds"]
    assert not together
    engine.run()
    assert "rounds" in programs([call for step in engine.steps[-6:] for call in step])
    engine.check(first)
    engine.check(second)


def test_what_samples_gets_a_round_at_a_time():
    engine, _ = serve(BURSTS, PROMPT, 40, k=3, **SAMPLED)
    assert not engine.calls("rounds")


def test_a_cancelled_row_leaves_the_slot_to_the_next_one():
    engine = ToyEngine("batch=1 length=128 k=0,3 prefill=8 rounds=4", k=3, right=always(1))
    first, second = engine.ask(PROMPT, 90), engine.ask([2, 7], 40)
    while not engine.calls("rounds"):
        engine.step()
    first.cancel()
    engine.run()
    assert first.finish_reason == "cancelled" and second.finish_reason == "length"
    engine.check(first)
    engine.check(second)


def test_a_dispatch_that_fails_ends_the_row_and_the_next_one_is_served():
    engine = ToyEngine(BURSTS, k=3, right=always(1))
    for broken in ("rounds", "read rounds"):
        first = engine.ask(PROMPT, 60)
        engine.bundle.fail(broken)
        engine.run()
        assert first.finish_reason == "error" and "was told to fail" in (first.error or "")
        engine.check(first)
    last = engine.ask(PROMPT, 60)
    engine.run()
    engine.check(last)


def test_whatever_comes_and_goes_each_gets_what_it_gets_alone():
    rng = random.Random(5)
    for _ in range(40):
        engine = ToyEngine(BURSTS, k=rng.choice([0, 3, 7]), right=by_first_token)
        for _ in range(rng.randrange(1, 7)):
            request = engine.ask(
                [rng.randrange(8) for _ in range(rng.randrange(1, 20))],
                rng.randrange(1, 100),
                stop_ids=rng.sample(range(97), rng.randrange(3)),
            )
            for _ in range(rng.randrange(12)):
                engine.step()
            if rng.random() < 0.2:
                request.cancel()
        engine.run()
        for request in engine.requests:
            engine.check(request)


def test_as_many_rounds_as_pass_within_a_burst():
    pace, bucket = BurstLength(max_rounds=8, burst_seconds=0.05), ToyEngine(BURSTS).grid.fit(1, 8, 3)
    assert pace.choose(bucket, room=9) == 1, "nobody knows yet how long they take"
    pace.note_round_time(bucket, 0.01)
    assert pace.choose(bucket, room=9) == 5
    assert pace.choose(bucket, room=2) == 2
    pace.note_round_time(bucket, 0.03)  # the mean is 0.015 now
    assert pace.choose(bucket, room=9) == 3
    for _ in range(40):
        pace.note_round_time(bucket, 0.2)
    assert pace.choose(bucket, room=9) == 1


@pytest.mark.parametrize("k", [0, 7])
def test_a_real_bundle_gives_the_same_tokens_with_and_without(bundle: Any, k: int):
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
