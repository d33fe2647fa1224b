"""Slots and rows, by numbers that one can check by eye."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.runtime.request import Request, SamplingParams
from dflash_aot.runtime.slots import Row, Slots


def request(prompt: int = 4, limit: int = 10, submitted: float = 0.0) -> Request:
    return Request([1] * prompt, SamplingParams(), limit, frozenset(), None, lambda delta: None, submitted)


def filled(count: int, of: int) -> tuple[Slots, list[Row]]:
    slots = Slots(of)
    return slots, [slots.add(request()) for _ in range(count)]


def test_requests_take_the_first_free_slot():
    slots, (a, b, c) = filled(3, of=4)
    assert [slots.slot_of(row) for row in (a, b, c)] == [0, 1, 2]
    slots.free(b)
    assert slots.slot_of(slots.add(request())) == 1
    assert slots.slot_of(slots.add(request())) == 3
    assert slots.full


def test_the_span_reaches_to_the_last_row_and_holes_do_not_count_as_rows():
    slots, (a, b, c) = filled(3, of=4)
    assert (slots.span, len(slots), slots.full) == (3, 3, False)
    slots.free(a)
    assert (slots.span, len(slots)) == (3, 2)
    slots.free(c)
    assert (slots.span, len(slots)) == (2, 1)
    slots.free(b)
    assert (slots.span, len(slots), bool(slots)) == (0, 0, False)


def test_a_move_brings_the_last_row_into_the_first_hole():
    slots, (a, b, c, d) = filled(4, of=4)
    assert slots.take_move() is None
    slots.free(a)
    slots.free(c)
    assert slots.take_move() == (3, 0)  # d into a's place
    assert [slots.slot_of(row) for row in (d, b)] == [0, 1]
    assert slots.take_move() is None
    assert slots.span == 2


def test_nothing_moves_where_there_is_nothing():
    assert Slots(3).take_move() is None


@given(st.sets(st.integers(0, 5)))
def test_moves_leave_a_prefix_and_every_row(freed):
    slots, rows = filled(6, of=6)
    for slot in freed:
        slots.free(rows[slot])
    moves = list(itertools.takewhile(bool, iter(slots.take_move, "never")))
    left = [row for slot, row in enumerate(rows) if slot not in freed]
    assert slots.span == len(slots) == len(left)
    assert sorted(slots.slot_of(row) for row in left) == list(range(len(left)))
    assert all(source > destination for source, destination in moves)


def test_a_row_decodes_when_its_prompt_is_in_and_tokens_are_wanted():
    row = Row(request(prompt=4, limit=3))
    row.written = 3
    assert not row.prefilled and not row.decoding
    row.written = 4
    assert row.prefilled and row.decoding


def test_tokens_that_are_certain_to_come_are_not_asked_for_again():
    """Every round on its way brings at least one."""
    row = Row(request(prompt=4, limit=3), written=4)
    row.first_in_flight = True  # 1 is certain
    assert row.decoding
    row.rounds_in_flight = 1  # 2
    assert row.decoding
    row.rounds_in_flight = 2  # 3: no fourth
    assert not row.decoding
    row.first_in_flight, row.rounds_in_flight = False, 1
    row.request.take([7])  # 1 is there and 1 is certain
    assert row.decoding


def test_a_request_for_one_token_never_decodes():
    row = Row(request(limit=1), written=4, first_in_flight=True)
    assert not row.decoding


def test_the_length_is_at_most_what_is_known_and_all_that_is_on_its_way():
    row = Row(request(prompt=4), written=4, length=4)
    row.in_flight += 8  # K = 7
    row.in_flight += 4  # K = 3
    assert row.longest == 16
    row.in_flight, row.length = row.in_flight - 8, row.length + 3  # two of seven stood
    assert row.longest == 11


def test_the_mask_of_a_round_leaves_out_holes_prompts_and_rows_that_are_done():
    slots, (a, b, c, d) = filled(4, of=5)
    for row in (a, b, c):
        row.written = 4
    slots.free(b)
    c.request.limit, c.first_in_flight = 1, True
    assert slots.decoding(slots.span) == [a, None, None, None]
    d.written = 4
    assert slots.decoding(slots.span) == [a, None, None, d]
    assert slots.decoding(2) == [a, None]


def test_prompts_go_in_by_age_whatever_their_slot():
    slots = Slots(3)
    old, young = request(submitted=1.0), request(submitted=2.0)
    rows = [slots.add(young), slots.add(old)]
    assert slots.next_prefill() is rows[1]
    rows[1].written = 4
    assert slots.next_prefill() is rows[0]
    rows[0].written = 4
    assert slots.next_prefill() is None
