"""The scheduler's plans as plain data, by hand: no device, no arrays, no loop."""

import pytest

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Bucket, parse_grid
from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.requests.request_builder import check_options
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from dflash_aot.runtime.scheduler.scheduler import LengthBoundTooLoose, PrefillPlan, RoundPlan, Scheduler
from dflash_aot.runtime.speculation.controller import FixedK

GRID = "batch=1,2,4 length=16,64 k=0,3 prefill=4,16"


def make_scheduler(buckets: str = GRID, sampling: tuple = ("greedy", "sample")) -> tuple[Scheduler, RequestQueue]:
    queue = RequestQueue(9)
    return Scheduler(parse_grid(buckets, 4), sampling, 3, queue, FixedK(3)), queue


def ask(queue: RequestQueue, prompt: int, limit: int = 10, deadline: float | None = None, **params) -> Request:
    request = Request([1] * prompt, SamplingParams(**params), limit, frozenset(), None, lambda delta: None, 0.0)
    request.deadline = deadline
    queue.put(request)
    return request


def prefill(scheduler: Scheduler) -> list[PrefillPlan]:
    """Plans and starts every chunk; first tokens are read at once."""
    plans = []
    while plan := scheduler.plan_prefill():
        scheduler.start_prefill(plan)
        plan.running.in_flight.first_token = False
        plan.running.request.output.token_ids += [7] * plan.gives_first_token
        plans.append(plan)
    return plans


def start(scheduler: Scheduler) -> RoundPlan:
    plan = scheduler.plan_round()
    assert plan is not None
    return scheduler.start_round(plan)


def finish(plan: RoundPlan, accepted: int) -> None:
    for running in plan.batch.requests:
        running.finish_rounds(plan, plan.rounds * (accepted + 1))
        running.request.output.token_ids += [7] * plan.rounds * (accepted + 1)


def test_round_takes_the_smallest_bucket_for_its_bound():
    scheduler, queue = make_scheduler()
    ask(queue, 8)
    scheduler.fill_slots()
    prefill(scheduler)
    # 8 positions, then bounds of 12 and 16 while no outcome was read: 8 + 1 + 3, 12 + 1 + 3, 16 + 1 + 3 positions.
    assert [start(scheduler).bucket for _ in range(3)] == [Bucket(1, 16, 3), Bucket(1, 16, 3), Bucket(1, 64, 3)]


def test_loose_length_bounds_ask_for_a_commit_first():
    scheduler, queue = make_scheduler("batch=1 length=16 k=0,3 prefill=16")
    ask(queue, 8, limit=9)
    scheduler.fill_slots()
    prefill(scheduler)
    plans = [start(scheduler), start(scheduler)]
    with pytest.raises(LengthBoundTooLoose):  # the bound is 16: not even K = 0 is certain to fit
        scheduler.plan_round()
    for plan in plans:
        finish(plan, accepted=0)
    assert start(scheduler).bucket == Bucket(1, 16, 3)  # 8 + 2 positions are certain


def test_multi_round_steps_of_a_new_k_begin_singly():
    scheduler, queue = make_scheduler("batch=1,2 length=64 k=0,3 prefill=16 rounds=4")
    ask(queue, 8, limit=50)
    scheduler.fill_slots()
    prefill(scheduler)
    first = start(scheduler)
    assert (first.multi_round, first.rounds, first.tokens_outstanding) == (True, 1, [49])
    finish(first, accepted=3)
    scheduler.note_round_time(first, 0.01)
    second = start(scheduler)
    assert (second.multi_round, second.rounds, second.tokens_outstanding) == (True, 4, [45])
    finish(second, accepted=3)
    ask(queue, 8, limit=50)
    scheduler.fill_slots()
    between = start(scheduler)
    assert not between.multi_round  # a prompt is to be prefilled
    finish(between, accepted=3)
    prefill(scheduler)
    scheduler.note_round_time(start(scheduler), 0.01)
    both = start(scheduler)
    assert (both.multi_round, both.rounds, both.tokens_outstanding) == (True, 4, [24, 48])


def test_rounds_with_drafts_behind_rounds_without_resume():
    scheduler, queue = make_scheduler()
    ask(queue, 3, limit=50, k=0)
    scheduler.fill_slots()
    prefill(scheduler)
    plans = [start(scheduler), start(scheduler)]
    ask(queue, 3, limit=50, k=3)
    scheduler.fill_slots()
    prefill(scheduler)
    plans += [start(scheduler), start(scheduler)]
    assert [(plan.bucket.k, plan.resumes) for plan in plans] == [(0, False), (0, False), (3, True), (3, False)]


def test_multi_round_step_stops_early_where_a_request_waits():
    """Then one round is certain of each row: another row may be done after it."""
    scheduler, queue = make_scheduler("batch=2 length=64 k=0,3 prefill=16 rounds=4")
    for _ in range(3):
        ask(queue, 8, limit=20)
    scheduler.fill_slots()
    prefill(scheduler)
    prefill(scheduler)
    scheduler.note_round_time(start(scheduler), 0.01)
    plan = start(scheduler)
    assert (plan.multi_round, plan.rounds, plan.stop_early, plan.certain_rounds) == (True, 4, True, 1)
    assert [running.in_flight.rounds for running in plan.batch.requests] == [2, 2]
    assert [running.in_flight.tokens for running in plan.batch.requests] == [20, 20]
    for running in plan.batch.requests:
        running.finish_rounds(plan, 6)
    assert [running.in_flight.rounds for running in plan.batch.requests] == [1, 1]
    assert [running.in_flight.tokens for running in plan.batch.requests] == [4, 4]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prio": 1}, TypeError, "unknown keyword argument prio: the options are priority, deadline, wait, grammar"),
        ({"priority": 1.0}, BadInput, r"priority is 1\.0: a whole number is needed"),
        ({"priority": True}, BadInput, "priority is True"),
        ({"deadline": 0}, BadInput, "deadline is 0: seconds from now are needed"),
        ({"deadline": float("nan")}, BadInput, "deadline is nan"),
        ({"wait": -1}, BadInput, "wait is -1: True, False or seconds are needed"),
        ({"wait": None}, BadInput, "wait is None"),
        ({"grammar": "a|b"}, BadInput, "grammar is 'a|b': what Engine.compile_grammar returns"),
        ({"markers": {1: 5}}, BadInput, r"markers is \{1: 5\}: lone surrogates"),
        ({"markers": 3}, BadInput, "markers is 3: lone surrogates"),
    ],
)
def test_invalid_option_is_refused(options, error, message):
    defaults = {"priority": 0, "wait": False, "grammar": None, "markers": {}}
    assert check_options({"deadline": 3}) == {"deadline": 3, **defaults}
    with pytest.raises(error, match=message):
        check_options(options)
