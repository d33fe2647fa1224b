"""The speculation controller by hand: given acceptance, round times that are round numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.speculation.adaptive_k import (
    DECISIONS_KEPT,
    ROUNDS_BEFORE_LOADING,
    TRIAL_SHARE,
    TRIALS_SAVED,
    AdaptiveK,
)
from dflash_aot.runtime.speculation.controller import AcceptanceEstimate, FixedK, KByBatchSize, SpeculationController
from dflash_aot.runtime.speculation.cost_model import CostModel
from tests.runtime.toy import ToyEngine, always, rounds_of

TIMES = {0: 1.0, 3: 2.0, 7: 4.0}
# Tokens expected at K = 0, 3, 7: of a hopeless row 1, 1, 1; of a fair one 1, 2.53, 3.14; of a sure one 1, 4, 8.
HOPELESS, FAIR, SURE = 0.0, 0.7, 1.0


@dataclass(eq=False)
class Row:
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    requested_k: int | None = None


def row(share: float, requested_k: int | None = None) -> Row:
    """A request with history: no trial starts because the request is new."""
    acceptance = AcceptanceEstimate(share)
    acceptance.is_new = False
    return Row(acceptance, requested_k)


def make_buckets(ks: Sequence[int], batch: int = 1, length: int = 256) -> list[Bucket]:
    return [Bucket(batch, length, k) for k in ks]


def make_times(seconds: Mapping[int, float], batch: int = 1, length: int = 256) -> dict[tuple[Bucket, bool], float]:
    return {(Bucket(batch, length, k), "greedy"): time for k, time in seconds.items()}


def ask(depth: SpeculationController, rows: Sequence[Row], ks: Sequence[int] = tuple(TIMES), batch: int = 1) -> int:
    return depth.choose_bucket(make_buckets(ks, batch), rows, "greedy").k


def ask_often(
    depth: SpeculationController, rows: Sequence[Row], count: int, ks: Sequence[int] = tuple(TIMES)
) -> list[int]:
    return [ask(depth, rows, ks) for _ in range(count)]


# -- requested K


@pytest.mark.parametrize(
    "depth", [FixedK(3), KByBatchSize(((1, 9, 3),)), AdaptiveK(make_times({0: 1.0, 3: 1.1, 7: 9.0}))]
)
@pytest.mark.parametrize(
    ("wanted", "k"),
    [([None], 3), ([7], 7), ([0], 0), ([None, 7], 7), ([None, 0], 3), ([0, 0], 0), ([0, 7], 7)],
)
def test_round_uses_the_largest_requested_k(depth, wanted, k):
    assert ask(depth, [row(FAIR, one) for one in wanted]) == k


@pytest.mark.parametrize(("ks", "k"), [((0, 3, 7), 7), ((0, 3), 3), ((0,), 0)])
def test_k_falls_to_the_next_smaller_bucket_without_room(ks, k):
    for depth, wanted in (
        (FixedK(7), None),
        (KByBatchSize(((1, 1, 7),)), None),
        (FixedK(0), 7),
        (AdaptiveK(make_times(TIMES)), 7),
    ):
        assert ask(depth, [row(SURE, wanted)], ks) == k


def test_requested_k_does_not_change_the_choice_for_others():
    """The sure request alone would choose 3; the hopeless one alone chooses 0."""
    depth = AdaptiveK(make_times(TIMES))
    assert ask(depth, [row(SURE, 0), row(HOPELESS)]) == 0
    assert ask(depth, [row(SURE), row(HOPELESS, 0)]) == 3


# -- the choice


@pytest.mark.parametrize(
    ("shares", "k"),
    [
        ([HOPELESS], 0),  # 1/1, 1/2, 1/4 tokens per second
        ([FAIR], 3),  # 1, 2.53/2, 3.14/4
        ([SURE], 3),  # 1, 4/2, 8/4: equal, and the smaller one comes first
        ([SURE, HOPELESS], 3),  # 2, 5/2, 9/4
        ([HOPELESS, HOPELESS, HOPELESS, FAIR], 0),  # 4, 5.53/2, 6.14/4
    ],
)
def test_best_k_by_hand(shares, k):
    assert ask(AdaptiveK(make_times(TIMES)), [row(share) for share in shares]) == k


def test_times_depend_on_the_batch():
    """Drafting pays for one request; with four requests the device is saturated."""
    times = make_times({0: 1.0, 7: 1.2}) | make_times({0: 2.0, 7: 12.0}, batch=4)
    depth = AdaptiveK(times)
    rows = [row(FAIR) for _ in range(4)]
    assert [ask(depth, rows[:1], (0, 7)), ask(depth, rows, (0, 7), batch=4), ask(depth, rows[:1], (0, 7))] == [7, 0, 7]


def test_served_rounds_correct_the_times():
    """K = 7 was measured too slow at load."""
    depth = AdaptiveK(make_times({0: 1.0, 7: 9.0}))
    one = row(SURE)
    assert ask(depth, [one], (0, 7)) == 0
    for _ in range(400):
        k = ask(depth, [one], (0, 7))
        depth.note_round_time((Bucket(1, 256, k), "greedy"), {0: 1.0, 7: 2.0}[k])
    assert ask_often(depth, [one], 20, (0, 7)) == [7] * 20


def test_times_depend_on_length_and_sampling():
    buckets = [Bucket(1, 256, 0), Bucket(1, 512, 7)]  # the larger K reaches into the longer bucket
    times = {(bucket, mode): 1.0 for bucket in buckets for mode in ("greedy", "sample")}
    times[buckets[1], "sample"] = 10.0
    depth = AdaptiveK(times)
    assert depth.choose_bucket(buckets, [row(FAIR)], "greedy") == buckets[1]
    assert depth.choose_bucket(buckets, [row(FAIR)], "sample") == buckets[0]


def test_bucket_without_times_raises():
    with pytest.raises(KeyError):
        ask(AdaptiveK(make_times(TIMES)), [row(FAIR)], (0, 5))


def test_best_remaining_k_near_the_capacity():
    depth = AdaptiveK(make_times({0: 1.0, 3: 1.2, 7: 1.3}))
    rows = [row(SURE)]
    assert [ask(depth, rows, ks) for ks in ((0, 3, 7), (0, 3), (0,))] == [7, 3, 0]
    assert [one.why for one in depth.decisions] == ["worth", "room", "room"]


def test_new_request_starts_with_the_engine_acceptance():
    depth = AdaptiveK(make_times(TIMES))
    for _ in range(50):
        depth.note_outcome(depth.start_request(), 3, 0)
    assert depth.start_request().expected_tokens(7)[7] == pytest.approx(1, abs=0.2)
    assert depth.start_request().is_new


# -- trials


def list_trials(ks: Sequence[int]) -> list[int]:
    """Rounds, counted from 0, that were run with a K above 0."""
    return [number for number, k in enumerate(ks) if k]


def test_trials_lose_a_small_share_of_the_time():
    depth = AdaptiveK(make_times(TIMES))
    ks = ask_often(depth, [row(HOPELESS)], 4000)
    assert set(ks) == {0, 3}  # a trial of K = 3 loses less time than one of K = 7
    lost = ks.count(3) * (TIMES[3] - 1.0)
    assert 0.5 * TRIAL_SHARE * 4000 < lost <= TRIAL_SHARE * 4000 + TRIALS_SAVED


def test_new_request_is_tried_at_once_then_ever_more_seldom():
    depth = AdaptiveK(make_times(TIMES))
    trials = list_trials(ask_often(depth, [Row(AcceptanceEstimate(HOPELESS))], 400))
    waits = [later - earlier for earlier, later in zip(trials, trials[1:], strict=False)]
    assert trials[0] == 0
    assert waits == sorted(waits)
    assert waits[0] < 0.7 * waits[-1]


def test_interval_ends_where_the_time_share_pays_for_it():
    """A trial of K = 3 loses 0.6 rounds: TRIAL_SHARE pays for it in 40 rounds."""
    depth = AdaptiveK(make_times({0: 1.0, 3: 1.6}))
    trials = list_trials(ask_often(depth, [row(HOPELESS)], 1600, (0, 3)))
    assert [later - earlier for earlier, later in zip(trials, trials[1:], strict=False)][-3:] == [40, 40, 40]


def test_repeated_rounds_count_towards_the_next_trial():
    depth = AdaptiveK(make_times(TIMES))
    spent: list[int] = []
    while len(spent) < 4000:
        k = ask(depth, [row(HOPELESS)])
        more = 3 if k == 0 else 0
        depth.repeat_choice(more)
        spent += [k] * (1 + more)
    lost = spent.count(3) * (TIMES[3] - 1.0)
    assert 0.5 * TRIAL_SHARE * 4000 < lost <= TRIAL_SHARE * 4000 + TRIALS_SAVED


def test_many_new_requests_do_not_raise_the_time_share():
    depth = AdaptiveK(make_times(TIMES))
    ks = [ask(depth, [Row(AcceptanceEstimate(HOPELESS))]) for _ in range(2000)]
    assert ks.count(3) * (TIMES[3] - 1.0) <= TRIAL_SHARE * 2000 + TRIALS_SAVED


@pytest.mark.parametrize(("stood", "then"), [(0, 0), (1, 3), (3, 3)])
def test_trial_that_paid_for_itself_is_repeated_at_once(stood, then):
    """K = 3 takes one second more than K = 0, which is one token's time."""
    depth, new = AdaptiveK(make_times(TIMES)), Row(AcceptanceEstimate(HOPELESS))
    assert ask(depth, [new]) == 3
    depth.note_outcome(new.acceptance, 3, stood)
    assert ask(depth, [new]) == then


