"""Callers of an engine: what they get, when, and what it took."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_aot.benchmarks.callers import come_when_due, serve_arrivals, serve_lists
from dflash_aot.benchmarks.traffic import Arrive, Serve, deal, gather
from dflash_aot.runtime import Engine
from tests.runtime.stepper import finish, hold, wait_until

TOKENS = 20
NAMES = ("len1", "len30", "len70")


@pytest.fixture(scope="module")
def engine(bundle, tied):
    with Engine.open(bundle("tied"), tied.target, tied.draft, k=7) as engine:
        yield engine


@pytest.fixture(scope="module")
def cases(tied) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what the reference says behind each."""
    chosen = {one["name"]: (one["prompt_ids"], one["ar_output_ids"]) for one in tied.facts["prompts"]}
    return [(chosen[name][0], chosen[name][1][len(chosen[name][0]) :][:TOKENS]) for name in NAMES]


def test_callers_get_what_the_reference_says_and_when_they_got_it(engine, cases):
    served = serve_lists(engine, Serve(deal([prompt for prompt, _ in cases], 2), TOKENS))
    assert list(map(len, served.answers)) == [2, 1]
    for answer, (_, expected) in zip(gather(served.answers), cases, strict=True):
        assert answer.token_ids == expected
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
        assert len(answer.arrivals) == TOKENS and answer.seconds < served.seconds
        assert len(set(answer.arrivals)) <= 1 + len(answer.accepted)  # those of a round come together


def test_what_serving_took_is_counted(engine, cases):
    work = serve_lists(engine, Serve([[prompt for prompt, _ in cases]], TOKENS)).work
    assert work.rounds == sum(work.rounds_by_k.values()) == work.rows
    assert set(work.rounds_by_k) == {7}
    assert 0 < work.row_rounds <= work.rows and work.padded_rows == 0
    assert work.host_seconds > 0 and work.host_wall_seconds > 0 and work.compile_events == 0


def test_who_comes_at_a_time_gets_what_the_reference_says_and_waits_from_then_on(engine, cases):
    due = [0.0, 0.01, 0.02]
    arrived = serve_arrivals(engine, Arrive([prompt for prompt, _ in cases], due, TOKENS))
    assert [answer.token_ids for answer in arrived.answers] == [expected for _, expected in cases]
    for answer, late in zip(arrived.answers, arrived.late, strict=True):
        assert 0 <= late < answer.first_seconds


def test_a_wait_begins_when_the_prompt_was_to_come(engine, cases):
    arrived = serve_arrivals(engine, Arrive([cases[0][0]], [-1000.0], 2))
    ((answer,), (late,)) = arrived.answers, arrived.late
    assert 999 < late < answer.first_seconds < answer.seconds


def test_who_is_refused_has_no_answer_and_keeps_nobody_else_from_one(bundle, tied, cases):
    prompt, expected = cases[0]
    with Engine.open(bundle("tiny"), tied.target, tied.draft, k=0, max_waiting=1) as engine:

        def let_go() -> None:
            wait_until(lambda: engine.stats().refused == 2)
            stepper.let_go()

        with hold(engine) as stepper:  # the only slot is taken, and there is one place to wait
            question = Arrive([prompt] * 3, [0.0] * 3, 5)
            (ends, _) = finish(lambda: together(lambda: come_when_due(engine, question), let_go))
    answers = [answer for answer, _ in ends]
    assert answers.count(None) == 2
    assert [answer.token_ids for answer in answers if answer] == [expected[:5]]


def together(*works):
    """Their results, each in a thread."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [one.result() for one in [pool.submit(work) for work in works]]
