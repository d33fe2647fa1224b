"""Continuous batching on a toy device: each text by hand, each step by its calls."""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_aot.cache.grid import Bucket, Chunk
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.cache.signature import RoundShape
from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.speculation.controller import AcceptanceEstimate, Decision, RoundMember
from tests.runtime.toy import (
    CHUNK,
    COSTS,
    LONG,
    ROUND,
    SAMPLED,
    VOCAB,
    ToyEngine,
    always,
    by_first_token,
    continue_alone,
    gaps,
    programs,
)

# -- every request gets the text it gets alone


class AnyK:
    """A controller that chooses what a test says, in turn."""

    decisions: tuple[Decision, ...] = ()

    def __init__(self, choices: Sequence[int]):
        self._choices = itertools.cycle(choices)

    def start_request(self, masked: bool = False) -> AcceptanceEstimate:
        return AcceptanceEstimate()

    def note_round_time(self, shape: RoundShape, seconds: float, resumed: bool = False) -> None:
        """Ignored."""

    def note_dispatch(self, rounds: int) -> None:
        assert rounds == 1

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        return buckets[next(self._choices) % len(buckets)]


@dataclass(frozen=True)
class Plan:
    """A request: the step at which it arrives, and the step at which it is cancelled or expires, if any."""

    first: int  # the prompt's first token: how many drafted tokens are right
    length: int
    tokens: int
    arrival: int
    priority: int = 0
    asked: dict[str, Any] = field(default_factory=dict)
    stop: int | None = None  # the index of the token that is to be the last
    cancelled: int | None = None
    expired: int | None = None

    def submit(self, engine: ToyEngine) -> Request:
        prompt = [self.first, *((self.first * 7 + place * 3) % VOCAB for place in range(1, self.length))]
        room = engine.grid.capacity + 1 - len(prompt)
        stops = [] if self.stop is None else continue_alone(prompt, self.stop + 1)[-1:]
        return engine.submit(prompt, min(self.tokens, room), self.priority, stop_token_ids=stops, **self.asked)

    def meet_fate(self, request: Request, step: int) -> None:
        if step == self.cancelled:
            request.cancel()
        if step == self.expired:
            request.deadline = request.submitted


def plans(asked: Sequence[dict[str, Any]], priorities: int = 2, most: int = 10) -> st.SearchStrategy[list[Plan]]:
    step = st.none() | st.integers(0, 30)
    plan = st.builds(
        Plan,
        first=st.integers(0, 8),
        length=st.integers(1, 16),
        tokens=st.integers(1, 12),
        arrival=st.integers(0, 25),
        priority=st.integers(0, priorities),
        asked=st.sampled_from(asked),
        stop=st.none() | st.integers(0, 8),
        cancelled=step,
        expired=step,
    )
    return st.lists(plan, min_size=1, max_size=most)


def serve(engine: ToyEngine, planned: Sequence[Plan]) -> list[Request]:
    """Requests arrive, are cancelled and expire between steps; runs until the loop is idle."""
    requests: dict[int, Request] = {}
    last = max(plan.arrival for plan in planned)
    work = sum(plan.length + plan.tokens + 2 for plan in planned)
    for step in range(last + work + 2):
        for number, plan in enumerate(planned):
            if plan.arrival == step:
                requests[number] = plan.submit(engine)
            if number in requests:
                plan.meet_fate(requests[number], step)
        if not engine.loop.is_idle:
            engine.step()
    assert engine.loop.is_idle, "requests are left, and with them nothing happens"
    return [requests[number] for number in range(len(planned))]


