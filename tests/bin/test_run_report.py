"""Statistics of a run, from counters that can be checked by hand."""

import json

import pytest

from dflash_aot.bin.run import FinishedRun, format_report, report_fields
from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.runtime.requests.request import Result


def finish(counters: Counters, *results: Result) -> FinishedRun:
    return FinishedRun({"imports": 1.0, "weights": 0.5}, "z-lab", 7, 12, "0a1b", results, counters)


@pytest.fixture
def counters() -> Counters:
    """Ten rounds, 4 · 4 + 5 · 2 + 1 = 27 rows, of which 4 + 5 = 9 were unused."""
    counters = Counters()
    for _ in range(4):
        counters.note_rounds(Bucket(4, 64, 7), False, [3])
    for sampled in (False, True, False, True, True):
        counters.note_rounds(Bucket(2, 64, 0), sampled, [1])
    counters.note_rounds(Bucket(1, 256, 7), True, [1])
    return counters


def test_rounds_per_k_and_padding_add_up(counters):
    fields = report_fields(finish(counters))
    assert fields["rounds_per_k"] == {"0": 5, "7": 5} and sum(fields["rounds_per_k"].values()) == fields["rounds"]
    assert fields["sampled_rounds"] == 4
    assert fields["padding_waste"] == pytest.approx(9 / 27)
    assert json.loads(json.dumps(fields)) == fields


def test_text_report_shows_rounds_and_padding(counters):
    counters.note_rows(7, [5, 0])
    lines = dict(line.split("  ", 1) for line in format_report(finish(counters)))
    assert lines["draft tokens"].strip() == "14 verified, 5 accepted"
    assert lines["rounds"].strip() == "5 of K = 0, 5 of K = 7; 4 of them sampled"
    assert lines["padding waste"].strip() == "33.3% of the rows computed"


def test_padding_is_none_without_a_round():
    fields = report_fields(finish(Counters()))
    assert (fields["rounds_per_k"], fields["padding_waste"], fields["sampled_rounds"]) == ({}, None, 0)
    assert "padding waste          -" in format_report(finish(Counters()))


def test_latencies_leave_out_requests_without_a_token():
    began = Result([1, 2, 3], "", "length", 2, [1], [], None, 0.25, 1.25)
    failed = Result([], "", "error", 0, [], [], "no", None, 0.0)
    fields = report_fields(finish(Counters(), began, failed))
    assert (fields["requests"], fields["tokens"]) == (2, 3)
    assert (fields["time_to_first_token"], fields["time_per_output_token"]) == (0.25, 0.5)
    assert fields["startup_seconds"] == {"imports": 1.0, "weights": 0.5, "total": 1.5}
