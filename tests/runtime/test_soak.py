"""Soak of the engine loop on a toy device, and of an engine: random requests with cancels, deadlines and faults."""

import random
import time

import pytest

from dflash_aot.cache.errors import QueueFull
from dflash_aot.runtime import Engine
from tests.runtime.toy import GRID, ToyEngine
from tests.runtime.traffic import SLOTS, SPICES, THREADS, Memory, Traffic, check_accounts, run_threads

PARTS = 10  # memory is compared between the fifth part and the last
PROGRAMS = ("prefill", "draft", "verify", "sampled_verify", "kv_write", "admit", "move", "read verify", "read prefill")


class ToySoak:
    """Random requests on one toy engine; each that ended is checked, counted and forgotten."""

    def __init__(self, seed: int):
        self.engine = ToyEngine(f"{GRID} kv_positions=96", max_waiting=24, right=lambda text: sum(text) % 8)
        self.ended = self.output_tokens = self.refused = self.faults = 0
        self._rng = random.Random(seed)

    def run(self, count: int) -> None:
        """Submits so many requests, and steps until all have ended."""
        submitted = 0
        while submitted < count or not self.engine.loop.is_idle:
            while submitted < count and self._rng.random() < 0.4:
                submitted += 1
                self._submit()
            if self._rng.random() < 0.003 and not +self.engine.bundle._faults:
                self.engine.bundle.fail(self._rng.choice(PROGRAMS))
                self.faults += 1
            if self.engine.requests and self._rng.random() < 0.05:
                self._rng.choice(self.engine.requests).cancel()
            self.engine.step()
            self._collect()

    def _submit(self) -> None:
        rng = self._rng
        prompt = [rng.randrange(97) for _ in range(rng.choice((1, 3, 8, 30)))]
        if rng.random() < 0.5:  # a prefix that others have too
            prompt = [*range(rng.randrange(30)), prompt[0]]
        sampled = {"temperature": 0.5, "seed": rng.randrange(9), "frequency_penalty": rng.choice((0.0, 1.0))}
        try:
            self.engine.submit(
                prompt,
                rng.randint(1, 20),
                priority=rng.randrange(3),
                deadline=time.monotonic() + rng.choice((-1, 0.0005, 0.01)) if rng.random() < 0.1 else None,
                stop_token_ids=rng.sample(range(97), 2),
                **(sampled if rng.random() < 0.3 else {}),
            )
        except QueueFull:
            self.refused += 1

    def _collect(self) -> None:
        engine = self.engine
        for request in [request for request in engine.requests if request.output.finish_reason]:
            engine.check(request)
            self.ended += 1
            self.output_tokens += len(request.output.token_ids)
            engine.requests.remove(request)
            del engine.deltas[request]
        engine.bundle.log.clear()
        engine.steps.clear()


def test_toy_engine_accounts_for_every_request(soak_requests):
    soak, measured, count = ToySoak(seed=1), [], soak_requests // 2
    for _ in range(PARTS):
        soak.run(count // PARTS)
        measured.append(Memory.measure())
    stats = soak.engine.loop.stats()
    assert soak.ended + soak.refused == count // PARTS * PARTS
    assert (stats.running, stats.waiting, sum(stats.finished.values())) == (0, 0, soak.ended)
    assert stats.pages_used == 0 < min(stats.preemptions, stats.prefix_hits, stats.evictions)
    assert (stats.output_tokens, stats.refused) == (soak.output_tokens, soak.refused)
    assert stats.finished.keys() == {"length", "stop", "cancelled", "error"}
    assert soak.engine.state.resets == stats.failures > 0
    assert stats.failures <= soak.faults
    assert measured[-1].requests == 0
    assert measured[-1].blocks - measured[4].blocks < 2000


@pytest.mark.slow
def test_engine_accounts_for_every_request(bundle, cases, soak_requests):
    each, measured = soak_requests // 5 // PARTS // THREADS, []
    with Engine.open(bundle("sampled"), max_waiting=3, preload=True) as engine:
        traffic = Traffic(engine, cases)
        tally = traffic.told
        for part in range(PARTS):
            tally += run_threads(lambda rng: traffic.send(rng, each), seed=part)
            check_accounts(engine, tally)
            measured.append(Memory.measure())
        assert tally.ends.total() + tally.refused + tally.bad == each * PARTS * THREADS + len(SPICES)
        assert min(tally.ends["cancelled"], tally.ends["stop"], tally.bad, tally.refused) > 0
        stats = engine.stats()
        assert {sampled for _, sampled in stats.bucket_rounds} == {False, True}
        assert {bucket.batch for bucket, _ in stats.bucket_rounds} == {1, SLOTS}
    middle, last = measured[4], measured[-1]
    assert (last.arrays, last.array_bytes) <= (middle.arrays + 8, middle.array_bytes + 1024)  # masks of rows
    assert last.requests <= len(SPICES) + SLOTS
    assert last.blocks - middle.blocks < 2000  # of thousands of requests, each of hundreds
    assert last.resident - middle.resident < 16 << 20
