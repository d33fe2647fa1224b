"""Simulated runs of the controller on texts of known acceptance; outcomes arrive a round late, as in the loop."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.speculation.controller import AcceptanceEstimate, AdaptiveK, FixedK, SpeculationController

# Seconds per round by batch and K: of accelerators, where few tokens cost.
BATCHES = (1, 8)
ACCELERATOR = dict.fromkeys(BATCHES, {0: 1.0, 3: 1.32, 7: 1.38})
TPU = dict.fromkeys(BATCHES, {0: 1.0, 7: 1.2, 15: 1.25})
# Milliseconds of the embedded pair on two CPU cores.
EMBEDDED = {1: {0: 5.29, 3: 8.92, 7: 10.98, 15: 13.53}, 8: {0: 11.96, 3: 36.9, 7: 45.63, 15: 62.91}}
MACHINES = {"embedded": EMBEDDED, "accelerator": ACCELERATOR, "tpu": TPU}
RESUME = 0.5  # rounds with K = 0 that a round takes longer which resumes drafting
RECORDED = json.loads(Path(__file__).with_name("recorded_acceptance.json").read_text())["runs"]
EASY_TEXTS, HARD_TEXTS = RECORDED[:12], RECORDED[12:]

Text = Sequence[int]  # by position, drafted tokens that stand
Times = Mapping[int, Mapping[int, float]]  # seconds per round, by batch and K


@dataclass(eq=False)
class Row:
    """A request that wants all tokens of its text."""

    acceptance: AcceptanceEstimate
    text: Text
    done: int = 0
    requested_k: int | None = None

    @property
    def tokens_outstanding(self) -> int:
        return len(self.text) - self.done

    def verify(self, k: int) -> int:
        accepted = min(k, self.text[self.done])
        self.done += accepted + 1
        return accepted


def simulate(
    controller: SpeculationController, times: Times, texts: Sequence[Text], batch: int, together: bool = False
) -> float:
    """Seconds of an engine that serves the texts in order, `batch` requests at a time.

    One request joins per round, as prompts are prefilled one after the other. together: the next ones come when all
    before them have ended, else one as soon as one has ended. A round runs in the smallest batch of `times` that holds
    its requests.
    """
    line, rows, unread, last_k, joining = [*texts], [], [], -1, True
    spent = 0.0
    while line or rows:
        if line and len(rows) < batch and joining:
            rows.append(Row(controller.start_request(), line.pop(0)))
        joining = not together or (joining and len(rows) < batch)
        size = min(one for one in times if one >= len(rows))
        k = controller.choose_bucket([Bucket(size, 256, k) for k in times[size]], rows, "greedy").k
        controller.note_dispatch(1)
        resumed = last_k == 0 < k
        seconds, last_k = times[size][k] + resumed * RESUME * times[size][0], k
        spent += seconds
        outcomes = [(row, k, row.verify(k)) for row in rows]
        for row, *outcome in unread:
            row.acceptance.update(*outcome)
        controller.note_round_time((Bucket(size, 256, k), "greedy"), seconds, resumed)
        unread, rows = outcomes, [row for row in rows if row.tokens_outstanding > 0]
        joining = joining or not rows
    return spent


def compare_with_best(times: Times, runs: Sequence[Sequence[Text]], batch: int, together: bool = False) -> float:
    """Seconds of new engines that choose K, one for each of `runs`, by those of the fixed K that is best for all."""
    measured = {(Bucket(size, 256, k), "greedy"): one for size in times for k, one in times[size].items()}
    controllers = partial(AdaptiveK, measured), *(partial(FixedK, k) for k in times[batch])
    spent = [sum(simulate(make(), times, texts, batch, together) for texts in runs) for make in controllers]
    return spent[0] / min(spent[1:])


def make_mixed_texts(count: int, seed: int) -> list[Text]:
    """Texts of 200 positions, every second one hard: each drafted token stands at 0.3 if all before it do, else 0.9."""
    draw = random.Random(seed).random
    texts = []
    for number in range(count):
        rate = 0.3 if number % 2 else 0.9
        texts.append([next(at for at in range(16) if at == 15 or draw() > rate) for _ in range(200)])
    return texts


@pytest.mark.parametrize(("callers", "most"), [(1, 0.9), (4, 0.97), (16, 0.97), (32, 1.02)])
def test_mixed_requests_are_served_faster_than_with_any_fixed_k_until_no_draft_pays(callers, most):
    """On a machine that 64 rows keep busy, where drafting does not pay for 32 callers."""
    seconds = {k: max(1.0, callers * (k + 1) / 64) + (0.8 if k else 0.0) for k in (0, 3, 7, 15)}
    runs = [make_mixed_texts(4 * callers + 8, seed) for seed in range(2)]
    assert compare_with_best({callers: seconds}, runs, callers) <= most


def test_changing_text_beats_every_fixed_k():
    assert compare_with_best(ACCELERATOR, [[([7] * 512 + [0] * 512) * 4] * 4], 1) <= 0.95


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("batch", "together", "texts"),
    [(1, False, HARD_TEXTS), (8, False, EASY_TEXTS), (8, True, HARD_TEXTS)],
    ids=["alone-hard", "following-easy", "together-hard"],
)
def test_recorded_texts_are_near_the_best_fixed_k(machine, batch, together, texts):
    runs = [random.Random(seed).choices(texts, k=24) for seed in range(5)]
    assert compare_with_best(MACHINES[machine], runs, batch, together) <= 1.035
