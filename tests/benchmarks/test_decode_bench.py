"""How fast tokens come: what is taken down, what makes it void, and what it says, in numbers to check by eye."""

import pytest

from dflash_aot.benchmarks import decode_bench
from dflash_aot.benchmarks.findings import Findings
from dflash_aot.benchmarks.orders import TorchOrder
from dflash_aot.benchmarks.record import SCHEMA, Record, describe_site
from dflash_aot.benchmarks.traffic import Answer, Parts, Served, Work
from dflash_aot.benchmarks.ways import Way, name_tokens
from dflash_aot.cache.errors import GridMiss
from dflash_aot.cache.grid import parse_grid
from tests.benchmarks.toy_peer import open_toy, say

PROMPTS = [[4], [5], [6]]


def make_way(name: str, exact: bool = True, k: int | None = 0) -> Way:
    return Way(name, "toy_peer", TorchOrder("", "float32"), exact, k)


def take(exact: bool = True, **wrong) -> list[dict]:
    """Of an honest toy, and of another one."""
    with open_toy("honest") as honest, open_toy("other", **wrong) as other:
        peers = [(make_way("honest"), honest), (make_way("other", exact), other)]
        return list(decode_bench.take_answers(peers, PROMPTS, 4, 2, lambda words: None))


def test_ways_take_turns_and_begin_in_another_order_each_time():
    samples = take()
    turns = [(one["repeat"], one["prompt"], one["way"]) for one in samples if one["kind"] == "answer"]
    first, second = ["honest", "other"], ["other", "honest"]
    orders = [first, second, first, second, first, second]
    rounds = [(repeat, prompt) for repeat in range(2) for prompt in range(3)]
    assert turns == [(*place, way) for place, order in zip(rounds, orders, strict=True) for way in order]
    assert {one["way"] for one in samples if one["kind"] == "idle"} == {"honest", "other"}
    assert decode_bench.find_fault(samples) == ""
    (answer,) = (one for one in samples if one.get("prompt") == 2 and one["way"] == "other" and one["repeat"] == 1)
    assert answer["tokens"] == name_tokens(say([6], 4))
    assert answer["gaps_us"] == [500_000] * 4
    assert answer["accepted"] == [0, 0, 0] and answer["passes"] == 3


def test_a_way_that_lies_makes_the_record_void():
    assert decode_bench.find_fault(take(lies=True)) == "other gives other tokens than honest for prompts 1"


def test_a_way_that_rounds_otherwise_may_differ():
    assert decode_bench.find_fault(take(exact=False, lies=True)) == ""


def test_a_way_that_compiles_makes_the_record_void():
    assert decode_bench.find_fault(take(compile_events=1)) == "other compiled while serving"


def test_nothing_measured_says_nothing():
    assert decode_bench.find_fault([]) == "no way answered"


def test_gaps_are_rounded_so_that_their_sums_stay_true():
    answer = Answer([1, 2, 3], [0.0000014, 0.0000028, 0.0000042])
    assert decode_bench.spell_gaps(answer) == [1, 2, 1]


def test_a_way_without_rounds_counts_its_passes():
    served = Served([[Answer([1, 2, 3], [1.0, 2.0, 2.0])]], 2.0, Work(rounds=1))
    assert decode_bench.make_sample(make_way("torch"), served)["passes"] == 1


def test_a_round_that_would_be_cut_short_is_refused():
    grid = parse_grid("batch=1 length=64,128 k=0,7 prefill=64", 8)
    decode_bench.check_room(grid, 121)
    with pytest.raises(GridMiss, match="length=129"):
        decode_bench.check_room(grid, 122)


class Dissected:
    """A peer that has the programs of K = 0 alone."""

    def ask(self, question, kind):
        if question.k:
            return Parts(None, {})
        return Parts(Answer(say(question.prompt_ids, 2), [1.0, 2.0]), {"verify": [0.001], "read": [0.0005]})


