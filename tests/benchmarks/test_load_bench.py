"""dflash-bench load: what is recorded, what makes a record void, and its tables, with numbers checked by hand."""

import pytest

from dflash_aot.benchmarks import load_bench
from dflash_aot.benchmarks.contenders import Contender, hash_tokens
from dflash_aot.benchmarks.messages import ServedOpen, ServingWork, TimedAnswer
from dflash_aot.benchmarks.tables import Findings
from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.cache.grid import parse_grid
from tests.benchmarks.toy_worker import ToySpec, say

GRID = parse_grid("batch=1,2,4 length=64,128 k=0,7 prefill=64", 8)
PROMPTS = [[4], [5], [6]]
HONEST, OTHER = (Contender(name, "toy_worker", ToySpec(), k=7) for name in ("honest", "other"))


@pytest.fixture
def take(open_toy):
    """Faults of the second of two toys → the samples of closed loops."""

    def run(**faults) -> list[dict]:
        settings = load_bench.Settings(max_tokens=4, repeats=2, callers=(1, 2))
        with open_toy("honest") as honest, open_toy("other", **faults) as other:
            workers = [(HONEST, honest), (OTHER, other)]
            return list(load_bench.serve_closed_loops(workers, PROMPTS, settings, lambda words: None))

    return run


def test_contenders_take_turns_at_every_number_of_callers(take):
    samples = take()
    turns = {(one["repeat"], one["callers"], one["way"]) for one in samples}
    assert len(turns) == len(samples) == 8
    first, second = ["honest", "other"], ["other", "honest"]
    assert [one["way"] for one in samples] == [*first, *second, *second, *first]
    assert load_bench.find_fault(samples) == ""
    two = next(one for one in samples if one["callers"] == 2)
    assert two["tokens"] == [hash_tokens(say(PROMPTS[number], 4)) for number in two["prompts"]]
    assert two["prompts"] == [0, 1, 2] * 3  # at least 4 for each caller
    assert (two["first_us"], two["end_us"]) == ([500_000] * 9, [2_000_000] * 9)
    assert (two["seconds"], two["rounds"]) == (2.0, 27)


def test_other_tokens_make_the_record_void(take):
    assert load_bench.find_fault(take(lies=True)) == "other gives other tokens than honest for prompts 1"


class OpenLoop:
    """A worker that is asked for an open loop, and refuses the second prompt."""

    def __init__(self):
        self.asked = []

    def ask(self, question, kind):
        self.asked.append(question)
        answers: list[TimedAnswer | None] = [TimedAnswer(say(prompt, 2), [1.0, 3.0]) for prompt in question.prompts]
        answers[1] = None
        return ServedOpen(answers, ServingWork(rounds=1))


def test_contenders_get_the_same_prompts_at_the_same_times():
    settings = load_bench.Settings(max_tokens=2, repeats=2, arrivals=5, seed=3)
    workers = [(HONEST, OpenLoop()), (OTHER, OpenLoop())]
    samples = list(load_bench.serve_open_loops(workers, PROMPTS, [2.0, 20.0], settings, lambda words: None))
    (first, second) = (worker.asked for _, worker in workers)
    assert first == second
    assert [len(one.prompts) for one in first] == [5] * 4
    assert first[0].prompts == [[4], [5], [6], [4], [5]]
    assert len({one.due[0] for one in first}) == 4  # other times at each rate and in each repeat
    assert first[0].due[-1] == pytest.approx(10 * first[1].due[-1])  # ten times as often
    assert {(one["way"], one["rate"], one["repeat"]) for one in samples} == {
        (way, rate, repeat) for way in ("honest", "other") for rate in (2.0, 20.0) for repeat in (0, 1)
    }
    assert samples[0]["end_us"] == [3_000_000, None, *[3_000_000] * 3]
    assert samples[0]["tokens"][1] is None
    assert load_bench.find_fault(samples) == ""
    samples[0]["tokens"][3] = "others"
    assert load_bench.find_fault(samples) == "honest gives other tokens than honest for prompts 0"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"callers": (1, 3)}, "--callers: 3 is not a batch of the grid"),
        ({"callers": (4,), "prompts": 3}, "--callers: 4 callers share 3 prompts"),
        ({"callers": (8,)}, "batch=8"),
        ({"callers": (4,), "max_tokens": 65}, "length="),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    load_bench.check_settings(load_bench.Settings(callers=(4,)), GRID, 57)
    with pytest.raises((BadInput, GridMiss), match=words):
        load_bench.check_settings(load_bench.Settings(**settings), GRID, 57)