GRIDS = (
    "batch=1 length=16 k=0,7 prefill=4",
    "batch=3 length=17,24 k=0,3,5,7 prefill=3,16",
    "batch=1,2,4,8 length=16,64 k=0,3,7 prefill=4,16",
    "batch=2,5 length=8,40 k=0,1,2,7 prefill=8",
)
ASKED = (
    {},
    {},
    {"k": 0},
    {"k": 7},
    {"temperature": 0.5, "seed": 3},
    {"temperature": 1.0, "seed": -(1 << 63), "k": 7},
    {"frequency_penalty": 0.5},
    {"temperature": 0.1, "seed": 1 << 40, "repetition_penalty": 1.5},
    {"logit_bias": {11: 5.0}},
    {"logprobs": 2},
)


@settings(derandomize=True, max_examples=100)
@given(
    buckets=st.sampled_from(GRIDS),
    planned=plans(ASKED),
    choices=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    sampling=st.sampled_from([("greedy", "sample"), ("sample",)]),
)
def test_random_schedules_give_each_request_its_own_text(buckets, planned, choices, sampling):
    engine = ToyEngine(buckets, controller=AnyK(choices), sampling=sampling, right=by_first_token)
    for request in serve(engine, planned):
        engine.check(request)
        assert request.output.finish_reason in ("stop", "length", "cancelled")
    assert engine.counters.failures == 0
    assert sum(engine.counters.finished.values()) == len(planned)
    assert engine.counters.output_tokens == sum(len(request.output.token_ids) for request in engine.requests)


def test_requests_join_and_leave_between_rounds():
    engine = ToyEngine(pick=0)
    engine.submit([1], 6)
    engine.step()
    engine.submit([2], 2)
    engine.step()
    engine.step()
    assert [call.heads for call in engine.rounds] == [(1,), (1, 2), (1,)]  # two tokens are certain after one round
    engine.run()
    assert [call.heads for call in engine.rounds] == [(1,)] + [(1, 2)] + [(1,)] * 3


def test_next_round_is_dispatched_before_the_last_is_read():
    engine = ToyEngine(pick=3, right=always(0))
    engine.submit([1], 20)
    engine.step()
    assert programs(engine.steps[0]) == ["prefill", "kv_write", "draft", "verify", "kv_write"]
    assert programs(engine.step()) == ["draft", "verify", "kv_write", "read prefill", "read verify"]
    for _ in range(5):
        assert programs(engine.step()) == ["draft", "verify", "kv_write", "read verify"]


# -- long prompts


def test_prefill_chunks_run_between_rounds():
    engine = ToyEngine(pick=0, costs=COSTS)
    running = engine.submit([1], 12)
    engine.step()
    engine.step()
    engine.submit(LONG, 2)
    engine.run()
    chunks = [call.bucket for call in engine.calls("prefill")[1:]]
    assert chunks == [Chunk(16, 16), Chunk(16, 64), Chunk(16, 64)]
    for step in engine.steps[2:5]:
        late = ["kv_write"] * (2 if step is engine.steps[2] else 1)  # of the rounds before the prefill
        assert programs(step)[: len(late) + 3] == [*late, "prefill", "kv_write", "verify"]
    # A round with K = 0 is one verify. A kv_write precedes it behind the first chunk, and when the other request joins.
    assert sorted(gaps(engine, running)) == [3.0] * 6 + [3.0 + 1.0] * 2 + [4.0 + CHUNK] * 2 + [5.0 + CHUNK]


MIXED = "batch=1,2,4,8 length=16,64 k=0,3,7 prefill=4,16 mixed=1"


def test_chunks_run_in_the_calls_of_rounds():
    """But for the scores of a prompt, and where no request decodes."""
    engine = ToyEngine(MIXED, pick=3, right=always(0), sampling=("greedy", "sample", "prompt_logprobs"))
    engine.submit([1], 20)
    engine.step()
    engine.step()
    engine.submit(LONG, 2)
    late = ["read mixed"] * 2  # first token and round of the last chunk
    for chunk in range(3):
        calls = ["draft", "mixed", "kv_write", "kv_write", "read mixed" if chunk else "read verify"]
        assert programs(engine.step()) == calls
    assert programs(engine.step())[:5] == ["draft", "verify", "kv_write", *late]
    assert [one.bucket for one in engine.calls("mixed")] == [Bucket(1, 16, 3), *[Bucket(1, 64, 3)] * 2]
    engine.submit(LONG, 2, prompt_logprobs=0)
    assert programs(engine.step())[:4] == ["scored_prefill", "kv_write", "draft", "verify"]
    engine.run()
    assert engine.loop.stats().mixed_chunks == 3


