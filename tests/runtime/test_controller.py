"""The speculation controller by hand: given acceptance, round times that are round numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.speculation.controller import (
    TRIAL_SHARE,
    AcceptanceEstimate,
    AdaptiveK,
    FixedK,
    KByBatchSize,
    SpeculationController,
)

TIMES = {0: 1.0, 3: 2.0, 7: 4.0}
# Tokens expected at K = 0, 3, 7: of a hopeless row 1, 1, 1; of a fair one 1, 2.53, 3.14; of a sure one 1, 4, 8.
HOPELESS, FAIR, SURE = 0.0, 0.7, 1.0


class KnownAcceptance(AcceptanceEstimate):
    """Expects a given rate."""

    def __init__(self, rate: float):
        super().__init__()
        self._rate = rate

    @property
    def rate(self) -> float:
        return self._rate


@dataclass(eq=False)
class Row:
    acceptance: AcceptanceEstimate
    requested_k: int | None = None
    tokens_outstanding: int = 1000


def row(share: float, requested_k: int | None = None, wanted: int = 1000) -> Row:
    return Row(KnownAcceptance(share), requested_k, wanted)


def make_buckets(ks: Sequence[int], batch: int = 1, length: int = 256) -> list[Bucket]:
    return [Bucket(batch, length, k) for k in ks]


def make_times(seconds: Mapping[int, float], batch: int = 1, length: int = 256) -> dict[tuple[Bucket, bool], float]:
    return {(Bucket(batch, length, k), "greedy"): time for k, time in seconds.items()}


def ask(controller: SpeculationController, rows: list[Row], ks: Sequence[int] = tuple(TIMES), batch: int = 1) -> int:
    k = controller.choose_bucket(make_buckets(ks, batch), rows, "greedy").k
    controller.note_dispatch(1)
    return k


def ask_often(controller: AdaptiveK, rows: list[Row], count: int, ks: Sequence[int] = tuple(TIMES)) -> list[int]:
    return [ask(controller, rows, ks) for _ in range(count)]


# -- requested K


@pytest.mark.parametrize(
    "controller", [FixedK(3), KByBatchSize(((1, 9, 3),)), AdaptiveK(make_times({0: 1.0, 3: 1.1, 7: 9.0}))]
)
def test_round_uses_the_largest_requested_k(controller):
    asked = [([None], 3), ([7], 7), ([0], 0), ([None, 7], 7), ([None, 0], 3), ([0, 0], 0), ([0, 7], 7)]
    for wanted, k in asked:
        assert (wanted, ask(controller, [row(FAIR, one) for one in wanted])) == (wanted, k)


def test_k_falls_to_the_next_smaller_bucket_without_room():
    controllers = (
        (FixedK(7), None),
        (KByBatchSize(((1, 1, 7),)), None),
        (FixedK(0), 7),
        (AdaptiveK(make_times(TIMES)), 7),
    )
    for controller, wanted in controllers:
        assert [ask(controller, [row(SURE, wanted)], ks) for ks in ((0, 3, 7), (0, 3), (0,))] == [7, 3, 0]


def test_requested_k_does_not_change_the_choice_for_others():
    """The sure request alone would choose 3; the hopeless one alone chooses 0."""
    controller = AdaptiveK(make_times(TIMES))
    ask(controller, [row(SURE)])  # the first round may be a trial
    assert ask(controller, [row(SURE, 0), row(HOPELESS)]) == 0
    assert ask(controller, [row(SURE), row(HOPELESS, 0)]) == 3


# -- the choice


@pytest.mark.parametrize(
    ("shares", "k"),
    [
        ([HOPELESS], 0),  # 1/1, 2/1, 4/1 seconds per token
        ([FAIR], 3),  # 1, 2/2.53, 4/3.14
        ([SURE], 3),  # 1, 2/4, 4/8: equal, and the smaller one comes first
        ([SURE, HOPELESS, HOPELESS], 0),  # 1, 2/4^⅓, 4/8^⅓
        ([SURE, SURE, HOPELESS], 3),  # 1, 2/16^⅓, 4/64^⅓
        ([HOPELESS, FAIR], 0),  # 1, 2/2.53^½, 4/3.14^½
    ],
)
def test_best_k_by_hand(shares, k):
    controller = AdaptiveK(make_times(TIMES))
    ask(controller, [row(0.9)])  # the first round may be a trial
    assert ask(controller, [row(share) for share in shares]) == k


def test_tokens_that_a_request_does_not_want_count_nothing():
    controller = AdaptiveK(make_times({0: 1.0, 3: 1.5, 7: 1.9}))
    assert [ask(controller, [row(SURE, wanted=left)]) for left in (8, 4, 2, 1)] == [7, 3, 3, 0]


def test_times_depend_on_length_and_sampling():
    buckets = [Bucket(1, 256, 0), Bucket(1, 512, 7)]  # the larger K reaches into the longer bucket
    times = {(bucket, mode): 1.0 for bucket in buckets for mode in ("greedy", "sample")}
    times[buckets[1], "sample"] = 10.0
    controller = AdaptiveK(times)
    assert controller.choose_bucket(buckets, [row(FAIR)], "greedy") == buckets[1]
    controller.note_dispatch(1)
    assert controller.choose_bucket(buckets, [row(FAIR)], "sample") == buckets[0]


# -- trials


def list_trials(ks: Sequence[int]) -> list[int]:
    """Rounds, counted from 0, that were run with a K above 0."""
    return [number for number, k in enumerate(ks) if k]


def test_time_share_pays_for_each_trial_after_the_first():
    """A trial of K = 3 loses 0.59 rounds: TRIAL_SHARE pays for it with 39.3 rounds."""
    controller = AdaptiveK(make_times({0: 1.0, 3: 1.59}))
    assert list_trials(ask_often(controller, [row(HOPELESS)], 130, (0, 3))) == [0, 41, 82, 123]


def test_repeated_rounds_count_towards_the_next_trial():
    controller = AdaptiveK(make_times(TIMES))
    spent: list[int] = []
    while len(spent) < 4000:
        k = ask(controller, [row(HOPELESS)])
        more = 3 if k == 0 else 0
        controller.note_dispatch(more)
        spent += [k] * (1 + more)
    assert 0.9 * TRIAL_SHARE * 4000 < spent.count(3) * (TIMES[3] - 1.0) <= TRIAL_SHARE * 4000


def test_choice_stands_until_it_is_dispatched():
    """A round is planned anew where outcomes are read first: for a mask of allowed tokens, or where memory is short."""
    controller, rows, buckets = AdaptiveK(make_times(TIMES)), [row(HOPELESS)], make_buckets((0, 3, 7), 1)
    ks = []
    for _ in range(400):
        chosen = {controller.choose_bucket(buckets, rows, "greedy").k for _ in range(2)}
        assert len(chosen) == 1
        controller.note_dispatch(1)
        ks += chosen
    alone = AdaptiveK(make_times(TIMES))
    assert ks == ask_often(alone, rows, 400)
    assert ks.count(3) > 2
    assert controller.decisions == alone.decisions


# -- what is not loaded, and times that are not known


class Shelf:
    """Loaded Ks, and the Ks that were prepared."""

    def __init__(self, *ks: int):
        self.loaded, self.asked = set(ks), list[int]()

    def holds(self, kind: tuple[Bucket, bool]) -> bool:
        return kind[0].k in self.loaded

    def prepare(self, kind: tuple[Bucket, bool]) -> None:
        self.asked.append(kind[0].k)


def test_best_loaded_k_runs_while_a_better_one_loads():
    shelf = Shelf(0, 7)
    controller, one = AdaptiveK(make_times(TIMES), loaded=shelf), row(FAIR)  # by hand 1, 2/2.53, 4/3.14
    assert ask(controller, [one]) in {0, 7}
    assert set(shelf.asked) == {3}
    shelf.loaded.add(3)
    assert ask(controller, [one]) == 3
    assert controller.decisions[-1].why == "worth"
    controller = AdaptiveK(make_times(TIMES), loaded=Shelf(0))
    ask(controller, [one])
    assert controller.decisions[-1].why == "loading"


def test_no_executable_is_loaded_for_a_trial():
    shelf = Shelf(0)
    controller = AdaptiveK(make_times(TIMES), loaded=shelf)
    assert set(ask_often(controller, [row(HOPELESS)], 400)) == {0}
    assert shelf.asked == []


def run_rounds(
    controller: AdaptiveK, one: Row, count: int, seconds: Mapping[int, float], resumes: bool = False
) -> list[int]:
    """The K of each round; rounds take what `seconds` says. resumes: whether rounds are noted that resume drafting."""
    ks = [0]
    for _ in range(count):
        ks.append(ask(controller, [one], (0, 3)))
        resumed = resumes and ks[-2] == 0 < ks[-1]
        controller.note_round_time((Bucket(1, 256, ks[-1]), "greedy"), seconds[ks[-1]], resumed)
    return ks


@pytest.mark.parametrize(("truth", "then"), [(1.0, 3), (30.0, 0)])
def test_estimated_k_is_tried_until_measured(truth, then):
    """K = 3 is estimated at 4.4 times the measured K = 0; it takes as long as K = 0, or far longer."""
    controller = AdaptiveK(make_times({0: 1.0}), make_times({0: 1.0, 3: 4.4}))
    ks = run_rounds(controller, row(SURE), 40, {0: 1.0, 3: truth})
    assert controller.costs.is_measured((Bucket(1, 256, 3), "greedy")) and ks[-1] == then


@pytest.mark.parametrize(("extra", "fewest", "most"), [(0.0, 13, 17), (1.0, 6, 10)])
def test_costly_resuming_makes_trials_rarer(extra, fewest, most):
    """Without it a trial loses one round of K = 0, with it two: a share of 0.015 pays for the losses."""
    times = {0: 1.0, 3: 2.0}
    ks = run_rounds(AdaptiveK(make_times(times)), row(HOPELESS), 1000, {0: 1.0, 3: 2.0 + extra}, resumes=True)
    assert fewest <= ks.count(3) <= most


def test_k_0_is_measured_although_drafting_is_estimated_better():
    controller = AdaptiveK({}, make_times({0: 1.0, 3: 1.5}))
    assert run_rounds(controller, row(SURE), 40, {0: 1.0, 3: 9.0})[-1] == 0


# -- decisions


def test_decisions_record_every_change_of_k():
    controller = AdaptiveK(make_times(TIMES) | make_times(TIMES, batch=4))
    rows = [row(FAIR), row(FAIR, 7)]
    ask_often(controller, rows[:1], 3)
    ask(controller, rows, batch=4)
    ask(controller, rows, batch=4)
    ask(controller, rows[1:])
    first, second = controller.decisions
    assert (first.round, first.batch, first.before, first.after, first.why) == (1, 1, None, 3, "worth")
    assert (second.round, second.batch, second.before, second.after, second.why) == (4, 4, 3, 7, "request")