def test_easier_text_raises_k():
    depth = AdaptiveK(make_times(TIMES))
    one = row(HOPELESS)
    for stands in (0.0, 1.0):
        ks = []
        for _ in range(600):
            ks.append(ask(depth, [one]))
            depth.note_outcome(one.acceptance, ks[-1], round(stands * ks[-1]))
        assert ks[-100:].count(0) == (0 if stands else pytest.approx(100, abs=3))


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
    depth, one = AdaptiveK(make_times(TIMES), loaded=shelf), row(FAIR)  # by hand 1, 2/2.53, 4/3.14
    assert ask(depth, [one]) in {0, 7}
    assert set(shelf.asked) == {3}
    shelf.loaded.add(3)
    assert ask(depth, [one]) == 3
    assert depth.decisions[-1].why == "worth"


def test_choice_of_a_loaded_k_says_so():
    depth = AdaptiveK(make_times(TIMES), loaded=Shelf(0))
    ask(depth, [row(FAIR)])
    assert [decision.why for decision in depth.decisions] == ["loading"]


def test_best_k_is_chosen_where_nothing_is_loaded():
    shelf = Shelf()
    assert ask(AdaptiveK(make_times(TIMES), loaded=shelf), [row(FAIR)]) == 3
    assert shelf.asked == [3]


