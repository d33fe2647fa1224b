"""dflash-bench load: what is recorded, and what makes a record void."""

import pytest

from dflash_aot.benchmarks import load_bench
from dflash_aot.benchmarks.contenders import Contender, check_callers, hash_tokens
from dflash_aot.benchmarks.messages import Served, ServingWork, TimedAnswer
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
    assert load_bench.find_fault(take(lies=True)) == "other gives other tokens than honest for prompts 1"


class OpenLoop:
    """A worker that is asked for an open loop, and refuses the second prompt."""

    def __init__(self):
        self.asked = []

    def ask(self, question, kind):
        self.asked.append(question)
        answers = [TimedAnswer(say(prompt, 2), [1.0, 3.0]) for prompt in question.prompts]
        answers[1] = TimedAnswer([], [])
        return Served(answers, 3.0, ServingWork(rounds=1))


def test_contenders_get_the_same_prompts_at_the_same_times():
    settings = load_bench.Settings(max_tokens=2, repeats=2, arrivals=5, seed=3)
    workers = [(HONEST, OpenLoop()), (OTHER, OpenLoop())]
    samples = list(load_bench.serve_open_loops(workers, PROMPTS, [2.0, 20.0], settings, lambda words: None))
    (first, second) = (worker.asked for _, worker in workers)
    assert first == second
    assert [(len(one.prompts), one.callers) for one in first] == [(5, 5)] * 4
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
        ({"length": 122}, "length="),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises((BadInput, GridMiss), match=words):
        check_callers(**{"callers": (4,), "prompts": 32, "grid": GRID, "length": 121} | settings)


def test_rates_are_shares_of_the_throughput_of_closed_loops():
    closed = [
        {"way": way, "callers": callers, "tokens": ["x"] * 30, "seconds": seconds}
        for way, callers, seconds in (("a", 8, 3.0), ("a", 8, 2.0), ("a", 8, 6.0), ("a", 1, 9.0), ("b", 8, 1.0))
    ]
    assert load_bench.choose_rates(closed, "a", 8) == [3.0, 6.0, 8.0, 9.5]


def test_command_of_the_client_names_model_server_and_load():
    settings = load_bench.ServeSettings(url="http://127.0.0.1:1", rate=2.5)
    one, four = (
        " ".join(map(str, load_bench.make_command(settings, "toy", count, f"out/{count}"))) for count in (1, 4)
    )
    assert one.startswith("aiperf profile --streaming") and "--model toy --url http://127.0.0.1:1" in one
    assert "--concurrency 1 " in one and "--artifact-dir out/1 " in one and "--request-count 32 " in one
    assert "--warmup-request-count 4 " in four and '"prefix_caching": false' in four
    assert "--concurrency 4 " in four and "--request-rate 2.5 --arrival-pattern poisson" in four
