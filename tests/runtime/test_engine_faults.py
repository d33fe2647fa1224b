"""Programs that fail in mid-round in a real engine: running requests end, waiting ones are served."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.runtime import Delta, Engine
from dflash_aot.runtime.requests.request import Request
from tests.runtime.stepper import finish, hold, up_to, wait_until

K, SLOTS = 7, 3
FAILED = r"the engine step failed: \w+Error: .*deleted"


@pytest.fixture(scope="module")
def engine(bundle):
    """An engine that recovers repeatedly. Preloaded, so that a request, not the warm-up, meets the fault first."""
    with Engine.open(bundle("tied"), k=K, preload=True) as engine:
        yield engine
        assert engine.failure is None and engine.stats().compile_events == 0


def delete_state(engine: Engine, name: str) -> None:
    """Deletes a state array: the next program that reads it fails."""
    arrays = engine._loop._dispatcher._state._arrays
    wait_until(lambda: name in arrays and not arrays[name].is_deleted())
    arrays[name].delete()


def submit_saboteur(engine: Engine, prompt: list[int], name: str) -> Request:
    """Submits a request at whose third delta, with a round in flight, a state array is deleted."""
    told: list[Delta] = []

    def emit(delta: Delta) -> None:
        told.append(delta)
        if len(told) == 3:
            delete_state(engine, name)

    request = engine._build_request(prompt, up_to(60), emit)
    engine._submit(request)
    return request


@pytest.mark.parametrize("name", ["draft_v", "lengths"])
def test_fault_ends_running_requests_and_serves_waiting_ones(engine, cases, caplog, name):
    failures, case = engine.stats().failures, cases["len5"]
    with caplog.at_level(logging.ERROR):
        saboteur = submit_saboteur(engine, cases["len70"].prompt, name)
        beside = [engine.stream(cases["len70"].prompt, up_to(60)) for _ in range(SLOTS - 1)]
        waiting = [engine.stream(case.prompt, up_to(30)) for _ in range(4)]
        for stream in beside:
            with pytest.raises(EngineFailed, match=FAILED):
                stream.result()
    assert [stream.result().token_ids for stream in waiting] == [case.answer[:30]] * len(waiting)
    assert saboteur.output.finish_reason == "error" and FAILED.split(":")[0] in saboteur.output.error
    told = saboteur.output.token_ids
    assert told == cases["len70"].answer[: len(told)] and len(told) >= 3
    assert engine.stats().failures == failures + 1 and engine.failure is None
    assert [record.levelname for record in caplog.records if "engine step failed" in record.message] == ["ERROR"]


def test_detokenizer_failure_ends_one_request(engine, cases):
    class BrokenText:
        finished, tokens_kept = False, 0

        def push(self, tokens: list[int]) -> str:
            raise ValueError("no such character")

    told: list[Delta] = []
    request = engine._build_request(cases["len5"].prompt, up_to(60), told.append)
    request.detokenizer = BrokenText()
    other = engine.stream(cases["len70"].prompt, up_to(60))
    failures = engine.stats().failures
    engine._submit(request)
    assert other.result().token_ids == cases["len70"].answer[:60]
    wait_until(lambda: bool(told))
    assert "this request cannot go on: ValueError: no such character" in told[-1].error
    assert engine.stats().failures == failures


def break_weights(engine: Engine) -> None:
    for executable in engine._bundle.executables.list_loaded():
        for weight in executable._weights:
            weight.delete()


def test_permanent_fault_ends_the_engine_and_every_request(bundle, cases):
    engine, prompt = Engine.open(bundle("tiny"), k=0, max_waiting=3, preload=True), cases["len1"].prompt
    with ThreadPoolExecutor(2) as pool:
        with hold(engine) as stepper:  # the first failure is its own
            waiting = [engine.stream(prompt, up_to(5)) for _ in range(3)]
            outside = [pool.submit(engine.generate, prompt, wait=True) for _ in range(2)]
            wait_until(lambda: len(engine._queue._overflow) == 2)
            break_weights(engine)
            stepper.advance()
        assert stepper.request.output.finish_reason == "error"
        for stream in waiting[:2]:
            with pytest.raises(EngineFailed, match=FAILED):
                finish(stream.result)
        last = r"the engine's loop failed: 3 engine steps failed in a row; the last error: " + FAILED
        for ask in (waiting[2].result, *(one.result for one in outside), lambda: engine.generate(prompt)):
            with pytest.raises(EngineFailed, match=last):
                finish(ask)
    with pytest.raises(EngineFailed, match=last):
        finish(lambda: engine.generate(prompt, wait=True))
    assert engine.failure is not None and "3 engine steps failed in a row" in engine.failure
    stats = engine.stats()
    assert (stats.failures, stats.running, stats.waiting, stats.compile_events) == (3, 0, 0, 0)
    assert sum(stats.finished.values()) == stats.finished["error"]
    finish(engine.close)
    assert "3 engine steps failed in a row" in engine.failure  # closing hides no cause
