"""Answers of the engine, the plain loop and PyTorch as workers, without their processes: those of the reference."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_aot.benchmarks import engine_worker, jit_loop, torch_worker
from dflash_aot.benchmarks.messages import EngineSpec, JitSpec, ServeClosed, ServeOpen, TorchSpec, deal, gather
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.runtime import Engine
from tests.runtime.stepper import finish, hold, wait_until

TOKENS = 16


@pytest.fixture(scope="module")
def places(bundle, tied) -> tuple[str, str, str]:
    return str(bundle("tiny")), str(tied.target), str(tied.draft)


def read_cases(golden, *names: str, tokens: int = TOKENS) -> list[tuple[list[int], list[int]]]:
    """Prompts, and the reference's answers."""
    chosen = {one["name"]: (one["prompt_ids"], one["ar_output_ids"]) for one in golden.facts["prompts"]}
    return [(chosen[name][0], chosen[name][1][len(chosen[name][0]) :][:tokens]) for name in names]


@pytest.fixture(scope="module")
def cases(tied) -> list[tuple[list[int], list[int]]]:
    return read_cases(tied, "len5", "len_eq_block")


@pytest.fixture
def question(cases) -> ServeClosed:
    return ServeClosed([[prompt for prompt, _ in cases]], TOKENS)


def check(served, cases) -> None:
    (answers,) = served.answers
    assert [answer.token_ids for answer in answers] == [expected for _, expected in cases]
    for answer in answers:
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
        assert len(answer.arrivals) == TOKENS and answer.arrivals[-1] <= served.seconds


@pytest.mark.parametrize("k", [0, 3, "auto"])
def test_engine_gives_the_reference_answers(places, question, cases, k):
    with engine_worker.open_engine(EngineSpec(*places, k)) as handlers:
        check(handlers[ServeClosed](question), cases)
        served = handlers[ServeOpen](ServeOpen([prompt for prompt, _ in cases], [0.0, 0.0], TOKENS))
        assert [answer.token_ids for answer in served.answers] == [expected for _, expected in cases]


def test_plain_loop_gives_the_reference_answers(places, question, cases):
    with jit_loop.open_loop(JitSpec(*places, 3, longest=8)) as handlers:
        served = handlers[ServeClosed](question)
    check(served, cases)
    assert served.work.rounds_by_k == {3: served.work.rounds}


@pytest.mark.parametrize("options", [{}, {"lookup_tokens": 4}, {"exit_layer": 2}], ids=str)
def test_pytorch_gives_the_reference_answers(places, question, cases, options):
    with torch_worker.open_torch(TorchSpec(places[1], "float32", **options)) as handlers:
        served = handlers[ServeClosed](question)
    check(served, cases)
    distinct = sum(len(set(answer.arrivals)) - 1 for answer in served.answers[0])
    assert served.work.rounds == distinct <= len(cases) * (TOKENS - 1)
    assert options or distinct == len(cases) * (TOKENS - 1)


def test_pytorch_in_bfloat16_gives_as_many_tokens(places, question):
    with torch_worker.open_torch(TorchSpec(places[1], "bfloat16")) as handlers:
        answers = handlers[ServeClosed](question).answers[0]
    assert [len(answer.token_ids) for answer in answers] == [TOKENS, TOKENS]


# -- callers of the engine

LONGER = 20


@pytest.fixture(scope="module")
def engine(bundle, tied):
    with Engine.open(bundle("tied"), tied.target, tied.draft, k=7) as engine:
        yield engine


@pytest.fixture(scope="module")
def callers_cases(tied) -> list[tuple[list[int], list[int]]]:
    return read_cases(tied, "len1", "len30", "len70", tokens=LONGER)


def test_callers_get_the_reference_answers_with_arrival_times(engine, callers_cases):
    served = engine_worker.serve_closed(engine, ServeClosed(deal([prompt for prompt, _ in callers_cases], 2), LONGER))
    assert list(map(len, served.answers)) == [2, 1]
    for answer, (_, expected) in zip(gather(served.answers), callers_cases, strict=True):
        assert answer.token_ids == expected
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
        assert len(answer.arrivals) == LONGER and answer.arrivals[-1] < served.seconds
        assert len(set(answer.arrivals)) <= 1 + len(answer.accepted)  # tokens of a round arrive together


