"""The request queue of an engine: its limit, its order, and deadlines."""

import asyncio
import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dflash_aot.cache.errors import BadInput, EngineFailed, QueueFull
from dflash_aot.runtime import Engine, SamplingParams
from tests.runtime.stepper import finish, hold, settle, wait_until

PLACES = 3
SOON = 0.05  # seconds
FULL = rf"the request queue is full: {PLACES} of {PLACES} .*wait=True or seconds.*larger max_waiting"


def up_to(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, stop_token_ids=())


def join(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.fixture(scope="module")
def engine(bundle):
    """An engine with one slot and few places, so that all but the first request wait."""
    with Engine.open(bundle("tiny"), k=0, max_waiting=PLACES) as engine:
        yield engine
        assert engine.stats().compile_events == 0


@pytest.fixture
def case(cases):
    return cases["len1"]


@pytest.fixture
def ended(engine):
    """The number of ended requests; asserts that all had ended."""
    wait_until(lambda: engine.stats().running == engine.stats().waiting == 0)
    return sum(engine.stats().finished.values())


@pytest.fixture
def fill(engine, case):
    """Takes all places in the queue. Returns their streams."""
    return lambda: [engine.stream(case.prompt, up_to(5)) for _ in range(PLACES)]


def count_outside(engine: Engine) -> int:
    return len(engine._queue._overflow)


# -- the limit


@pytest.mark.parametrize("places", [0, -1, 1.0, True, None, "many"])
def test_invalid_max_waiting_is_refused(bundle, places):
    with pytest.raises(BadInput, match="max_waiting is .*at least 1"):
        Engine.open(bundle("tiny"), max_waiting=places)


def test_full_queue_refuses_at_once(engine, case, fill):
    refused = engine.stats().refused
    with hold(engine):
        streams = fill()
        for ask in (engine.generate, engine.stream, lambda prompt: asyncio.run(anext(engine.astream(prompt)))):
            with pytest.raises(QueueFull, match=FULL):
                ask(case.prompt)
        assert (engine.stats().waiting, engine.stats().refused) == (PLACES, refused + 3)
    assert [stream.result().token_ids for stream in streams] == [case.answer[:5]] * PLACES


def test_free_place_is_reused(engine, case, fill):
    with hold(engine):
        fill()[0].close()
    assert engine.generate(case.prompt, up_to(5), wait=True).token_ids == case.answer[:5]


def test_waiting_caller_gets_a_place(engine, case, fill):
    with ThreadPoolExecutor(4) as pool:
        with hold(engine):
            streams = fill()
            asked = [pool.submit(engine.generate, case.prompt, up_to(5), wait=wait) for wait in (True, 1e9, math.inf)]
            wait_until(lambda: count_outside(engine) == len(asked) or any(one.done() for one in asked))
            assert not any(one.done() for one in asked)
        assert [one.result().token_ids for one in asked] == [case.answer[:5]] * len(asked)
    assert [stream.result().token_ids for stream in streams] == [case.answer[:5]] * PLACES


def test_places_go_to_waiting_callers_in_order(engine, case, fill):
    with ThreadPoolExecutor(6) as pool:
        with hold(engine):
            fill()
            asked = []
            for _ in range(6):
                asked.append(pool.submit(engine.stream, case.prompt, up_to(2), wait=True))
                wait_until(lambda: count_outside(engine) == len(asked))
        streams = [one.result() for one in asked]
    assert [stream.result().token_ids for stream in streams] == [case.answer[:2]] * len(asked)
    begun = [stream._request.first_token for stream in streams]
    assert begun == sorted(begun)


def test_wait_that_times_out_is_refused(engine, case, fill, ended):
    refused = engine.stats().refused
    with hold(engine):
        streams = fill()
        with pytest.raises(QueueFull, match=rf"the queue stayed full \({PLACES} of {PLACES} waiting"):
            engine.generate(case.prompt, up_to(5), wait=SOON)
        with pytest.raises(QueueFull, match="the queue stayed full"):
            asyncio.run(anext(engine.astream(case.prompt, up_to(5), wait=SOON)))
        assert (engine.stats().waiting, count_outside(engine)) == (PLACES, 0)
        assert engine.stats().refused == refused + 2
    for stream in streams:
        stream.result()
    # The stepper and the waiting requests, and no other.
    assert sum(settle(engine, ended + PLACES + 1).finished.values()) == ended + PLACES + 1


def test_waiting_for_a_place_does_not_block_the_event_loop(engine, case, fill):
    async def wait(stepper) -> tuple[list[int], bool]:
        async def read() -> list[int]:
            return join([delta async for delta in engine.astream(case.prompt, up_to(5), wait=True)])

        task = asyncio.create_task(read())
        while not count_outside(engine):
            await asyncio.sleep(0)
        for _ in range(100):  # another coroutine, which alone can end the waiting
            await asyncio.sleep(0)
        waited = not task.done()
        stepper.let_go()
        return await task, waited

    with hold(engine) as stepper:
        fill()
        assert finish(lambda: asyncio.run(wait(stepper))) == (case.answer[:5], True)


def test_cancelled_waiting_task_leaves_nothing_behind(engine, case, fill, ended):
    async def read() -> list[int]:
        return join([delta async for delta in engine.astream(case.prompt, up_to(5), wait=True)])

    async def wait(stepper) -> list[int]:
        tasks = [asyncio.create_task(read()) for _ in range(4)]
        while count_outside(engine) < len(tasks):
            await asyncio.sleep(0)
        for task in tasks[:-1]:
            task.cancel()
        gone = await asyncio.gather(*tasks[:-1], return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in gone)
        assert (engine.stats().waiting, count_outside(engine)) == (PLACES, 1)
        stepper.let_go()
        return await tasks[-1]

    with hold(engine) as stepper:
        streams = fill()
        assert finish(lambda: asyncio.run(wait(stepper))) == case.answer[:5]
    assert [stream.result().token_ids for stream in streams] == [case.answer[:5]] * PLACES
    assert sum(settle(engine, ended + PLACES + 2).finished.values()) == ended + PLACES + 2


def test_more_prompts_than_places_are_answered_in_order(engine, cases):
    later = [cases["len1"].later(cut) for cut in range(5 * PLACES)]
    prompts = [case.prompt for case in later]
    results = finish(lambda: engine.generate_all(prompts, up_to(6)))
    assert [result.token_ids for result in results] == [case.answer[:6] for case in later]


def test_generate_all_without_places_cancels_every_prompt(engine, case):
    refused = engine.stats().refused
    with hold(engine):
        with pytest.raises(QueueFull, match=FULL) as kept:  # with its frames, and what lives in them
            engine.generate_all([case.prompt] * (PLACES + 1), up_to(5), wait=False)
        assert engine.stats().refused == refused + 1
        assert [request.cancelled for _, _, request in engine._queue._heap] == [True] * PLACES
    assert kept


@pytest.mark.parametrize("wait", ["soon", -1, math.nan, None, [1.0]])
def test_invalid_wait_is_refused(engine, case, ended, wait):
    async def read() -> None:
        await anext(engine.astream(case.prompt, up_to(1), wait=wait))

    for ask in (lambda: engine.generate(case.prompt, up_to(1), wait=wait), lambda: asyncio.run(read())):
        with pytest.raises(BadInput, match="wait is .*True, False or seconds are needed"):
            ask()
    engine.generate(case.prompt, up_to(1))
    assert sum(settle(engine, ended + 1).finished.values()) == ended + 1


def test_close_refuses_callers_waiting_for_a_place(bundle, case):
    with Engine.open(bundle("tiny"), k=0, max_waiting=1) as engine, ThreadPoolExecutor(3) as pool:
        with hold(engine) as stepper:
            inside = engine.stream(case.prompt, up_to(5))
            outside = [pool.submit(engine.generate, case.prompt, wait=True) for _ in range(2)]
            wait_until(lambda: count_outside(engine) == 2)
            closing = pool.submit(engine.close)
            for one in outside:
                with pytest.raises(EngineFailed, match="the engine accepts no more requests: the engine was closed"):
                    one.result(timeout=60)
            stepper.let_go()
            closing.result(timeout=60)
        with pytest.raises(EngineFailed, match="closed"):
            inside.result()


def test_place_given_up_while_closing_affects_no_other_caller(bundle, case):
    """A cancelled task gives its place up before it withdraws its request."""
    with Engine.open(bundle("tiny"), k=0, max_waiting=1) as engine, hold(engine) as stepper:
        engine.stream(case.prompt, up_to(5))
        first, second = (engine._build_request(case.prompt, up_to(1), lambda delta: None) for _ in range(2))
        given_up, waiting = engine._queue.put_when_free(first), engine._queue.put_when_free(second)
        assert given_up.cancel()
        engine._queue.close("the engine was closed")
        with pytest.raises(EngineFailed, match="closed"):
            waiting.result(timeout=0)
        stepper.let_go()


# -- priority


def test_lower_priority_number_is_served_first(engine, case):
    priorities = [5, 0, 5]
    with hold(engine):
        streams = [engine.stream(case.prompt, up_to(3), priority=priority) for priority in priorities]
    assert [stream.result().token_ids for stream in streams] == [case.answer[:3]] * PLACES
    first, second, third = (stream._request.first_token for stream in streams)
    assert second < first < third


def test_priority_does_not_overtake_the_overflow(engine, case, fill):
    """Priority orders requests in the queue, not callers waiting for a place."""
    with ThreadPoolExecutor(2) as pool:
        with hold(engine):
            before = fill()
            late = pool.submit(engine.stream, case.prompt, up_to(2), wait=True, priority=1)
            wait_until(lambda: count_outside(engine) == 1)
            urgent = pool.submit(engine.stream, case.prompt, up_to(2), wait=True, priority=-1)
            wait_until(lambda: count_outside(engine) == 2)
        streams = [*before, late.result(), urgent.result()]
    assert all(stream.result().token_ids for stream in streams)
    times = [stream._request.first_token for stream in streams]
    # The first in line leaves its place to the late one, the second to the urgent one, which passes the third.
    assert sorted(range(5), key=times.__getitem__) == [0, 1, 4, 2, 3]


def test_running_request_keeps_its_slot(engine, case):
    with hold(engine) as stepper:
        urgent = engine.stream(case.prompt, up_to(3), priority=-100)
        stepper.advance(4)
        assert urgent._request.first_token is None
    assert urgent.result().token_ids == case.answer[:3]


@pytest.mark.parametrize("priority", [1.0, "high", None, True])
def test_invalid_priority_is_refused(engine, priority):
    with pytest.raises(BadInput, match="priority is .*whole number"):
        engine.generate([1], priority=priority)


# -- deadlines


@pytest.mark.parametrize("deadline", [0, -1, math.nan, math.inf, "1", True])
def test_invalid_deadline_is_refused(engine, deadline):
    async def read(prompt: list[int], **more) -> None:
        await anext(engine.astream(prompt, **more))

    for ask in (engine.generate, engine.stream, lambda prompt, **more: asyncio.run(read(prompt, **more))):
        with pytest.raises(BadInput, match="deadline is .*seconds from now"):
            ask([1], deadline=deadline)


def test_distant_deadline_changes_nothing(engine, case):
    result = engine.generate(case.prompt, up_to(20), deadline=1e6)
    assert (result.token_ids, result.finish_reason, result.error) == (case.answer[:20], "length", None)


def test_deadline_ends_a_waiting_request_only(engine, case, ended):
    with hold(engine) as stepper:
        early, late = (engine.stream(case.prompt, up_to(5), deadline=one) for one in (SOON, 1e6))
        without = engine.stream(case.prompt, up_to(5))
        time.sleep(SOON)
        stepper.advance(2)
        result = early.result()  # it hears of it while the slot is still taken
        assert engine.stats().waiting == 2
    assert (result.token_ids, result.finish_reason, result.first_token_seconds) == ([], "cancelled", None)
    assert result.error == f"its deadline of {SOON} s has passed" and result.seconds >= SOON
    assert late.result().token_ids == without.result().token_ids == case.answer[:5]
    assert sum(settle(engine, ended + 4).finished.values()) == ended + 4


def test_deadline_ends_the_wait_for_a_place(engine, case, fill):
    refused = engine.stats().refused
    with hold(engine):
        fill()
        for wait in (True, 1e6):
            with pytest.raises(QueueFull, match="the queue stayed full"):
                engine.generate(case.prompt, wait=wait, deadline=SOON)
        assert count_outside(engine) == 0
    assert engine.stats().refused == refused + 2


def test_deadline_during_prefill_ends_one_request(serve, cases):
    engine = serve("tied", 0)
    long, other = cases["len131"], cases["len70"]  # three chunks
    with hold(engine) as stepper:
        running = engine.stream(other.prompt, up_to(40))
        stepper.advance(4)
        stream = engine.stream(long.prompt, replace(up_to(10), prefix_caching=False), deadline=1.0)
        stepper.advance(2)  # a chunk each
        row = next(row for row in engine._loop._scheduler.slots if row.request is stream._request)
        assert 0 < row.prefilled_tokens < len(long.prompt)
        time.sleep(max(stream._request.deadline - time.monotonic(), 0))
        stepper.advance(2)
        assert row not in list(engine._loop._scheduler.slots)
    result = stream.result()
    assert (result.token_ids, result.finish_reason) == ([], "cancelled") and "deadline of 1 s" in result.error
    assert running.result().token_ids == other.answer[:40]
    assert engine.generate(long.prompt, up_to(10)).token_ids == long.answer[:10]


def test_deadline_during_decoding_keeps_the_tokens(serve, cases):
    engine, case, other = serve("tied", 0), cases["len5"], cases["len30"]
    with hold(engine) as stepper:
        running = engine.stream(other.prompt, up_to(40))
        stream = engine.stream(case.prompt, up_to(60), deadline=1.0)
        while len(stream._request.token_ids) < 7 and time.monotonic() < stream._request.deadline:
            stepper.advance()
        time.sleep(max(stream._request.deadline - time.monotonic(), 0))
        stepper.advance(2)
        result = stream.result()
    assert result.token_ids == case.answer[: len(result.token_ids)]
    assert 7 <= len(result.token_ids) <= 9 and result.finish_reason == "cancelled"
    assert "deadline of 1 s" in result.error
    assert running.result().token_ids == other.answer[:40]


def test_event_loop_receives_a_deadline(engine, case):
    async def read() -> list:
        return [delta async for delta in engine.astream(case.prompt, up_to(5), deadline=SOON)]

    with ThreadPoolExecutor(1) as pool, hold(engine) as stepper:
        reading = pool.submit(asyncio.run, read())
        wait_until(lambda: engine.stats().waiting == 1)
        time.sleep(SOON)
        stepper.let_go()
        (last,) = reading.result()
    assert (last.token_ids, last.finish_reason, last.error) == ((), "cancelled", f"its deadline of {SOON} s has passed")


def test_all_waiting_threads_are_answered(engine, cases):
    later = [cases["len1"].later(cut) for cut in range(16)]
    numbers = itertools.count()
    start = threading.Barrier(len(later))

    def ask(case) -> bool:
        start.wait()
        priority = next(numbers) % 3
        return engine.generate(case.prompt, up_to(4), wait=True, priority=priority).token_ids == case.answer[:4]

    with ThreadPoolExecutor(len(later)) as pool:
        assert all(pool.map(ask, later))
