"""Many callers: what is taken down, what makes it void, and what it says, in numbers to check by eye."""

import pytest

from dflash_aot.benchmarks import load_bench
from dflash_aot.benchmarks.findings import Findings
from dflash_aot.benchmarks.orders import TorchOrder
from dflash_aot.benchmarks.record import SCHEMA, Record, describe_site
from dflash_aot.benchmarks.traffic import Answer, Arrived, Work
from dflash_aot.benchmarks.ways import Way, name_tokens
from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.cache.grid import parse_grid
from tests.benchmarks.toy_peer import open_toy, say

GRID = parse_grid("batch=1,2,4 length=64,128 k=0,7 prefill=64", 8)
PROMPTS = [[4], [5], [6]]
HONEST, OTHER = (Way(name, "toy_peer", TorchOrder("", "float32"), k=7) for name in ("honest", "other"))


def take(**wrong) -> list[dict]:
    """Closed loops of an honest toy, and of another one."""
    settings = load_bench.Settings(max_tokens=4, repeats=2, callers=(1, 2))
    with open_toy("honest") as honest, open_toy("other", **wrong) as other:
        peers = [(HONEST, honest), (OTHER, other)]
        return list(load_bench.serve_closed(peers, PROMPTS, settings, lambda words: None))


def test_ways_take_turns_at_every_number_of_callers():
    samples = take()
    turns = {(one["repeat"], one["callers"], one["way"]) for one in samples}
    assert len(turns) == len(samples) == 8
    first, second = ["honest", "other"], ["other", "honest"]
    assert [one["way"] for one in samples] == [*first, *second, *second, *first]
    assert load_bench.find_fault(samples) == ""
    two = next(one for one in samples if one["callers"] == 2)
    assert two["tokens"] == [name_tokens(say(prompt, 4)) for prompt in PROMPTS]
    assert (two["first_us"], two["end_us"]) == ([500_000] * 3, [2_000_000] * 3)
    assert (two["seconds"], two["rounds"]) == (2.0, 9)


def test_a_way_that_lies_makes_the_record_void():
    assert load_bench.find_fault(take(lies=True)) == "other gives other tokens than honest for prompts 1"


def test_a_way_that_compiles_makes_the_record_void():
    assert load_bench.find_fault(take(compile_events=3)) == "other compiled while serving"


def test_nothing_measured_says_nothing():
    assert load_bench.find_fault([]) == "no way answered"


class Coming:
    """A peer that is asked for arrivals: it refuses the second one."""

    def __init__(self):
        self.asked = []

    def ask(self, question, kind):
        self.asked.append(question)
        answers: list[Answer | None] = [Answer(say(prompt, 2), [1.0, 3.0]) for prompt in question.prompts]
        answers[1] = None
        return Arrived(answers, [0.001] * len(answers), Work(rounds=1))


