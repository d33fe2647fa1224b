"""dflash-bench kflat: both sides choose the reference's tokens; tables, with numbers checked by hand."""

import pytest

from dflash_aot.benchmarks import forward_worker, kflat_bench, torch_worker
from dflash_aot.benchmarks.kflat_bench import Settings, choose_grid, find_fault, find_peak, list_passes, list_work
from dflash_aot.benchmarks.messages import BundleForwardSpec, RunForward, TorchForwardSpec
from dflash_aot.benchmarks.tables import Findings
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput

# Of a text of 179 tokens; all after the first 131 are the reference's greedy choice.
PASSES = [("verify", 8, 178), ("verify", 4, 150), ("verify", 1, 140), ("prefill", 64, 178), ("prefill", 16, 132)]


@pytest.fixture(scope="module")
def text(tied) -> list[int]:
    return next(one["ar_output_ids"] for one in tied.facts["prompts"] if one["name"] == "len131")


@pytest.fixture(scope="module")
def sides(bundle, tied, text):
    """The bundle and PyTorch."""
    ours = BundleForwardSpec(str(bundle("tied")), str(tied.target), str(tied.draft), text)
    theirs = TorchForwardSpec(str(tied.target), "float32", text)
    with forward_worker.open_bundle_passes(ours) as one, torch_worker.open_torch(theirs) as other:
        yield one[RunForward], other[RunForward]


def test_passes_choose_the_reference_tokens(sides, text):
    """In any order, several times: no pass changes what another one sees."""
    for program, rows, length in (*PASSES, *reversed(PASSES)):
        expected = text[length - rows + 1 : length + 1] if program == "verify" else [text[length]]
        for forward in sides:
            found = forward(RunForward(program, rows, length, 2))
            assert found.token_ids == expected, (program, rows, length)
            assert len(found.seconds) == 2 and min(found.seconds) > 0


def test_rows_go_up_to_the_block_of_the_draft():
    grid = choose_grid(Settings(length=(64, 256), prefill=(128,)), 8)
    assert grid.k == (0, 1, 3, 7)
    assert list_passes(grid) == [
        *(("verify", rows, length) for length in (64, 256) for rows in (1, 2, 4, 8)),
        ("prefill", 128, 256),
    ]
    assert choose_grid(Settings(k=(5,)), 8).k == (0, 5)
    with pytest.raises(BadInput, match="block of 8"):
        choose_grid(Settings(k=(8,)), 8)


def test_work_of_a_pass_is_that_of_its_executable(bundle):
    """With four times the rows there is four times the arithmetic, on the same weights and kv."""
    works = {(one["program"], one["rows"], one["length"]): one for one in list_work(read_manifest(bundle("tied")))}
    few, many = works["verify", 1, 208], works["verify", 4, 208]
    assert many["flops"] == pytest.approx(4 * few["flops"])
    assert few["bytes"] < many["bytes"] < 1.1 * few["bytes"]
    assert {program for program, _, _ in works} == {"verify", "prefill"}


def make_samples() -> list[dict]:
    """Two repeats, 256 positions, verifications of 1 and 16 rows; a machine of 10 GB/s, 100 and 400 Gflop/s.

    The bundle takes 2 and 3 ms in float32, PyTorch 2 and 3 times as long, and half the time in bfloat16.
    """
    samples, place = [], {"program": "verify", "length": 256}
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        for rows in (1, 16):
            work = {"bytes": item * 2_500_000, "flops": rows * 1e8}
            samples.append({"kind": "work", "way": "roofline", "dtype": dtype, "rows": rows, **place, **work})
    for repeat in (0, 1):
        for way, factor in (("bundle", 1), ("PyTorch", 2 + repeat)):
            for dtype, item in (("float32", 4), ("bfloat16", 2)):
                for number, (rows, us) in enumerate([(1, 2000.0), (16, 3000.0)]):
                    times = [us * factor * item / 4 * one for one in (0.9, 1.0, 1.1)]
                    known = {"way": way, "dtype": dtype, "rows": rows, "repeat": repeat, **place}
                    exact = {"exact": dtype == "float32", "prompt": number, "tokens": "same"}
                    samples.append({"kind": "pass", **known, **exact, "first_us": 1.5 * times[1], "us": times})
                best = {"float32": 1e11, "bfloat16": 4e11 if way == "PyTorch" else 5e10}[dtype]
                known = {"kind": "peaks", "way": way, "dtype": dtype, "repeat": repeat}
                reads = [8e9, 1e10] if way == "bundle" else [9e9]
                samples.append({**known, "bytes_per_second": reads, "flops_per_second": [best / 2, best]})
    return samples


@pytest.fixture(scope="module")
def findings(make_record) -> Findings:
    return kflat_bench.make_findings(make_record(make_samples()))


def test_roofline_uses_the_best_rates_of_all_contenders():
    peak = find_peak(make_samples())
    assert peak.bytes_per_second == 1e10 and peak.flops_per_second == {"float32": 1e11, "bfloat16": 4e11}
    one, many = (work for work in make_samples() if work["kind"] == "work" and work["dtype"] == "float32")
    assert peak.bound_ms(one) == pytest.approx(1.0)  # 10 MB at 10 GB/s
    assert peak.bound_ms(many) == pytest.approx(16.0)  # 1.6 Gflop at 100 Gflop/s
    slow = [one for one in make_samples() if one["way"] != "PyTorch"]
    assert find_peak(slow).flops_per_second == {"float32": 1e11, "bfloat16": 1e11}  # can be computed in float32


def test_table_has_all_contenders_side_by_side(findings):
    (passes,) = findings.tables
    assert passes.rows[0] == (
        *("verification", "1", "2.00", "2.50 (2.00-3.00)"),
        *("1.00", "2.50 (2.00-3.00)"),
    )
    assert passes.header[2:4] == ("bundle float32 ms", "PyTorch / bundle, float32")


def test_chart_has_the_roofline(findings):
    (chart,) = findings.charts
    labels = [one.label for one in chart.series]
    assert labels == [
        *(f"{who} {dtype}" for who in ("bundle", "PyTorch", "roofline") for dtype in ("float32", "bfloat16"))
    ]
    assert chart.series[0].x == (1, 16) and chart.series[0].y == (2.0, 3.0) and chart.series[0].low == (1.8, 2.7)


def test_other_tokens_of_an_exact_contender_make_the_record_void():
    samples = make_samples()
    assert find_fault(samples) == ""
    rounded = [one for one in samples if one["kind"] == "pass" and not one["exact"]]
    rounded[-1]["tokens"] = "other"
    assert find_fault(samples) == ""
    exact = [one for one in samples if one["kind"] == "pass" and one["exact"]]
    exact[-1]["tokens"] = "other"
    assert "PyTorch gives other tokens than bundle for prompts 1" in find_fault(samples)