def test_requested_k_ignores_what_is_loaded():
    assert ask(AdaptiveK(make_times(TIMES), loaded=Shelf(0)), [row(FAIR, 7)]) == 7


def test_no_executable_is_loaded_for_a_trial_early():
    shelf = Shelf(0)
    depth, new = AdaptiveK(make_times(TIMES), loaded=shelf), Row(AcceptanceEstimate(HOPELESS))
    assert set(ask_often(depth, [new], ROUNDS_BEFORE_LOADING)) == {0}
    assert shelf.asked == []
    ask(depth, [new])
    assert set(shelf.asked) == {3}  # a trial of K = 3 loses less time than one of K = 7


@pytest.mark.parametrize(("truth", "then"), [(1.0, 3), (30.0, 0)])
def test_estimated_k_is_tried_until_measured(truth, then):
    """K = 3 is estimated at 4.4 times the measured K = 0; it takes as long as K = 0, or far longer."""
    depth, one = AdaptiveK(make_times({0: 1.0}), make_times({0: 1.0, 3: 4.4})), row(SURE)
    ks = []
    for _ in range(40):
        ks.append(ask(depth, [one], (0, 3)))
        depth.note_round_time((Bucket(1, 256, ks[-1]), "greedy"), {0: 1.0, 3: truth}[ks[-1]])
    assert depth.costs.is_measured((Bucket(1, 256, 3), "greedy"))
    assert ks[-1] == then