def test_all_ways_get_the_same_prompts_at_the_same_times():
    settings = load_bench.Settings(max_tokens=2, repeats=2, arrivals=5, seed=3)
    peers = [(HONEST, Coming()), (OTHER, Coming())]
    samples = list(load_bench.serve_open(peers, PROMPTS, [2.0, 20.0], settings, lambda words: None))
    (first, second) = (peer.asked for _, peer in peers)
    assert first == second
    assert [len(one.prompts) for one in first] == [5] * 4
    assert first[0].prompts == [[4], [5], [6], [4], [5]]
    assert len({one.due[0] for one in first}) == 4  # at each rate and in each repeat other times
    assert first[0].due[-1] == pytest.approx(10 * first[1].due[-1])  # ten times as often
    assert {(one["way"], one["rate"], one["repeat"]) for one in samples} == {
        (way, rate, repeat) for way in ("honest", "other") for rate in (2.0, 20.0) for repeat in (0, 1)
    }
    assert samples[0]["end_us"] == [3_000_000, None, *[3_000_000] * 3]
    assert samples[0]["tokens"][1] is None and samples[0]["late_us"] == [1000] * 5
    assert load_bench.find_fault(samples) == ""
    samples[0]["tokens"][3] = "others"
    assert load_bench.find_fault(samples) == "honest gives other tokens than honest for prompts 0"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"callers": (1, 3)}, "--callers: 3 is no batch of the grid"),
        ({"callers": (4,), "prompts": 3}, "--callers: 4 of them share 3 prompts"),
        ({"callers": (1,), "rates": (1.0, 0.0)}, "--rates: 0 prompts per second"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        load_bench.check_settings(load_bench.Settings(**settings), GRID, 32)


def test_a_grid_that_is_too_small_is_refused():
    load_bench.check_settings(load_bench.Settings(callers=(4,)), GRID, 57)
    for callers, longest in ((4, 58), (8, 57)):
        with pytest.raises(GridMiss):
            load_bench.check_settings(load_bench.Settings(callers=(callers,)), GRID, longest)


def test_rates_are_shares_of_what_closed_loops_get_answered():
    closed = [
        {"way": way, "callers": callers, "tokens": ["x"] * 30, "seconds": seconds}
        for way, callers, seconds in (("a", 8, 3.0), ("a", 8, 2.0), ("a", 8, 6.0), ("a", 1, 9.0), ("b", 8, 1.0))
    ]
    assert load_bench.choose_rates(closed, "a", 8) == [3.0, 6.0, 8.0, 9.5]


# -- what samples say


def closed(way: str, callers: int, repeat: int, seconds: float) -> dict:
    """Two answers of five tokens."""
    facts = {"kind": "closed", "way": way, "exact": True, "callers": callers, "repeat": repeat, "seconds": seconds}
    times = {"tokens": ["x", "y"], "prompts": [0, 1], "first_us": [10_000, 30_000], "end_us": [18_000, 46_000]}
    counted = {"rounds": 4, "rows": 8, "row_rounds": 4, "padded_rows": 2, "host_us": 2000, "compile_events": 0}
    return facts | times | counted


def opened(way: str, rate: float) -> dict:
    """Three answers and a refusal."""
    facts = {"kind": "open", "way": way, "exact": True, "rate": rate, "repeat": 0, "prompts": [0, 1, 0, 1]}
    times = {"due_us": [1, 2, 3, 4], "late_us": [100, 100, 100, 100], "tokens": ["x", "y", "x", None]}
    waits = {"first_us": [10_000, 20_000, 40_000, None], "end_us": [18_000, 28_000, 60_000, None]}
    return facts | times | waits | {"compile_events": 0}


@pytest.fixture(scope="module")
def findings() -> Findings:
    samples = [
        closed(way, callers, repeat, callers * (1.0 + repeat / 2) * slow)
        for way, slow in (("engine, K = 7", 1), ("jax.jit loop, K = 7", 2))
        for callers in (1, 2)
        for repeat in range(3)
    ]
    samples += [opened("engine, K = 7", rate) for rate in (4.0, 2.0)]
    assert load_bench.find_fault(samples) == ""
    settings = {"max_tokens": 5}
    return load_bench.describe(Record(SCHEMA, "load", "", "", "", 1.0, describe_site(0.0), settings, samples, ""))


def read_rows(findings: Findings, name: str) -> list[tuple[str, ...]]:
    (table,) = (one for one in findings.tables if one.name == name)
    return list(table.rows)


def test_callers_get_a_row_for_each_way(findings):
    rows = read_rows(findings, "callers")
    assert [row[:4] for row in rows] == [
        ("1", "engine, K = 7", "6.67", "5.00-10.0"),  # 10 tokens in 1, 1.5 and 2 seconds
        ("1", "jax.jit loop, K = 7", "3.33", "2.50-5.00"),
        ("2", "engine, K = 7", "3.33", "2.50-5.00"),
        ("2", "jax.jit loop, K = 7", "1.67", "1.25-2.50"),
    ]
    # 2 and 4 ms per token behind the first one; 10 and 30 ms to that; 8 tokens of 4 rows of rounds; 2 of 8 rows padded
    assert rows[0][4:] == ("3.00", "4.00", "20.0", "30.0", "2.00", "0.500", "25.0%")


def test_arrivals_get_a_row_for_each_rate(findings):
    rows = read_rows(findings, "arrivals")
    assert [row[:4] for row in rows] == [("2", "engine, K = 7", "4", "1"), ("4", "engine, K = 7", "4", "1")]
    assert rows[0][4:] == ("20.0", "38.0", "39.6", "2.00", "4.70", "4.94", "28.0", "56.8", "59.4", "0.100")


def test_charts_show_what_the_tables_say(findings):
    charts = {chart.name: chart for chart in findings.charts}
    engine, loop = charts["throughput-against-pace"].series
    assert (engine.label, engine.x, loop.x) == ("engine, K = 7", (3.0, 3.0), (3.0, 3.0))
    assert engine.y == pytest.approx((10 / 1.5, 10 / 3))
    assert engine.low == pytest.approx((5, 2.5)) and engine.high == pytest.approx((10, 5))
    half, most = charts["whole-answer-by-rate"].series
    assert (half.label, half.x, half.y) == ("K = 7, p50", (2.0, 4.0), (28.0, 28.0))
    assert most.y == pytest.approx((56.8, 56.8))
    assert "first-token-by-rate" in charts


def test_figures_compare_with_the_plain_loop(findings):
    figures = findings.figures
    assert figures["engine_k7_1_callers_tokens_per_second"] == pytest.approx(10 / 1.5)
    assert figures["engine_k7_2_callers_over_jit"] == pytest.approx(2)
    assert figures["jit_k7_2_callers_over_jit"] == pytest.approx(1)
