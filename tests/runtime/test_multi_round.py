"""Multi-round steps: several rounds in one dispatch give the tokens of single rounds."""

from collections.abc import Sequence
from typing import Any

import pytest

from dflash_aot.cache.signature import MAX_STOP_TOKENS
from dflash_aot.runtime.speculation import controller
from tests.runtime.toy import BLOCK, SAMPLED, ToyEngine, always, continue_alone

PLAIN = "batch=1,2 length=32,128 k=0,3,7 prefill=8"
BURSTS = f"{PLAIN} rounds=4"
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(autouse=True)
def _long_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multi-round steps of as many rounds as the grid has, however slow the machine is."""
    monkeypatch.setattr(controller, "BURST_SECONDS", 600.0)


def run_alone(buckets: str, prompt: Sequence[int], tokens: int, **asked: Any) -> tuple[ToyEngine, Any]:
    device = {name: asked.pop(name) for name in ("right", "k") if name in asked}
    engine = ToyEngine(buckets, **device)
    request = engine.submit(prompt, tokens, **asked)
    engine.run()
    return engine, request


@pytest.mark.parametrize(("k", "right"), [(0, 0), (3, BLOCK), (7, 2)])
def test_multi_round_steps_give_the_tokens_of_single_rounds(k: int, right: int):
    _, plain = run_alone(PLAIN, PROMPT, 60, k=k, right=always(right), trace=True)
    engine, request = run_alone(BURSTS, PROMPT, 60, k=k, right=always(right), trace=True)
    assert engine.calls("rounds"), "nothing was dispatched together"
    assert request.output.token_ids == plain.output.token_ids
    assert (request.accepted, request.drafted) == (plain.accepted, plain.drafted)


def test_multi_round_steps_run_no_needless_round():
    engine, request = run_alone(BURSTS, PROMPT, 60, k=3, right=always(2))
    assert engine.bundle.ran == len(request.accepted) == engine.loop.stats().rounds
    assert len(engine.calls("rounds")) < engine.bundle.ran and not engine.calls("verify")


@pytest.mark.parametrize("others", [0, MAX_STOP_TOKENS + 5])
def test_step_stops_at_an_end_token(others):
    """The device looks for some end tokens, the host for all."""
    alone = continue_alone(PROMPT, 60)
    stop = next(token for place, token in enumerate(alone) if place > 30 and token not in alone[:place])
    asked = {"k": 3, "right": always(1), "stop_token_ids": [*range(-others, 0), stop]}
    (_, plain), (engine, request) = (run_alone(buckets, PROMPT, 60, **asked) for buckets in (PLAIN, BURSTS))
    assert request.output.finish_reason == "stop" and request.output.token_ids[-1] == stop
    assert others or (request.accepted == plain.accepted and engine.bundle.ran == len(request.accepted))


def test_multi_round_step_shrinks_near_the_capacity():
    for tokens in (120, 121, 124):  # 124: to the grid's end, and one beyond it that has no kv
        engine, request = run_alone(BURSTS, PROMPT, tokens, k=7, right=always(7))
        assert len(request.output.token_ids) == tokens and engine.calls("rounds")


@pytest.mark.parametrize("asked", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_batches_get_multi_round_steps(asked: dict[str, Any]):
    """Rows that have their tokens stay inactive while others go on."""
    engine = ToyEngine(BURSTS, k=3, right=always(1))
    requests = [engine.submit([start, 2, 7], tokens, **asked) for start, tokens in ((3, 60), (4, 43))]
    engine.run()
    program = "sampled_rounds" if asked else "rounds"
    assert {call.bucket.batch for call in engine.calls(program)} == {1, 2}
    assert engine.counters.row_rounds == sum(len(request.accepted) for request in requests)
    assert engine.counters.rounds == engine.bundle.ran + len(engine.rounds)


def test_sampled_requests_first_round_is_single():
    """It gives the first token, which a multi-round step would delay."""
    engine, request = run_alone(BURSTS, PROMPT, 40, k=3, right=always(1), **SAMPLED)
    assert len(engine.calls("sampled_verify")) == 1 and engine.calls("sampled_rounds")
    assert len(engine.deltas[request][0][1].rounds) == 1


def test_failed_multi_round_step_ends_its_request_only():
    engine = ToyEngine(BURSTS, k=3, right=always(1))
    for broken in ("rounds", "read rounds"):
        first = engine.submit(PROMPT, 60)
        engine.bundle.fail(broken)
        engine.run()
        assert first.output.finish_reason == "error" and "was told to fail" in (first.output.error or "")
    engine.submit(PROMPT, 60)
    engine.run()
