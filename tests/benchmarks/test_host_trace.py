"""What a thread asks of JAX is counted, not estimated: exactly so on a toy, and on traces that one can check by eye."""

import jax
import numpy as np
import pytest

from dflash_aot.benchmarks.host_trace import (
    AWAIT,
    CALL,
    READ,
    TO_DEVICE,
    TO_HOST,
    Event,
    count,
    find_loop,
    find_rounds,
    trace,
)
from dflash_aot.benchmarks.jit_loop import JitLoop
from dflash_aot.benchmarks.peer_parts import Loaded
from dflash_aot.cache.errors import VoidRecord
from dflash_aot.runtime.engine_parts import load_engine_parts

SIDE = 1000  # of products that are not done when the next line asks for them


@pytest.fixture(scope="module")
def toys():
    """One compiled ahead of time, one jitted; both take long. And a device."""

    def verify(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(8):
            x = x @ x
        return x, x[0, :8]

    def draft(x: jax.Array) -> jax.Array:
        return verify(x)[1]

    x = jax.device_put(np.eye(SIDE, dtype=np.float32), jax.devices()[0])
    compiled, jitted = jax.jit(verify).lower(x).compile(), jax.jit(draft)
    jax.block_until_ready((compiled(x), jitted(x)))
    return compiled, jitted, x


def test_a_toy_is_counted_exactly(toys):
    compiled, jitted, x = toys
    device = jax.devices()[0]

    def run() -> float:
        for number in range(3):
            jax.device_put(np.full(4, number), device)
            _, small = compiled(x)
            small.copy_to_host_async()
            np.asarray(small)  # waits
            np.asarray(small)  # does not
        late = jitted(x)
        jax.device_put([np.zeros(3), np.zeros(3)], device)
        (first, second) = jax.device_get([late, small])  # waits once, for two
        jax.block_until_ready([second, small])  # one is of the host, the other is ready
        return float(first[0])

    returned, threads = trace(run)
    counts = count(find_loop(threads))
    assert returned == 1.0
    assert counts.calls == {"draft": 1, "verify": 3}
    assert (counts.to_device, counts.to_host) == (5, 5)  # device_get asks for copies of its two
    assert (counts.reads, counts.waits, counts.unseen) == (9, 4, 0)
    assert 0 < counts.wait_seconds < counts.seconds and 0 < counts.call_seconds < counts.seconds


def test_a_wait_for_several_is_one(toys):
    compiled, _, x = toys
    _, threads = trace(lambda: jax.block_until_ready(compiled(x)))
    counts = count(find_loop(threads))
    assert (counts.reads, counts.waits, counts.unseen) == (2, 1, 0)


def test_a_wait_where_nobody_looks_is_noticed(toys):
    compiled, _, x = toys
    _, threads = trace(lambda: compiled(x)[1].block_until_ready())
    counts = count(find_loop(threads))
    assert counts.waits == 0 and counts.unseen > 0


def test_what_is_watched_is_put_back():
    before = np.asarray, jax.device_get, jax.block_until_ready
    with pytest.raises(ZeroDivisionError):
        trace(lambda: 1 // 0)
    assert (np.asarray, jax.device_get, jax.block_until_ready) == before


@pytest.mark.parametrize("k", [0, 3])
def test_the_plain_loop_asks_for_as_much_as_it_says(bundle, tied, k):
    """One copy to the device and one read per round, and each program once."""
    opened = load_engine_parts(bundle("tiny"), tied.target, tied.draft, 3)
    loop = JitLoop(Loaded(opened.bundle, opened.state), 1, k, longest=4, tokens=24)
    served, threads = trace(lambda: loop.serve([[[5, 6, 7, 8]]]))
    events, rounds = find_rounds(find_loop(threads), served.work.rounds)
    counts = count(events)
    assert 1 < rounds == served.work.rounds - 3  # the first two, and the last one
    assert counts.calls == dict.fromkeys(("draft", "kv_write", "verify") if k else ("verify",), rounds)
    assert counts.to_device == counts.to_host == counts.reads == rounds
    assert counts.waits <= rounds and counts.unseen == 0


# -- by eye; times in milliseconds


def call(program: str, begin: float, end: float) -> Event:
    return Event(f"{CALL}{program})", begin * 1e6, end * 1e6)


def read(begin: float, end: float, arrays: int) -> list[Event]:
    """One that waits, which JAX notes twice."""
    awaits = [Event(f"CommonPjRtBuffer{AWAIT}", end * 1e6 - past, end * 1e6) for past in (2000, 1000)]
    return [Event(READ, begin * 1e6, end * 1e6, arrays), *awaits]


def make_round(start: float) -> list[Event]:
    """A call that is noted twice, a copy, a read that waits for 3 ms."""
    return [
        call("jit(verify)", start, start + 1),
        call("jit(verify)", start + 0.25, start + 0.75),
        Event(TO_HOST, start * 1e6 + 1e6, start * 1e6 + 2e6),
        *read(start + 2, start + 5, 2),
    ]


def test_a_call_that_is_noted_twice_is_one_call():
    counts = count(make_round(0))
    assert counts.calls == {"verify": 1} and counts.call_seconds == pytest.approx(0.001)
    assert (counts.to_device, counts.to_host, counts.reads, counts.waits) == (0, 1, 2, 1)
    assert (counts.wait_seconds, counts.seconds) == pytest.approx((0.003, 0.005))


def test_rounds_are_counted_behind_all_prefills():
    prefills = [call("prefill", 0, 2), call("jit(verify)", 10, 11), call("prefill", 20, 22)]
    put = Event(TO_DEVICE, 79e6, 79.5e6)  # before the first round that counts, and so not in it
    rounds = [event for start in (60, 70, 80, 90, 100) for event in make_round(start)]
    events, found = find_rounds([*prefills, put, *rounds], 6)
    assert found == 2  # from 80 to 100; a round that comes between prefills is none of them
    counts = count(events)
    assert (counts.calls, counts.to_device, counts.reads) == ({"verify": 2}, 0, 4)


def test_a_call_may_be_several_rounds():
    """Then all that follows the first of them is counted, for nobody knows which rounds are in which call."""
    alone = call("jit(verify)", 5, 6)
    events = [call("prefill", 0, 2), alone, call("prefill", 7, 8), *make_round(10)]
    events += [call("jit(rounds)", start, start + 1) for start in (20, 30, 40)]
    inside, found = find_rounds(events, 20)
    assert found == 19 and inside == [*make_round(10), *events[-3:]]


@pytest.mark.parametrize(
    ("programs", "rounds"),
    [
        (["prefill", *["jit(verify)"] * 3], 3),  # nothing is left between the third and the last
        (["prefill", *["jit(verify)"] * 5], 4),
        (["jit(rounds)", "prefill", *["jit(verify)"] * 5], 9),
    ],
)
def test_a_trace_that_cannot_be_counted_is_refused(programs, rounds):
    events = [call(program, 10 * place, 10 * place + 1) for place, program in enumerate(programs)]
    with pytest.raises(VoidRecord, match=f"a trace of {rounds} rounds holds"):
        find_rounds(events, rounds)


def test_the_loop_is_the_thread_that_calls():
    other = [Event("something", 0, 1), Event("else", 1, 2), Event("again", 2, 3)]
    assert find_loop([[], other, make_round(0)]) == make_round(0)