def test_request_is_preempted_or_cancelled_while_rounds_prefill_its_prompt():
    engine = ToyEngine(f"{MIXED} kv_positions=64", pick=3, right=always(3))
    running = engine.submit([1], 50)
    engine.step()
    engine.step()
    cancelled = engine.submit(LONG[:20], 5)
    engine.step()
    cancelled.cancel()
    preempted = engine.submit(LONG, 5)
    engine.run()
    assert engine.loop.stats().mixed_chunks > 1
    assert (running.progress.preemptions, preempted.progress.preemptions) == (0, 1)
    assert cancelled.output.finish_reason == "cancelled"


def test_ends_of_several_prompts_share_a_chunk():
    """But for scores, for long rests, for another priority, and where they would fill less than half of it."""
    engine = ToyEngine(
        MIXED.replace("mixed=1", "packed=4"), pick=3, right=always(0), sampling=("greedy", "prompt_logprobs")
    )
    short, long = [1, 2, 3], LONG[:19]  # a row has 4 tokens
    asked = [(short, 0), (long, 0), ([4, 5], 0), (short, 1), ([6], 0)]
    requests = [engine.submit(prompt, 2, priority=priority) for prompt, priority in asked]
    scored = engine.submit(short, 2, prompt_logprobs=0)
    engine.run()
    chunks = engine.calls("packed_prefill", "prefill", "scored_prefill")
    assert chunks[0].slots == (0, 2, 3)
    assert [(one.program, one.bucket) for one in chunks] == [
        ("packed_prefill", (4, 4, 16)),
        ("prefill", Chunk(16, 16)),
        ("scored_prefill", Chunk(4, 16)),
        ("prefill", Chunk(4, 64)),
        ("prefill", Chunk(4, 16)),
    ]
    stats = engine.loop.stats()
    assert (stats.prefill_chunks, stats.packed_chunks, stats.padded_prefill) == (7, 3, 10 + 1 + 1 + 1)
    assert all(len(one.output.token_ids) == 2 for one in [*requests, scored])


@settings(derandomize=True, max_examples=30)
@given(planned=plans(ASKED, priorities=0), k=st.sampled_from([0, 3, 7]))
def test_token_waits_at_most_for_a_round_and_a_chunk(planned, k):
    engine = ToyEngine(pick=k, right=by_first_token, costs=COSTS)
    for request in serve(engine, planned):
        assert max(gaps(engine, request), default=0.0) <= ROUND + CHUNK
    for step in engine.steps:
        assert programs(step).count("prefill") <= 1


# -- slots and buckets


def test_round_runs_in_the_smallest_bucket():
    for rows, batch in {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8}.items():
        engine = ToyEngine(pick=3, right=always(0))
        for number in range(rows):
            engine.submit([number], 30)
        for _ in range(rows):
            engine.step()
        assert engine.rounds[-1].bucket.batch == batch
        assert engine.rounds[-1].slots == tuple(range(rows))
        assert engine.loop.stats().running == rows