def test_parts_are_those_that_there_are():
    samples = list(decode_bench.take_parts(Dissected(), PROMPTS[:2], 2, (0, 7), lambda words: None))
    assert [(one["k"], one["prompt"], one["verify_us"], one["read_us"]) for one in samples] == [
        (0, 0, [1000], [500]),
        (0, 1, [1000], [500]),
    ]
    assert decode_bench.find_fault(samples) == ""


# -- what samples say


WAYS = ["engine, K = 0", "engine, K = 3", "engine, K chosen", "PyTorch float32", "PyTorch bfloat16"]


def answer(way: str, k: int | None, repeat: int, prompt: int, gaps_us: list[int], accepted: list[int], **more) -> dict:
    return {
        "kind": "answer",
        "way": way,
        "k": k,
        "exact": True,
        "tokens": f"tokens of {prompt}",
        "gaps_us": gaps_us,
        "accepted": accepted,
        "passes": len(accepted) or 4,
        "rounds": 4,
        "rounds_by_k": {},
        "host_us": 800,
        "host_wall_us": 1200,
        "compile_events": 0,
        "prompt": prompt,
        "repeat": repeat,
    } | more


def make_samples() -> list[dict]:
    """K = 0 takes 10 ms per token, K = 3 takes 5 and 4, the rounding one 2.5; PyTorch 20."""
    samples = []
    for repeat in range(2):
        for prompt, (gaps, accepted) in enumerate([([0, 0, 0, 20], [3]), ([0, 0, 16, 0], [2, 0])]):
            plain = [30_000] + [10_000] * 4
            fast = [40_000] + [1000 * gap for gap in gaps]
            samples.append(answer("engine, K = 0", 0, repeat, prompt, plain, [0] * 4))
            samples.append(answer("engine, K = 3", 3, repeat, prompt, fast, accepted))
            chosen = answer("engine, K chosen", None, repeat, prompt, fast, accepted)
            samples.append(chosen | {"rounds_by_k": {"0": 1, "3": 3 - repeat}})
            samples.append(answer("PyTorch float32", None, repeat, prompt, [50_000] + [20_000] * 4, []))
            rounded = answer("PyTorch bfloat16", None, repeat, prompt, [50_000] + [2500] * 4, [], exact=False)
            samples.append(rounded | {"tokens": "others" if prompt else rounded["tokens"]})
    parts = {"kind": "parts", "way": "parts", "exact": True, "prompt": 0, "tokens": "tokens of 0"}
    samples.append(parts | {"k": 0, "verify_us": [8000, 9000, 10_000], "read_us": [100, 100, 100]})
    three = {"draft_us": [4000], "verify_us": [12_000], "kv_write_us": [1000], "read_us": [200], "prefill_us": [1]}
    samples.append(parts | {"k": 3} | three)
    samples += [{"kind": "idle", "way": "engine, K = 0", "seconds": 10.0, "cpu_seconds": 0.25}]
    return samples


@pytest.fixture(scope="module")
def findings() -> Findings:
    samples = make_samples()
    record = Record(
        SCHEMA, "decode", "", "", "", 1.0, describe_site(0.0), {}, samples, decode_bench.find_fault(samples)
    )
    assert record.void == ""
    return decode_bench.describe(record)


def read_table(findings: Findings, name: str) -> dict[str, dict[str, str]]:
    """Rows by their first cell; of columns with the same name the first."""
    (table,) = (one for one in findings.tables if one.name == name)
    rows = {}
    for row in table.rows:
        cells: dict[str, str] = {}
        for column, cell in zip(table.header, row, strict=True):
            cells.setdefault(column, cell)
        rows[row[0]] = cells
    return rows


def test_speed_is_the_median_and_gains_are_pair_by_pair(findings):
    rows = read_table(findings, "speed")
    assert list(rows) == WAYS
    assert rows["engine, K = 0"]["tokens/s"] == "100"
    assert rows["engine, K = 3"]["tokens/s"] == "225"  # of 200 and 250
    assert rows["engine, K = 3"]["x engine, K = 0"].startswith("2.25 (2.00-2.50)")
    assert rows["engine, K = 3"]["x PyTorch float32"].startswith("4.50")
    assert rows["engine, K = 3"]["first token ms"] == "40.0"
    assert rows["engine, K = 3"]["ms per pass"] == "14.0"  # of 20 and 8
    assert rows["PyTorch float32"]["ms per pass"] == "20.0"


