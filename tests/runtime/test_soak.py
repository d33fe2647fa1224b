"""Soak of the engine loop on a toy device: random requests with cancels, deadlines and faults."""

import gc
import random
import sys
import time
from collections import Counter

import pytest

from dflash_aot.cache.errors import QueueFull
from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.scheduler import kv_pages, scheduler
from tests.runtime.toy import GRID, PAGE, ToyEngine

PARTS = 10  # memory is compared between the fifth part and the last
PROGRAMS = ("prefill", "draft", "verify", "sampled_verify", "kv_write", "admit", "move", "read verify", "read prefill")
MIXED = ("mixed", "sampled_mixed", "read mixed")  # in addition, of grids with mixed calls
PACKED = ("packed_prefill", "read packed_prefill")
OFFLOAD = ("read_page", "write_page", "read read_page")
OFFLOAD_STATES = ("read_state", "write_state", "read read_state")


class ToySoak:
    """Random requests on one toy engine; each that ended is checked, counted and forgotten."""

    def __init__(self, seed: int, more: str = ""):
        self.engine = ToyEngine(
            f"{GRID} kv_positions=96{more}",
            max_waiting=24,
            right=lambda text: sum(text) % 8,
            host_bytes=300 if "offload" in more else 0,
            host_speed=40.0,
        )
        self._programs = PROGRAMS + MIXED * self.engine.grid.mixed + PACKED * (self.engine.grid.packed > 0)
        self._programs += OFFLOAD * self.engine.grid.offload
        self._programs += OFFLOAD_STATES * (" saved_states" in more and "offload" in more)
        self._texts = [[1]]  # prompts with their answers
        self.ended = self.output_tokens = self.refused = self.faults = 0
        self._rng = random.Random(seed)

    def run(self, count: int) -> None:
        """Submits so many requests, and steps until all have ended."""
        submitted = 0
        while submitted < count or not self.engine.loop.is_idle:
            while submitted < count and self._rng.random() < 0.4:
                submitted += 1
                self._submit()
            if self._rng.random() < 0.006 and not +self.engine.bundle._faults:
                self.engine.bundle.fail(self._rng.choice(self._programs))
                self.faults += 1
            if self.engine.requests and self._rng.random() < 0.05:
                self._rng.choice(self.engine.requests).cancel()
            self.engine.step()
            check_tables(self.engine)
            self._collect()

    def _submit(self) -> None:
        rng = self._rng
        prompt = [rng.randrange(97) for _ in range(rng.choice((1, 3, 8, 30)))]
        if rng.random() < 0.5:  # a prefix that others have too
            prompt = [*range(rng.randrange(30)), prompt[0]]
        if self.engine.grid.saved_states and rng.random() < 0.5:  # the next turn
            prompt = [*rng.choice(self._texts[-8:])[:40], prompt[0]]
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
            self._texts = [*self._texts[-8:], [*request.prompt, *request.output.token_ids]]
            engine.requests.remove(request)
            del engine.deltas[request]
        engine.bundle.log.clear()
        engine.steps.clear()


def check_tables(engine: ToyEngine) -> None:
    """Pages have as many users as tables name them, and only one from the position on where a request writes."""
    scheduler = engine.loop._scheduler
    users = Counter(page for running in scheduler.slots for page in running.table.pages)
    assert users == Counter({page: count for page, count in enumerate(scheduler.kv.pool._users) if count})
    for running in scheduler.slots:
        assert len({*running.table.pages}) == len(running.table.pages)
        begin = max(running.length // PAGE, running.table.keyed_pages)  # where copies of the host end
        assert all(users[page] == 1 for page in running.table.pages[begin:])


@pytest.mark.parametrize("more", ["", " mixed=1 packed=4 offload=1"])
def test_toy_engine_accounts_for_every_request(soak_requests, more, monkeypatch, request):
    monkeypatch.setattr(kv_pages, "TRANSFER_BYTES", 3 * PAGE)
    gc.freeze()  # collections pass over the millions of objects of a worker
    request.addfinalizer(gc.unfreeze)
    soak, measured, count = ToySoak(1, more), [], soak_requests // 2
    for _ in range(PARTS):
        soak.run(count // PARTS)
        gc.collect()
        measured.append(sys.getallocatedblocks())
    stats = soak.engine.loop.stats()
    assert soak.ended + soak.refused == count // PARTS * PARTS
    assert (stats.running, stats.waiting, sum(stats.finished.values())) == (0, 0, soak.ended)
    assert stats.pages_used == 0 < min(stats.preemptions, stats.prefix_hits, stats.evictions)
    assert (stats.output_tokens, stats.refused) == (soak.output_tokens, soak.refused)
    assert stats.finished.keys() == {"length", "stop", "cancelled", "error"}
    assert soak.engine.state.resets == stats.failures > 0
    assert stats.failures <= soak.faults
    assert min(stats.host_hits, stats.host_evictions, stats.restored_bytes) > 0 or not more
    assert (stats.mixed_chunks > 0, stats.packed_chunks > 0) == (soak.engine.grid.mixed > 0, more != "")
    assert not any(type(found) is Request for found in gc.get_objects())
    assert measured[-1] - measured[4] < 2000  # of thousands of requests, each of hundreds


@pytest.mark.parametrize("more", ["1 rounds=3", "3 offload=1", "17 offload=1"])
def test_saved_states_are_those_of_their_texts_whatever_is_evicted(more, monkeypatch):
    """The toy compares the state of a slot with its text in every call. Answers save theirs after 8 tokens."""
    monkeypatch.setattr(scheduler, "ANSWER_TOKENS", 8)
    monkeypatch.setattr(kv_pages, "TRANSFER_BYTES", 3 * PAGE)
    soak = ToySoak(2, f" saved_states={more}")
    soak.run(1500)
    stats = soak.engine.loop.stats()
    assert stats.prefix_hits > 100
    assert min(stats.state_evictions, stats.preemptions, stats.evictions, soak.faults) > 0
    assert (min(stats.host_hits, stats.host_evictions) > 0) == ("offload" in more)