@pytest.mark.parametrize(("extra", "fewest", "most"), [(0.0, 13, 17), (1.0, 6, 10)])
def test_costly_resuming_makes_trials_rarer(extra, fewest, most):
    """Without it a trial loses one round of K = 0, with it two: a share of 0.015 pays for the losses."""
    depth, one = AdaptiveK(make_times({0: 1.0, 3: 2.0})), row(HOPELESS)
    ks = [0]
    for _ in range(1000):
        ks.append(ask(depth, [one], (0, 3)))
        seconds, resumed = {0: 1.0, 3: 2.0 + extra}[ks[-1]], ks[-2] == 0 < ks[-1]
        depth.note_round_time((Bucket(1, 256, ks[-1]), "greedy"), seconds, resumed)
    assert fewest <= sum(k == 3 for k in ks) <= most


def test_shortest_measured_time_counts_until_a_round_is_served():
    costs, shape = CostModel({}), (Bucket(1, 256, 3), "greedy")
    for seconds, expected in ((3.0, 3.0), (2.0, 2.0), (4.0, 2.0)):
        costs.set_measured(shape, seconds)
        assert costs[shape] == pytest.approx(expected)
    costs.note_served(shape, 2.0)
    costs.set_measured(shape, 1.0)
    assert costs[shape] == pytest.approx(2.0)


def test_k_0_is_measured_although_drafting_is_estimated_better():
    depth, one = AdaptiveK({}, make_times({0: 1.0, 3: 1.5})), row(SURE)
    ks = []
    for _ in range(40):
        ks.append(ask(depth, [one], (0, 3)))
        depth.note_round_time((Bucket(1, 256, ks[-1]), "greedy"), {0: 1.0, 3: 9.0}[ks[-1]])
    assert (ks[0], ks[-1]) == (3, 0)


# -- decisions


def test_decisions_record_every_change_of_k():
    depth = AdaptiveK(make_times(TIMES) | make_times(TIMES, batch=4))
    rows = [row(FAIR), row(FAIR, 7)]
    ask_often(depth, rows[:1], 3)
    ask(depth, rows, batch=4)
    ask(depth, rows, batch=4)
    ask(depth, rows[1:])
    first, second = depth.decisions
    expected = {0: 1.0, 3: 2.0 / 2.533, 7: 4.0 / (1 + 0.7 * (1 - 0.7**7) / 0.3)}
    assert (first.round, first.batch, first.length, first.before, first.after) == (1, 1, 256, None, 3)
    assert (first.why, first.seconds) == ("worth", pytest.approx(expected))
    assert (second.round, second.batch, second.before, second.after, second.why) == (4, 4, 3, 7, "request")


def test_number_of_decisions_is_limited():
    depth = AdaptiveK(make_times({0: 1.0, 3: 1.03}))
    ask_often(depth, [row(HOPELESS)], 1200, (0, 3))  # every other round is a trial
    assert len(depth.decisions) == DECISIONS_KEPT
    assert depth.decisions[-1].round > depth.decisions[0].round > 1
    assert FixedK(3).decisions == ()


def test_k_follows_the_number_of_requests_in_the_round():
    engine = ToyEngine(k=7, controller=KByBatchSize(((1, 1, 7), (2, 3, 3), (4, 4, 0))), right=always(1))
    requests = []
    for count in range(1, 7):
        requests.append(engine.submit([1, 2, count], 50))
        for _ in range(4):
            engine.step()
        # More than the last range names: its K.
        assert rounds_of(engine.steps[-1:])[0].bucket.k == {1: 7, 2: 3, 3: 3}.get(count, 0)
    requests[0].cancel()
    engine.run()
    for request in requests:
        engine.check(request)
