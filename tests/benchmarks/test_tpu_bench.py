"""dflash-bench tpu: estimates of the embedded pair's executables by the TPU compiler."""

import pytest

from dflash_aot.benchmarks.tpu_bench import Settings, find_fault, make_findings, measure
from dflash_aot.cache.environment import libtpu_version
from dflash_aot.cache.files.locations import locate_checkpoint

GRID = "batch=1 length=64 k=0,3 prefill=32"


@pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")
def test_estimates_are_measured_and_shown_with_the_longest_operations(tmp_path, make_record):
    config = locate_checkpoint("embedded", "target") / "config.json"
    settings = Settings(
        target=str(config), topologies="v5e:1x1", buckets=GRID, executable="kv_write rows=1 width=4", jobs=1
    )
    notes: list[str] = []
    samples = list(measure(settings, tmp_path, notes.append))
    assert find_fault(samples) == "" and find_fault([]) != ""
    (whole,) = (one for one in samples if one["kind"] == "executable")
    operations = [one for one in samples if one["kind"] == "operation"]
    assert whole["executable"] == settings.executable and whole["topology"] == "v5e:1x1"
    assert whole["ratio"] == whole["estimate_seconds"] / whole["bound_seconds"] > 1
    assert operations == sorted(operations, key=lambda one: -one["seconds"])
    assert 0 < sum(one["seconds"] for one in operations) <= whole["estimate_seconds"] * (1 + 1e-9)
    assert notes == [f"v5e:1x1, 1 of 1: {settings.executable}"]
    assert not list(tmp_path.iterdir())
    found = make_findings(make_record(samples, {"executable": settings.executable}))
    assert found.tables[0].rows[0][:2] == ("v5e:1x1", settings.executable)
    assert len(found.tables[1].rows) == len(operations)
    unbounded = make_record([{**whole, "ratio": None}], {"executable": None})  # a move has no bound
    assert "–" in make_findings(unbounded).tables[0].rows[0]
