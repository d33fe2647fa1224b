"""The latency of a mix of callers, by a simulated clock."""

import pytest

from tests.runtime.toy import (
    CHUNK,
    COSTS,
    ROUND,
    ToyEngine,
    always,
    gaps,
)


def serve_callers(engine: ToyEngine, callers: int, each: int, tokens: int) -> None:
    """Each caller submits `each` requests, the next one when the last has ended."""
    waiting = {engine.submit([1, 2, 3, 4], tokens): each - 1 for _ in range(callers)}
    while not engine.loop.is_idle:
        engine.step()
        for request in [request for request, left in waiting.items() if request.finish_reason and left]:
            waiting[engine.submit([1, 2, 3, 4], tokens)] = waiting.pop(request) - 1


def first_token_seconds(engine: ToyEngine) -> list[float]:
    return [engine.deltas[request][0][0] - engine.submitted_at[request] for request in engine.requests]


@pytest.mark.parametrize("callers", [1, 4, 8])
def test_latency_is_that_of_rounds_and_other_prompts_chunks(callers):
    """41 tokens are the prefill's and those of 10 rounds of K = 3, of which all stand; the 11th round is lost.

    So a caller is back after 11 steps, and meanwhile each other one's chunk goes in once.
    """
    engine = ToyEngine(pick=3, right=always(3), costs=COSTS)
    serve_callers(engine, callers, each=3, tokens=41)
    for request in engine.requests:
        assert 10 * ROUND <= sum(gaps(engine, request)) <= 10 * ROUND + (callers - 1) * CHUNK
    firsts = first_token_seconds(engine)
    # At first one prompt per step goes in, behind those asked before it.
    assert firsts[:callers] == [place * (CHUNK + ROUND) + 5.0 for place in range(callers)]
    # Later ones wait for what is left of the round just read, for the lost one, and for another's chunk before that.
    assert all(1.0 + ROUND + 5.0 <= first <= 1.0 + CHUNK + ROUND + 5.0 for first in firsts[callers:])
    ended = max(engine.deltas[request][-1][0] for request in engine.requests)
    assert ended <= (callers - 1 + 11 * 3) * ROUND + callers * 3 * CHUNK
    if callers == 1:
        assert firsts == [5.0, 11.0, 11.0]
        assert ended == 3 * (CHUNK + 11 * ROUND) - ROUND - 1.0  # but for the lost round, and the last kv_write


def test_more_callers_get_more_throughput():
    ends = {}
    for callers, each in ((1, 8), (2, 4), (4, 2), (8, 1)):
        engine = ToyEngine(pick=3, right=always(3), costs=COSTS)
        serve_callers(engine, callers, each, tokens=41)
        ends[callers] = engine.bundle.clock.host
    assert ends[1] > ends[2] > ends[4] > ends[8]
