"""Pauses in answers."""

from dflash_aot.benchmarks.mix import find_pauses
from dflash_aot.benchmarks.traffic import Answer


def test_a_pause_is_between_deltas_and_not_between_the_tokens_of_one():
    assert find_pauses(Answer([7, 8, 9, 7, 8], [1.0, 1.5, 1.5, 1.5, 3.0])) == [0.5, 1.5]
