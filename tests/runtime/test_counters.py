"""Acceptance, counted and averaged, by hand."""

from dflash_aot.runtime.metrics.counters import Counters, summarize_acceptance
from dflash_aot.runtime.requests.request import Result


def result(accepted: list[int]) -> Result:
    return Result([1] * 9, None, "length", 3, accepted, [], None, 0.1, 0.2)


def test_every_row_of_a_round_counts_at_each_position_it_verified():
    counters = Counters()
    for k, accepted in ((3, 2), (3, 0), (7, 5), (0, 0)):
        counters.note_row(k, accepted)
    assert (counters.row_rounds, counters.drafted, counters.accepted) == (4, 13, 7)
    assert counters.verified_at == [3, 3, 3, 1, 1, 1, 1]
    assert counters.accepted_at == [2, 2, 1, 1, 1, 0, 0]


def test_a_snapshot_stays_as_it_is():
    counters = Counters()
    counters.note_row(2, 1)
    before = counters.copy()
    counters.note_row(2, 2)
    assert (before.accepted, before.accepted_at) == (1, [1, 0])


def test_both_averages_of_the_acceptance_length():
    counters = Counters()
    runs = [[3, 1], [0], []]  # the last request ended with its first token
    for run in runs:
        for accepted in run:
            counters.note_row(3, accepted)
    found = summarize_acceptance([result(run) for run in runs], counters)
    assert found.rounds == 3
    assert found.micro_tau == 1 + 4 / 3
    assert found.mean_tau == ((1 + 2) + (1 + 0)) / 2
    assert found.per_position == (2 / 3, 1 / 3, 1 / 3)


def test_without_a_round_there_is_no_acceptance_length():
    found = summarize_acceptance([result([])], Counters())
    assert (found.rounds, found.per_position) == (0, ())
