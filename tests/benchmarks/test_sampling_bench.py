"""dflash-bench sampling: acceptance of drawn and greedy drafts on a golden pair, and its table."""

import numpy as np

from dflash_aot.benchmarks.machine import read_machine
from dflash_aot.benchmarks.record import RECORD_SCHEMA, Record
from dflash_aot.benchmarks.sampling_bench import Settings, find_fault, make_findings, measure

LIMITED = ["drawn", "likeliest", "drawn without limits"]


def test_both_ways_give_the_same_texts_and_the_table_shows_each_position(runs, tmp_path):
    pair = runs["dflash2"]
    settings = Settings(target=str(pair.target), draft=str(pair.draft), temperatures=(0.7,), texts=3, tokens=32)
    samples = list(measure(settings, tmp_path, lambda _: None))
    drawn, likeliest = samples[:2]
    assert (drawn["way"], likeliest["way"]) == ("drawn", "likeliest") and not find_fault([drawn, likeliest])
    assert find_fault([{**drawn, "same": False}])
    # Each text has 32 tokens at least; a round commits one more than it accepts.
    assert sum(drawn["accepted"]) + len(drawn["accepted"]) >= 3 * 24
    for accepted, overlaps in zip(drawn["accepted"], drawn["overlaps"], strict=True):
        assert len(overlaps) == min(accepted + 1, 7) and all(0 <= one <= 1.0001 for one in overlaps)
    record = Record(RECORD_SCHEMA, "sampling", "", "", "", 1.0, read_machine(0.0), {}, samples, "")
    table, times = make_findings(record).tables
    assert [row[1] for row in table.rows] == ["drawn", "overlap", "likeliest", *LIMITED * 4]
    assert {row[0] for row in table.rows[3:6]} == {"temperature 0.7, top_k 20, top_p 0.8"}
    assert times.rows[0][0] == "3" and all(float(cell) > 0 for cell in times.rows[0])
    first = sum(one > 0 for one in drawn["accepted"]) / len(drawn["accepted"])
    assert table.rows[0][4] == f"{first:.2f}"


def test_no_more_draws_are_accepted_than_the_distributions_overlap(runs, tmp_path):
    """At each position, within three standard errors. Much of the draft's probability lies outside the candidates."""
    pair = {"target": str(runs["softcap"].target), "draft": str(runs["softcap"].draft)}
    settings = Settings(**pair, temperatures=(1.0,), texts=8, tokens=96, limits=False)
    drawn = next(measure(settings, tmp_path, lambda _: None))
    for position in range(drawn["k"]):
        excess = [
            (accepted > position) - overlaps[position]
            for accepted, overlaps in zip(drawn["accepted"], drawn["overlaps"], strict=True)
            if accepted >= position
        ]
        assert position or len(excess) > 300
        if len(excess) > 20:
            assert np.mean(excess) <= 3 * np.std(excess, ddof=1) / len(excess) ** 0.5, position
