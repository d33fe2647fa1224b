"""One pass at a time: both sides choose what the reference chooses; what samples say, worked out by hand."""

import pytest

from dflash_aot.benchmarks import kflat_bench, peer_bundle_forward, peer_torch_forward
from dflash_aot.benchmarks.forward import BundleForward, Forward, Peaks, TorchForward
from dflash_aot.benchmarks.kflat_bench import Settings, choose_grid, find_fault, list_passes, list_work
from dflash_aot.benchmarks.kflat_findings import find_peak
from dflash_aot.benchmarks.peaks import READ_BYTES, SQUARE, measure_peaks
from dflash_aot.benchmarks.record import Record, describe_site
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target

# Of a text of 179 tokens, of which all behind the first 131 are the reference's greedy choice.
PASSES = [("verify", 8, 178), ("verify", 4, 150), ("verify", 1, 140), ("prefill", 64, 178), ("prefill", 16, 132)]


@pytest.fixture(scope="module")
def text(tied) -> list[int]:
    return next(one["ar_output_ids"] for one in tied.facts["prompts"] if one["name"] == "len131")


@pytest.fixture(scope="module")
def sides(bundle, tied, text):
    """Both, asked alike."""
    ours = BundleForward(str(bundle("tied")), str(tied.target), str(tied.draft), text)
    theirs = TorchForward(str(tied.target), "float32", text)
    with peer_bundle_forward.open_way(ours) as one, peer_torch_forward.open_way(theirs) as other:
        yield one[Forward], other[Forward]


@pytest.mark.parametrize(("program", "rows", "length"), [*PASSES, *reversed(PASSES)])
def test_a_pass_chooses_what_the_reference_chose(sides, text, program, rows, length):
    """Time and again, in any order: no pass leaves anything that another one would see."""
    expected = text[length - rows + 1 : length + 1] if program == "verify" else [text[length]]
    for forward in sides:
        found = forward(Forward(program, rows, length, 2))
        assert found.token_ids == expected
        assert len(found.seconds) == 2 and min(found.seconds) > 0


# -- what is measured


def read_facts(pair):
    target = read_target(read_config(pair.target))
    return target, read_draft(read_config(pair.draft), target)


def test_the_rows_go_as_far_as_the_drafts_block(tied):
    _, draft = read_facts(tied)
    grid = choose_grid(Settings(length=(64, 256), prefill=(128,)), draft)
    assert draft.block == 8 and grid.k == (0, 1, 3, 7)
    assert list_passes(grid) == [
        *(("verify", rows, length) for length in (64, 256) for rows in (1, 2, 4, 8)),
        ("prefill", 128, 256),
    ]
    assert choose_grid(Settings(k=(5,)), draft).k == (0, 5)
    with pytest.raises(BadInput, match="block of 8"):
        choose_grid(Settings(k=(8,)), draft)


def test_the_work_of_a_pass_is_that_of_its_executable(bundle):
    """With four times the rows there is four times the arithmetic, on the same weights and kv."""
    works = {(one["program"], one["rows"], one["length"]): one for one in list_work(read_manifest(bundle("tied")))}
    few, many = works["verify", 1, 208], works["verify", 4, 208]
    assert many["flops"] == pytest.approx(4 * few["flops"])
    assert few["bytes"] < many["bytes"] < 1.1 * few["bytes"]
    assert {program for program, _, _ in works} == {"verify", "prefill"}


def test_the_fastest_call_makes_the_peak():
    asked = []
    found = measure_peaks(lambda: asked.append("read"), lambda: asked.append("multiply"), Peaks(2))
    assert (asked.count("read"), asked.count("multiply")) == (3, 3)
    assert len(found.bytes_per_second) == len(found.flops_per_second) == 2
    assert min(found.bytes_per_second) > 2 * READ_BYTES and min(found.flops_per_second) > SQUARE**3  # in no time


# -- what samples say


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


def describe(samples: list[dict]):
    return kflat_bench.describe(Record(1, "kflat", "", "", "", 0.0, describe_site(0.0), {}, samples, ""))


def test_the_roofline_is_the_best_that_anybody_saw():
    peak = find_peak(make_samples())
    assert peak.bytes_per_second == 1e10 and peak.flops_per_second == {"float32": 1e11, "bfloat16": 4e11}
    one, many = (work for work in make_samples() if work["kind"] == "work" and work["dtype"] == "float32")
    assert peak.bound_ms(one) == pytest.approx(1.0)  # 10 MB at 10 GB/s
    assert peak.bound_ms(many) == pytest.approx(16.0)  # 1.6 Gflop at 100 Gflop/s


def test_a_narrower_dtype_is_not_slower_than_a_wider_one():
    """Where no library multiplies it well, it could be multiplied as the wider one."""
    slow = [one for one in make_samples() if one["way"] != "PyTorch"]
    assert find_peak(slow).flops_per_second == {"float32": 1e11, "bfloat16": 1e11}


def test_ratios_and_flatness():
    figures = describe(make_samples()).figures
    assert figures == pytest.approx(
        {
            **{f"{dtype}_256_verify_{rows}": 2.5 for dtype in ("float32", "bfloat16") for rows in (1, 16)},
            **{f"flat_{dtype}_256": 1.5 for dtype in ("float32", "bfloat16")},
        }
    )


def test_a_table_sets_all_side_by_side():
    passes, first, peaks = describe(make_samples()).tables
    assert passes.rows[0] == (
        *("verification", "1", "2.00", "4.90", "1.00", "2.50 (2.00-3.00)"),
        *("1.00", "2.45", "0.500", "2.50 (2.00-3.00)"),
    )
    assert passes.header[2:6] == (
        "bundle float32 ms",
        "PyTorch float32 ms",
        "roofline float32 ms",
        "PyTorch / bundle, float32",
    )
    assert first.rows == (("1", "1.50", "1.50", "1.50", "1.50"), ("16", "1.50", "1.50", "1.50", "1.50"))
    assert peaks.rows[-1] == ("the roofline's, the best of all", "10.0", "float32 100 bfloat16 400")


def test_a_chart_holds_the_roofline():
    (chart,) = describe(make_samples()).charts
    labels = [one.label for one in chart.series]
    assert labels == [
        *(f"{who} {dtype}" for who in ("bundle", "PyTorch", "roofline") for dtype in ("float32", "bfloat16"))
    ]
    assert chart.series[0].x == (1, 16) and chart.series[0].y == (2.0, 3.0) and chart.series[0].low == (1.8, 2.7)


def test_without_pytorch_there_is_nothing_to_compare():
    alone = [one for one in make_samples() if one["way"] != "PyTorch"]
    findings = describe(alone)
    assert list(findings.figures) == ["flat_float32_256", "flat_bfloat16_256"]
    assert len(findings.tables[0].header) == 6


def test_other_tokens_make_the_record_void():
    samples = make_samples()
    assert find_fault(samples) == ""
    rounded = [one for one in samples if one["kind"] == "pass" and not one["exact"]]
    rounded[-1]["tokens"] = "other"
    assert find_fault(samples) == ""
    exact = [one for one in samples if one["kind"] == "pass" and one["exact"]]
    exact[-1]["tokens"] = "other"
    assert "PyTorch gives other tokens than bundle for prompts 1" in find_fault(samples)
