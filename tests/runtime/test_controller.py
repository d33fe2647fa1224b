"""The speculation controller by hand: given acceptance, round times that are round numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.speculation.acceptance_estimate import AcceptanceEstimate
from dflash_aot.runtime.speculation.controller import (
    FREE_TRIAL_INTERVAL,
    MAX_TRIAL_DEBT,
    MIN_ROUNDS_PER_PAID_TRIAL,
    OPTIMISTIC_PLANS,
    REPLAN_ROUNDS,
    ROUNDS_BEFORE_LOADING,
    SWITCH_MARGIN,
    TRIAL_SHARE,
    AdaptiveK,
    FixedK,
    SpeculationController,
)

TIMES = {0: 1.0, 3: 2.0, 7: 4.0}
# Tokens expected at K = 0, 3, 7: of a hopeless row 1, 1, 1; of a fair one 1, 2.53, 3.14; of a sure one 1, 4, 8.
HOPELESS, FAIR, SURE = 0.0, 0.7, 1.0


@dataclass(eq=False)
class Row:
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    requested_k: int | None = None


def row(share: float, requested_k: int | None = None) -> Row:
    """A request with history: no trial starts because the request is new."""
    return Row(AcceptanceEstimate([share] * 15, rounds=1), requested_k)


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


@pytest.mark.parametrize("depth", [FixedK(3), AdaptiveK(make_times({0: 1.0, 3: 1.1, 7: 9.0}))])
@pytest.mark.parametrize(
    ("wanted", "k"),
    [([None], 3), ([7], 7), ([0], 0), ([None, 7], 7), ([None, 0], 3), ([0, 0], 0), ([0, 7], 7)],
)
def test_round_uses_the_largest_requested_k(depth, wanted, k):
    assert ask(depth, [row(FAIR, one) for one in wanted]) == k


@pytest.mark.parametrize(("ks", "k"), [((0, 3, 7), 7), ((0, 3), 3), ((0,), 0)])
def test_k_falls_to_the_next_smaller_bucket_without_room(ks, k):
    for depth, wanted in ((FixedK(7), None), (FixedK(0), 7), (AdaptiveK(make_times(TIMES)), 7)):
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
    assert depth.start_request().rounds == 0


def test_engine_acceptance_learns_from_first_rounds_only():
    depth = AdaptiveK(make_times(TIMES))
    talker = depth.start_request()
    for _ in range(1000):
        depth.note_outcome(talker, 3, 0)
    for _ in range(20):
        depth.note_outcome(depth.start_request(), 3, 3)
    assert talker.expected_tokens(3)[3] < 1.1
    assert depth.start_request().expected_tokens(3)[3] > 1.5


# -- hysteresis


def test_nearly_equal_ks_do_not_alternate():
    """K = 3 is worth 1 + s tokens per second of K = 0's 1, with s swinging around 0 within the margin."""
    depth = AdaptiveK(make_times({0: 1.0, 3: 2.0}))
    one = row(0.0)
    chosen = set()
    for turn in range(400):
        worth = 1 + 0.9 * SWITCH_MARGIN * (-1) ** (turn // 4)
        one.acceptance.rates[:3] = [1.0, 2 * worth - 2, 0.0] if worth > 1 else [2 * worth - 1, 0.0, 0.0]
        chosen.add(ask(depth, [one], (0, 3)))
    settled = [one for one in depth.decisions if one.why == "worth" and one.before is not None]
    trials = [one for one in depth.decisions if one.why == "trial"]
    assert len(settled) <= len(trials)  # each of them the way back from a trial
    assert len(trials) <= 400 / MIN_ROUNDS_PER_PAID_TRIAL


def test_k_changes_beyond_the_margin():
    depth = AdaptiveK(make_times({0: 1.0, 3: 2.0}))
    one = row(0.0)
    ask(depth, [one], (0, 3))
    one.acceptance.rates[:2] = [1.0, 2.2 * SWITCH_MARGIN]  # E(3) = 2 + 2.2 MARGIN
    assert ask_often(depth, [one], REPLAN_ROUNDS, (0, 3))[-1] == 3


# -- trials


def test_trials_take_a_small_share_of_the_time():
    depth = AdaptiveK(make_times(TIMES))
    ks = ask_often(depth, [row(HOPELESS)], 2000)
    assert set(ks) == {0, 3}  # a trial of K = 3 loses less time than one of K = 7
    lost = ks.count(3) * (TIMES[3] - 1.0)
    assert 0.5 * TRIAL_SHARE * 2000 < lost <= TRIAL_SHARE * 2000 + MAX_TRIAL_DEBT


def test_cheap_trials_keep_their_spacing():
    depth = AdaptiveK(make_times({0: 1.0, 3: 1.001}))
    ks = ask_often(depth, [row(HOPELESS)], 1600, (0, 3))
    assert 0 < ks.count(3) <= 1600 / MIN_ROUNDS_PER_PAID_TRIAL


def trials(ks: Sequence[int]) -> list[int]:
    """Rounds, counted from 0, that were run with a K above 0."""
    return [number for number, k in enumerate(ks) if k]


def test_new_request_is_tried_at_once_then_at_doubling_distances():
    depth, new = AdaptiveK(make_times(TIMES)), Row(AcceptanceEstimate([HOPELESS] * 7))
    first = FREE_TRIAL_INTERVAL
    assert trials(ask_often(depth, [new], 16 * first))[:5] == [0, first, 3 * first, 7 * first, 15 * first]


def test_repeated_rounds_count_towards_the_next_trial():
    """Trials come as early as with single rounds, and the time in between pays for them."""
    depth, new = AdaptiveK(make_times(TIMES)), Row(AcceptanceEstimate([HOPELESS] * 7))
    spent: list[int] = []
    while len(spent) < 2000:
        k = ask(depth, [new])
        more = 3 if k == 0 else 0
        depth.repeat_choice(more)
        spent += [k] * (1 + more)
    due = [0, 16, 48, 112, 240]
    late = [at - on_time for at, on_time in zip(trials(spent), due, strict=False)]
    assert len(late) == len(due) and all(0 <= rounds <= 3 * number for number, rounds in enumerate(late))
    lost = spent.count(3) * (TIMES[3] - 1.0)
    assert 0.5 * TRIAL_SHARE * 2000 < lost <= TRIAL_SHARE * 2000 + MAX_TRIAL_DEBT


def test_new_request_starts_without_trial_debt():
    """Each new request has two trials at once by their distances, which the time share has not paid for."""
    depth = AdaptiveK(make_times(TIMES))
    for _ in range(20):
        new = Row(AcceptanceEstimate([HOPELESS] * 7))
        assert trials(ask_often(depth, [new], FREE_TRIAL_INTERVAL + 1)) == [0, FREE_TRIAL_INTERVAL]


def test_trial_debt_is_limited():
    """Each takes 49 rounds' time, of which one round earns 0.015: a further one is paid for after 3000 rounds."""
    depth, new = AdaptiveK(make_times({0: 1.0, 3: 50.0})), Row(AcceptanceEstimate([HOPELESS] * 7))
    first = FREE_TRIAL_INTERVAL
    assert trials(ask_often(depth, [new], 3000, (0, 3))) == [0, first, 3 * first][:MAX_TRIAL_DEBT]


@pytest.mark.parametrize(("stood", "then"), [(0, 0), (1, 3), (3, 3)])
def test_paid_trial_is_repeated_at_once(stood, then):
    """K = 3 takes one second more than K = 0, which is one token's time."""
    depth, new = AdaptiveK(make_times(TIMES)), Row(AcceptanceEstimate([HOPELESS] * 7))
    assert ask(depth, [new]) == 3
    depth.note_outcome(new.acceptance, 3, stood)
    assert ask(depth, [new]) == then
    assert {one.why for one in depth.decisions} <= {"trial", "worth"}
    assert depth.decisions[0].why == "trial"


def test_easier_text_raises_k():
    depth = AdaptiveK(make_times(TIMES))
    one = row(HOPELESS)
    for stands in (0.0, 1.0):
        ks = []
        for _ in range(600):
            ks.append(ask(depth, [one]))
            depth.note_outcome(one.acceptance, ks[-1], round(stands * ks[-1]))
        assert ks[-100:].count(0) == (0 if stands else pytest.approx(100, abs=2))


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
    assert ask_often(depth, [one], REPLAN_ROUNDS) == [0] * REPLAN_ROUNDS
    assert set(shelf.asked) == {3}
    shelf.loaded.add(3)
    assert ask_often(depth, [one], REPLAN_ROUNDS)[-1] == 3
    assert [decision.why for decision in depth.decisions] == ["loading", "worth"]


def test_best_k_is_chosen_where_nothing_is_loaded():
    shelf = Shelf()
    assert ask(AdaptiveK(make_times(TIMES), loaded=shelf), [row(FAIR)]) == 3
    assert shelf.asked == [3]


def test_requested_k_ignores_what_is_loaded():
    assert ask(AdaptiveK(make_times(TIMES), loaded=Shelf(0)), [row(FAIR, 7)]) == 7


def test_no_executable_is_loaded_for_a_trial_early():
    shelf = Shelf(0)
    depth, new = AdaptiveK(make_times(TIMES), loaded=shelf), Row(AcceptanceEstimate([HOPELESS] * 7))
    assert set(ask_often(depth, [new], ROUNDS_BEFORE_LOADING)) == {0}
    assert shelf.asked == []
    ask_often(depth, [new], REPLAN_ROUNDS)
    assert set(shelf.asked) == {3}  # a trial of K = 3 loses less time than one of K = 7


@pytest.mark.parametrize("truth", [1.0, 30.0])
def test_guessed_k_is_tried_until_measured(truth):
    """K = 3 is estimated a tenth slower than the measured K = 0; it really is, or is far slower."""
    estimates = make_times({0: 1.0, 3: 4.4})
    depth, one = AdaptiveK(make_times({0: 1.0}), estimates), row(SURE)
    assert ask(depth, [one], (0, 3)) == 3
    ks = []
    for _ in range(40):
        ks.append(ask(depth, [one], (0, 3)))
        depth.note_round_time((Bucket(1, 256, ks[-1]), "greedy"), {0: 1.0, 3: truth}[ks[-1]])
    assert depth.is_measured((Bucket(1, 256, 3), "greedy"))
    assert ks[-1] == (3 if truth == 1.0 else 0)


def test_optimism_about_a_guess_ends():
    """Rounds that never run back to back are not timed."""
    depth, one = AdaptiveK(make_times({0: 1.0}), make_times({0: 1.0, 3: 4.4})), row(SURE)
    ks = ask_often(depth, [one], REPLAN_ROUNDS * (OPTIMISTIC_PLANS + 2), (0, 3))
    assert ks[: REPLAN_ROUNDS * OPTIMISTIC_PLANS] == [3] * REPLAN_ROUNDS * OPTIMISTIC_PLANS
    assert ks[-1] == 0


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
    depth = AdaptiveK(make_times(TIMES))
    ask_often(depth, [row(HOPELESS)], 60000)
    assert len(depth.decisions) == 512
    assert depth.decisions[-1].round > depth.decisions[0].round > 1
    assert FixedK(3).decisions == ()