def test_ways_that_round_otherwise_show_how_often_they_say_the_same(findings):
    rows = read_table(findings, "speed")
    assert {name: row["same tokens"] for name, row in rows.items()} == {
        **dict.fromkeys(WAYS, "2/2"),
        "PyTorch bfloat16": "1/2",
    }


def test_the_note_says_what_idle_ways_used(findings):
    (table,) = (one for one in findings.tables if one.name == "speed")
    assert table.note.startswith("Prompts: 2, one at a time; repeats: 2; tokens per answer: 5.")
    assert table.note.endswith("no way's process used more than 2.5 % of a core.")


def test_pace_is_of_answers_and_of_tokens(findings):
    rows = read_table(findings, "pace")
    assert rows["engine, K = 3"]["answer p50"] == "4.50" and rows["engine, K = 3"]["token p50"] == "0.00"
    assert rows["engine, K = 0"]["answer p50"] == rows["engine, K = 0"]["token p50"] == "10.0"


def test_tau_is_told_both_ways_and_by_position(findings):
    row = read_table(findings, "acceptance")["engine, K = 3"]
    assert row["rounds"] == "6"
    assert row["τ over rounds"] == "2.67"  # 1 + (3 + 2 + 0) / 3
    assert row["τ mean of prompts"] == "3.00"  # of 4 and 2
    assert [row[place] for place in "123"] == ["0.67", "0.67", "0.33"]
    assert list(read_table(findings, "acceptance")) == WAYS[1:3]  # nothing else drafts


def test_the_note_says_which_ks_were_chosen(findings):
    (table,) = (one for one in findings.tables if one.name == "acceptance")
    assert table.note.endswith("own τ. Rounds of engine, K chosen: 29% at K = 0, 71% at K = 3.")  # 4 and 10


def test_the_histogram_counts_rounds(findings):
    row = read_table(findings, "histogram")["engine, K = 3"]
    assert [row[count] for count in "0123"] == ["0.33", "0.00", "0.33", "0.33"]


def test_parts_stand_beside_the_round_as_it_is_served(findings):
    rows = read_table(findings, "parts")
    zero, three = rows["0"], rows["3"]
    assert [zero[step] for step in ("draft", "verify", "kv_write", "read", "sum")] == ["", "9.00", "", "0.100", "9.10"]
    assert [three[step] for step in ("draft", "verify", "kv_write", "read", "sum")] == [
        *("4.00", "12.0", "1.00", "0.200", "17.2"),
    ]
    assert zero["round as served"] == "10.0" and three["round as served"] == "14.0"
    assert (zero["host's work"], zero["host's clock"]) == ("0.200", "0.300")


def test_figures_are_those_of_the_tables(findings):
    figures = findings.figures
    assert figures["engine_k3_tokens_per_second"] == figures["best_tokens_per_second"] == pytest.approx(225)
    assert figures["best_over_engine_k0"] == pytest.approx(2.25)
    assert figures["engine_k0_over_torch_float32"] == pytest.approx(2)
    assert figures["engine_k3_over_torch_bfloat16"] == pytest.approx((0.5 + 0.625) / 2)
    assert figures["engine_k3_tau"] == pytest.approx(8 / 3)


def test_charts_show_what_the_tables_say(findings):
    charts = {chart.name: chart for chart in findings.charts}
    assert charts["speed-bars"].series[0].y == pytest.approx((100, 225, 225, 50, 400))
    assert charts["acceptance-by-position"].series[0].y == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    assert charts["accepted-per-round"].series[0].y == pytest.approx((1 / 3, 0, 1 / 3, 1 / 3))
    steps = {series.label: series.y for series in charts["parts-of-a-round"].series}
    assert steps["draft"] == (0, 4) and steps["verify"] == (9, 12)