@pytest.mark.parametrize("asked", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("gone", [{0}, {3}, {0, 2}, {1, 2}, {0, 1, 2}, {1, 2, 3}])
def test_remaining_requests_are_compacted(gone, asked):
    engine = ToyEngine("batch=1,2,4 length=64 k=0,3 prefill=4", k=3, right=by_first_token)
    requests = [engine.submit([number, 3], 30, **asked) for number in range(4)]
    for _ in range(5):
        engine.step()
    for number in gone:
        requests[number].cancel()
    engine.step()
    left = 4 - len(gone)
    if left:
        assert engine.rounds[-1].bucket.batch == {1: 1, 2: 2, 3: 4, 4: 4}[left]
        assert set(engine.rounds[-1].heads) == set(range(4)) - gone
    # Three rows stay where they are, and of fewer only those behind the smaller bucket move.
    expected = 0 if left >= 3 else len([number for number in set(range(4)) - gone if number >= left])
    assert engine.counters.moves == expected
    engine.run()


def test_new_request_fills_a_free_slot_before_any_move():
    engine = ToyEngine("batch=1,2 length=64 k=0 prefill=4", k=0)
    first, _ = engine.submit([1], 20), engine.submit([2], 20)
    for _ in range(3):
        engine.step()
    first.cancel()
    engine.submit([3], 20)
    engine.step()
    assert engine.rounds[-1].heads == (3, 2)
    assert engine.counters.moves == 0


@pytest.mark.parametrize(("prompt", "steps"), [(LONG, 1), ([2], 2)], ids=["prefilling", "finishing"])
def test_request_without_a_round_does_not_widen_the_batch(prompt, steps):
    engine = ToyEngine(pick=0)
    engine.submit([1], 12)
    engine.step()
    engine.submit(prompt, 2)
    for _ in range(steps):
        engine.step()
    assert (engine.rounds[-1].heads, engine.rounds[-1].bucket.batch) == ((1,), 1)


# -- order


def test_priority_overtakes_waiting_requests_only():
    engine = ToyEngine("batch=1 length=16 k=0 prefill=4", k=0)
    engine.submit([1], 5)
    engine.step()
    for number, priority in ((2, 0), (3, 0), (4, -1), (5, -1), (6, 1)):
        engine.submit([number], 1, priority=priority)
    engine.run()
    assert [call.heads for call in engine.rounds] == [(1,)] * 4  # it was not interrupted
    assert [call.heads[0] for call in engine.calls("prefill")] == [1, 4, 5, 2, 3, 6]


# -- freed slots


def cancel(request: Request) -> None:
    request.cancel()


def expire(request: Request) -> None:
    request.deadline = request.submitted


@pytest.mark.parametrize("end", [cancel, expire])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_slot_of_an_ended_request_is_reused(end, steps):
    engine = ToyEngine("batch=1 length=64 k=0,3 prefill=4,16", k=3, right=always(1))
    gone, waiting = engine.submit([8] * 30, 20), engine.submit([9], 5)
    for _ in range(steps):
        engine.step()
    ended_at = len(engine.steps)
    end(gone)
    engine.run()
    begun_at = next(at for at, step in enumerate(engine.steps) if (9,) in [call.heads for call in step])
    assert begun_at == ended_at  # at once: the round on its way is the old row's last
    assert gone.output.finish_reason == "cancelled"
    assert waiting.output.finish_reason == "length"


# -- K


def test_k_shrinks_to_zero_near_the_capacity():
    """Nothing stands, so each round commits one position; the host knows of it two rounds later.

    The K of a round is the largest for which length + what is in flight + 1 + K fits into 16.
    """
    engine = ToyEngine("batch=1 length=16 k=0,3,7 prefill=4", right=always(0))
    engine.submit([1, 2, 3, 4], 13)
    engine.run()
    assert [call.bucket.k for call in engine.rounds] == [7, 3, 3, 3, 3, 3, 0, 3, 0, 0, 0, 0]


def test_stats_never_wait_for_the_device():
    engine = ToyEngine("batch=1 length=16 k=0,7 prefill=8", right=always(0))
    engine.submit([1] * 8, 9)
    waits = []

    def look() -> None:
        looker = threading.Thread(target=engine.loop.stats, daemon=True)
        looker.start()
        looker.join(5.0)  # it takes microseconds, or it waits for what we hold up
        waits.append(looker.is_alive())

    engine.bundle.on_read = look
    engine.step()
    engine.step()
    assert waits and not any(waits)
