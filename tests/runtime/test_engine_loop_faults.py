"""Programs that fail in mid-round, on a toy device: which requests end, and which are served."""

import pytest

from dflash_aot.cache.errors import EngineFailed
from tests.runtime.toy import SAMPLED, ToyEngine, always


@pytest.mark.parametrize(
    "program",
    ["prefill", "draft", "verify", "sampled_verify", "kv_write", "admit", "read prefill", "read verify"]
    + ["read sampled_verify"],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_failed_program_ends_running_requests_only(program, steps):
    engine = ToyEngine("batch=2 length=64 k=0,3 prefill=4", k=3, right=always(0))
    asked = SAMPLED if program in ("sampled_verify", "admit", "read sampled_verify") else {}
    for _ in range(steps):
        engine.submit([1], 9)
        engine.step()
    for number in range(2, 8):
        engine.submit([number], 9, **(asked if number % 2 else {}))
    engine.bundle.fail(program)
    engine.run()
    failed = [request for request in engine.requests if request.output.finish_reason == "error"]
    assert 1 <= len(failed) <= 2
    for request in failed:
        assert request.output.error == f"the engine step failed: Fault: {program} was told to fail"
    assert {request.output.finish_reason for request in engine.requests if request not in failed} == {"length"}
    assert (engine.state.resets, engine.counters.failures) == (1, 1)
    assert engine.counters.finished["error"] == len(failed)


def test_three_failures_in_a_row_end_the_loop():
    engine = ToyEngine("batch=1 length=64 k=0 prefill=4", k=0)
    requests = [engine.submit([number], 9) for number in range(5)]
    engine.bundle.fail("verify", 3)
    engine.step()
    engine.step()
    with pytest.raises(EngineFailed, match="3 engine steps failed in a row; the last error: .*verify was told to fail"):
        engine.step()
    assert [request.output.finish_reason for request in requests] == ["error"] * 3 + [None] * 2
    engine.loop.end_all("the engine's loop failed")
    assert [request.output.error for request in requests[3:]] == ["the engine's loop failed"] * 2
    assert engine.loop.is_idle
    assert engine.counters.finished == {"error": 5}


def test_prefill_between_failed_rounds_is_no_success():
    """A device reports most faults when a result is read; the first token of each request is fine."""
    engine = ToyEngine("batch=1 length=64 k=0 prefill=4", k=0)
    for number in range(20):
        engine.submit([number], 9)
    engine.bundle.fail("read verify", 1000)
    with pytest.raises(EngineFailed, match="3 engine steps failed in a row; the last error: .*read verify was told"):
        engine.run()
    assert engine.counters.failures == 3


@pytest.mark.parametrize("tokens", [1, 3], ids=["no round", "rounds"])
def test_success_resets_the_failure_count(tokens):
    """Requests for one token have no round; reading their first token is a success too."""
    engine = ToyEngine("batch=1 length=64 k=0 prefill=4", k=0)
    for _ in range(3):
        requests = [engine.submit([number], tokens) for number in range(3)]
        engine.bundle.fail("prefill", 2)
        engine.run()
        assert [request.output.finish_reason for request in requests] == ["error", "error", "length"]
