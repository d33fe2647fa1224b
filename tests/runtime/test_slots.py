"""Slots and running requests, by numbers that can be checked by eye."""

from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.scheduler import RunningRequest, Slots


def request(prompt: int = 4, limit: int = 10, priority: int = 0) -> Request:
    return Request([1] * prompt, SamplingParams(), limit, frozenset(), None, print, 0.0, priority)


def filled(count: int, of: int) -> tuple[Slots, list[RunningRequest]]:
    slots, rows = Slots(of), [RunningRequest(request()) for _ in range(count)]
    for row in rows:
        slots.add(row)
    return slots, rows


def test_certain_tokens_are_not_outstanding():
    """Every round in flight commits at least one token."""
    row = RunningRequest(request(prompt=4, limit=3))
    row.prefill.done = 4
    row.in_flight.first_token = True  # 1 is certain
    assert row.wants_round
    row.in_flight.rounds = 1  # 2
    assert row.wants_round
    row.in_flight.rounds = 2  # 3: no fourth
    assert not row.wants_round
    row.in_flight.first_token, row.in_flight.rounds = False, 1
    row.request.take([7])  # 1 is there and 1 is certain
    assert row.wants_round


def test_length_bound_counts_tokens_in_flight():
    row = RunningRequest(request(prompt=4), length=4)
    row.prefill.done = 4
    row.in_flight.tokens += 8  # K = 7
    row.in_flight.tokens += 4  # K = 3
    assert row.length_bound == 16
    row.in_flight.tokens, row.length = row.in_flight.tokens - 8, row.length + 3  # two of seven stood
    assert row.length_bound == 11


def test_round_members_leave_out_other_slots():
    slots, (a, b, c, d) = filled(4, of=5)
    for row in (a, b, c):
        row.prefill.done = 4
    slots.free(b)
    c.request.limit, c.in_flight.first_token = 1, True
    assert slots.wanting_round() == [a]
    d.prefill.done = 4
    assert slots.wanting_round() == [a, None, None, d]


def test_take_prefill_goes_by_priority_and_takes_turns():
    slots = Slots(4)
    rows = [RunningRequest(request(priority=priority)) for priority in (0, 0, -1, 1)]
    for row in rows:
        slots.add(row)
    for slot in (2, 2):
        assert slots.take_prefill() is rows[slot]
    rows[2].prefill.done = 4
    for slot in (0, 1, 0):
        assert slots.take_prefill() is rows[slot]
    rows[0].prefill.done = 4
    late = RunningRequest(request())
    slots.free(rows[0])
    slots.add(late)
    assert [slots.take_prefill() for _ in range(3)] == [rows[1], late, rows[1]]
    rows[1].prefill.done = late.prefill.done = 4
    assert slots.take_prefill() is rows[3]
    rows[3].prefill.done = 4
    assert slots.take_prefill() is None


def test_sampled_request_leaves_its_last_prompt_token():
    row = RunningRequest(request(prompt=4), mode="sample")
    assert (row.tokens_to_prefill, row.is_prefilled) == (3, False)
    row.prefill.done = 3
    assert row.is_prefilled and row.wants_round
    one = RunningRequest(request(prompt=1), mode="sample")
    assert one.is_prefilled and one.wants_round
    slots = Slots(1)
    slots.add(one)
    assert slots.take_prefill() is None
