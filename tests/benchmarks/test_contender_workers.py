"""Answers of the engine, the plain loop and PyTorch as workers, without their processes: those of the reference."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_aot.benchmarks import engine_worker, jit_loop, torch_worker
from dflash_aot.benchmarks.messages import EngineSpec, JitSpec, ServeClosed, ServeOpen, TorchSpec, deal, gather
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


def test_engine_gives_the_reference_answers(places, question, cases):
    with engine_worker.open_engine(EngineSpec(*places, 3)) as handlers:
        check(handlers[ServeClosed](question), cases)
        served = handlers[ServeOpen](ServeOpen([prompt for prompt, _ in cases], [0.0, 0.0], TOKENS))
        assert [answer.token_ids for answer in served.answers] == [expected for _, expected in cases]


@pytest.mark.parametrize("options", [{}, {"lookup_tokens": 4}, {"exit_layer": 2}], ids=str)
def test_pytorch_gives_the_reference_answers(places, question, cases, options):
    with torch_worker.open_torch(TorchSpec(places[1], "float32", **options)) as handlers:
        served = handlers[ServeClosed](question)
    check(served, cases)
    distinct = sum(len(set(answer.arrivals)) - 1 for answer in served.answers[0])
    assert served.work.rounds == distinct <= len(cases) * (TOKENS - 1)
    assert options or distinct == len(cases) * (TOKENS - 1)


# -- callers of the engine

LONGER = 20


@pytest.fixture(scope="module")
def engine(bundle, tied):
    with Engine.open(bundle("tied"), tied.target, tied.draft, k=7) as engine:
        yield engine


@pytest.fixture(scope="module")
def callers_cases(tied) -> list[tuple[list[int], list[int]]]:
    return read_cases(tied, "len1", "len30", "len70", tokens=LONGER)


def test_callers_get_the_reference_answers_and_work_is_counted(engine, callers_cases):
    served = engine_worker.serve_closed(engine, ServeClosed(deal([prompt for prompt, _ in callers_cases], 2), LONGER))
    assert list(map(len, served.answers)) == [2, 1]
    for answer, (_, expected) in zip(gather(served.answers), callers_cases, strict=True):
        assert answer.token_ids == expected
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
        assert len(answer.arrivals) == LONGER and answer.arrivals[-1] < served.seconds
        assert len(set(answer.arrivals)) <= 1 + len(answer.accepted)  # tokens of a round arrive together
    work = served.work
    assert 0 < work.row_rounds <= work.rows
    assert work.host_seconds > 0 and work.compile_events == 0


def test_open_loop_gets_the_reference_answers_with_times_since_due(engine, callers_cases):
    due = [0.0, 0.01, -1000.0]
    arrived = engine_worker.serve_open(engine, ServeOpen([prompt for prompt, _ in callers_cases], due, LONGER))
    assert [answer.token_ids for answer in arrived.answers] == [expected for _, expected in callers_cases]
    assert 0 < arrived.answers[0].arrivals[0] < 999 < arrived.answers[2].arrivals[0]  # a wait starts when it is due


def test_refused_prompt_has_no_answer_and_delays_no_other(bundle, tied, callers_cases):
    prompt, expected = callers_cases[0]
    with Engine.open(bundle("tiny"), tied.target, tied.draft, k=0, max_waiting=1) as engine:

        def let_go() -> None:
            wait_until(lambda: engine.stats().refused == 2)
            stepper.let_go()

        with hold(engine) as stepper:  # the only slot is taken, and the queue holds one request
            question = ServeOpen([prompt] * 3, [0.0] * 3, 5)
            (answers, _) = finish(lambda: together(lambda: engine_worker.ask_when_due(engine, question), let_go))
    assert answers.count(None) == 2
    assert [answer.token_ids for answer in answers if answer] == [expected[:5]]


def together(*works):
    """Results of functions that run in threads."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [one.result() for one in [pool.submit(work) for work in works]]


# -- the plain loop


@pytest.fixture(scope="module")
def serve_plain(bundle, tied):
    """Three rows at K = 3."""
    spec = JitSpec(str(bundle("tied")), str(tied.target), str(tied.draft), 3, longest=70)
    with jit_loop.open_loop(spec) as handlers:
        yield handlers[ServeClosed]


def test_plain_loop_serves_several_lists(serve_plain, tied):
    names = ("len1", "len30", "len70")
    cases = dict(zip(names, read_cases(tied, *names, tokens=LONGER), strict=True))
    lists = [["len1"], ["len30", "len70", "len1"], ["len30"]]
    served = serve_plain(ServeClosed([[cases[name][0] for name in row] for row in lists], LONGER))
    assert [[one.token_ids for one in row] for row in served.answers] == [
        [cases[name][1] for name in row] for row in lists
    ]
    work = served.work
    assert work.compile_events == 0
    assert work.row_rounds < work.rows == 3 * work.rounds  # the first row is done while the second one goes on
    for answer in (one for row in served.answers for one in row):
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
        assert len(answer.arrivals) == LONGER and answer.arrivals[-1] <= served.seconds
        assert len(set(answer.arrivals)) == 1 + len(answer.accepted)
        assert sum(answer.accepted) + len(answer.accepted) >= LONGER - 1
    assert served.answers[1][0].arrivals[0] < served.answers[2][0].arrivals[0]  # a row waits for earlier prefills