def test_work_of_serving_is_counted(engine, callers_cases):
    work = engine_worker.serve_closed(engine, ServeClosed([[prompt for prompt, _ in callers_cases]], LONGER)).work
    assert work.rounds == sum(work.rounds_by_k.values()) == work.rows
    assert set(work.rounds_by_k) == {7}
    assert 0 < work.row_rounds <= work.rows and work.padded_rows == 0
    assert work.host_seconds > 0 and work.host_wall_seconds > 0 and work.compile_events == 0


def test_open_loop_gets_the_reference_answers_with_times_since_due(engine, callers_cases):
    due = [0.0, 0.01, 0.02]
    arrived = engine_worker.serve_open(engine, ServeOpen([prompt for prompt, _ in callers_cases], due, LONGER))
    assert [answer.token_ids for answer in arrived.answers] == [expected for _, expected in callers_cases]
    for answer, late in zip(arrived.answers, arrived.late, strict=True):
        assert 0 <= late < answer.arrivals[0]


def test_wait_starts_when_the_prompt_is_due(engine, callers_cases):
    arrived = engine_worker.serve_open(engine, ServeOpen([callers_cases[0][0]], [-1000.0], 2))
    ((answer,), (late,)) = arrived.answers, arrived.late
    assert 999 < late < answer.arrivals[0] < answer.arrivals[-1]


def test_refused_prompt_has_no_answer_and_delays_no_other(bundle, tied, callers_cases):
    prompt, expected = callers_cases[0]
    with Engine.open(bundle("tiny"), tied.target, tied.draft, k=0, max_waiting=1) as engine:

        def let_go() -> None:
            wait_until(lambda: engine.stats().refused == 2)
            stepper.let_go()

        with hold(engine) as stepper:  # the only slot is taken, and the queue holds one request
            question = ServeOpen([prompt] * 3, [0.0] * 3, 5)
            (ends, _) = finish(lambda: together(lambda: engine_worker.ask_when_due(engine, question), let_go))
    answers = [answer for answer, _ in ends]
    assert answers.count(None) == 2
    assert [answer.token_ids for answer in answers if answer] == [expected[:5]]


def together(*works):
    """Results of functions that run in threads."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [one.result() for one in [pool.submit(work) for work in works]]


# -- several rows of the plain loop


@pytest.fixture(scope="module")
def loop(bundle, untied) -> jit_loop.JitLoop:
    """Two rows at K = 15."""
    programs = jit_loop.JittedPrograms(read_manifest(bundle("untied")), untied.target, untied.draft)
    return jit_loop.JitLoop(programs, 2, 15, longest=70, tokens=24)


def test_plain_loop_serves_several_lists(loop, untied):
    names = ("len1", "len30", "len70")
    cases = dict(zip(names, read_cases(untied, *names, tokens=24), strict=True))
    lists = [["len1"], ["len30", "len70", "len1"]]
    served = loop.serve([[cases[name][0] for name in row] for row in lists])
    assert [[one.token_ids for one in row] for row in served.answers] == [
        [cases[name][1] for name in row] for row in lists
    ]
    work = served.work
    assert work.compile_events == 0
    assert work.rows == 2 * work.rounds == work.row_rounds + work.padded_rows
    assert work.rounds_by_k == {15: work.rounds}
    assert work.padded_rows > 0  # the first row is done while the second one goes on
    for answer in (one for row in served.answers for one in row):
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
        assert len(answer.arrivals) == 24 and answer.arrivals[-1] <= served.seconds
        assert len(set(answer.arrivals)) == 1 + len(answer.accepted)
        assert sum(answer.accepted) + len(answer.accepted) >= 23


def test_row_of_the_plain_loop_waits_for_earlier_prefills(loop, untied):
    ((prompt, _),) = read_cases(untied, "len30")
    (first,), (second,) = loop.serve([[prompt], [prompt]]).answers
    assert first.token_ids == second.token_ids and first.arrivals[0] < second.arrivals[0]