def test_rates_are_shares_of_the_throughput_of_closed_loops():
    closed = [
        {"way": way, "callers": callers, "tokens": ["x"] * 30, "seconds": seconds}
        for way, callers, seconds in (("a", 8, 3.0), ("a", 8, 2.0), ("a", 8, 6.0), ("a", 1, 9.0), ("b", 8, 1.0))
    ]
    assert load_bench.choose_rates(closed, "a", 8) == [3.0, 6.0, 8.0, 9.5]


def closed(way: str, callers: int, repeat: int, seconds: float) -> dict:
    """Two answers of five tokens."""
    facts = {"kind": "closed", "way": way, "exact": True, "callers": callers, "repeat": repeat, "seconds": seconds}
    times = {"tokens": ["x", "y"], "prompts": [0, 1], "first_us": [10_000, 30_000], "end_us": [18_000, 46_000]}
    counted = {"rounds": 4, "rows": 8, "row_rounds": 4, "host_us": 2000, "compile_events": 0}
    return facts | times | counted


def opened(way: str, rate: float) -> dict:
    """Three answers and a refusal."""
    facts = {"kind": "open", "way": way, "exact": True, "rate": rate, "repeat": 0, "prompts": [0, 1, 0, 1]}
    times = {"due_us": [1, 2, 3, 4], "tokens": ["x", "y", "x", None]}
    waits = {"first_us": [10_000, 20_000, 40_000, None], "end_us": [18_000, 28_000, 60_000, None]}
    return facts | times | waits | {"compile_events": 0}


@pytest.fixture(scope="module")
def findings(make_record) -> Findings:
    samples = [
        closed(way, callers, repeat, callers * (1.0 + repeat / 2) * slow)
        for way, slow in (("engine, K = 7", 1), ("jax.jit loop, K = 7", 2))
        for callers in (1, 2)
        for repeat in range(3)
    ]
    samples += [opened("engine, K = 7", rate) for rate in (4.0, 2.0)]
    assert load_bench.find_fault(samples) == ""
    return load_bench.make_findings(make_record(samples, {"max_tokens": 5}))


def test_callers_have_a_row_for_each_contender(findings):
    rows = list(findings.tables[0].rows)
    assert [row[:3] for row in rows] == [
        ("1", "engine, K = 7", "6.67"),  # 10 tokens in 1, 1.5 and 2 seconds
        ("1", "jax.jit loop, K = 7", "3.33"),
        ("2", "engine, K = 7", "3.33"),
        ("2", "jax.jit loop, K = 7", "1.67"),
    ]
    # 2 and 4 ms per token after the first token; 10 and 30 ms to the first token. Six answers have no 95th percentile.
    assert rows[0][3:] == ("3.00", "", "20.0", "")


def test_arrivals_have_a_row_for_each_rate(findings):
    table = findings.tables[1]
    assert [row[:2] for row in table.rows] == [("2", "engine, K = 7"), ("4", "engine, K = 7")]
    assert table.rows[0][2:] == ("20.0", "", "2.00", "")
    assert table.note.endswith("Refused prompts, which have no times: 2.")


def test_chart_has_the_values_of_the_table(findings):
    (chart,) = findings.charts
    engine, loop = chart.series
    assert (engine.label, engine.x, loop.x) == ("engine, K = 7", (3.0, 3.0), (3.0, 3.0))
    assert engine.y == pytest.approx((10 / 1.5, 10 / 3))
    assert engine.low == pytest.approx((5, 2.5)) and engine.high == pytest.approx((10, 5))
