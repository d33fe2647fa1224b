"""dflash-bench structured: figures of made-up answers, and which answers void a record."""

from dflash_aot.benchmarks import structured_bench
from dflash_aot.benchmarks.record import RECORD_SCHEMA, Record


def answer(form: str, k: int, us: float, rounds: int, tokens: int = 9, **changes: object) -> dict:
    facts = {"kind": "answer", "form": form, "k": k, "prompt": 0, "repeat": 0, "us": us, "rounds": rounds}
    return {**facts, "tokens": list(range(tokens)), "finish": "stop", **changes}


SAMPLES = [
    answer("none", 0, 9000, 8, finish="length"),
    answer("none", 7, 6000, 4, finish="length"),
    answer("1 property", 0, 9000, 9),
    answer("1 property", 7, 3000, 3),
]


def test_tables_have_tokens_per_round_and_times_of_answers():
    """Without a schema the prefill gives the first of 9 tokens."""
    record = Record(RECORD_SCHEMA, "structured", "", "", "", 1.0, {}, {}, SAMPLES, "")
    (table,) = structured_bench.make_findings(record).tables
    assert [row[:5] for row in table.rows] == [
        ("none", "0", "9.00", "1.00", "9.00"),
        ("none", "7", "9.00", "2.00", "6.00"),
        ("1 property", "0", "9.00", "1.00", "9.00"),
        ("1 property", "7", "9.00", "3.00", "3.00"),
    ]
    assert [row[5][:4] for row in table.rows] == ["", "1.50", "", "3.00"]


def test_answers_that_depend_on_k_or_do_not_end_void_the_record():
    assert structured_bench.find_fault(SAMPLES) == ""
    other = [*SAMPLES, answer("1 property", 7, 3000, 3, tokens=8)]
    assert structured_bench.find_fault(other) == "prompt 0, 1 property: the tokens depend on K"
    endless = [answer("1 property", 0, 9000, 9, finish="length")]
    assert "the document did not end" in structured_bench.find_fault(endless)


def test_answer_counts_its_rounds(bundle):
    with structured_bench.Engine.open(bundle("tiny"), k=3) as engine:
        one = structured_bench.answer(engine, [5, 6, 7], None, 0, 8)
    assert (len(one["tokens"]), one["rounds"], one["finish"]) == (8, 7, "length") and one["us"] > 0
