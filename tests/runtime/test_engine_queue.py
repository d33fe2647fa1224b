"""The request queue of an engine: its limit, its order, and deadlines."""

import asyncio
import time

import pytest

from dflash_aot.cache.errors import BadInput, QueueFull
from dflash_aot.runtime import Engine
from tests.runtime.stepper import finish, hold, settle, up_to, wait_until

PLACES = 3
SOON = 0.05  # seconds
FULL = rf"the request queue is full: {PLACES} of {PLACES} .*wait=True or seconds.*larger max_waiting"


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


# -- the limit


def test_invalid_max_waiting_is_refused(bundle):
    for places in (0, 1.0, True, "many"):
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


def test_wait_that_times_out_is_refused(engine, case, fill, ended):
    refused = engine.stats().refused
    with hold(engine):
        streams = fill()
        with pytest.raises(QueueFull, match=rf"the queue stayed full \({PLACES} of {PLACES} waiting"):
            engine.generate(case.prompt, up_to(5), wait=SOON)
        with pytest.raises(QueueFull, match="the queue stayed full"):
            asyncio.run(anext(engine.astream(case.prompt, up_to(5), wait=SOON)))
        assert engine.stats().waiting == PLACES and not engine._queue._overflow
        assert engine.stats().refused == refused + 2
    for stream in streams:
        stream.result()
    # The stepper and the waiting requests, and no other.
    assert sum(settle(engine, ended + PLACES + 1).finished.values()) == ended + PLACES + 1


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
        assert [request.progress.cancelled for _, _, request in engine._queue._heap] == [True] * PLACES
    assert kept


# -- deadlines


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
