"""Faults in a real engine: of one request's text, and of every program."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.runtime import Delta, Engine
from tests.runtime.stepper import finish, hold, up_to, wait_until

FAILED = r"the engine step failed: \w+Error: .*deleted"


def test_detokenizer_failure_ends_one_request(serve, cases):
    engine = serve("tied", 7)

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
