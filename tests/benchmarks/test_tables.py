"""Tables from samples by declared columns, and numbers as text."""

from dflash_aot.benchmarks.tables import (
    Column,
    first,
    format_figure,
    label,
    make_series,
    make_table,
    percentile_columns,
    pick,
)


def test_figures_have_three_digits_and_no_exponent():
    shown = {
        0.01234: "0.0123",
        2.276: "2.28",
        9.999: "10.0",
        543.4: "543",
        12345.6: "12346",
        0.0: "0.00",
        -1.5: "-1.50",
    }
    assert {value: format_figure(value) for value in shown} == shown


SAMPLES = [
    {"way": "a", "k": 3, "us": [1000, 3000], "seconds": 2.0, "end": None},
    {"way": "a", "k": 3, "us": [5000], "seconds": 4.0, "end": 7.0},
]


def test_columns_reduce_the_values_of_a_row():
    columns = [
        label("contender", "way"),
        Column("ms", "us", scale=1e-3),
        *percentile_columns("time", "us", (50, 95), 1e-3),  # three values have no 95th percentile
        Column("rounds", "us", len, show=str),
        Column("end", "end", first, show="{:.0f}".format),
        Column("nothing", "missing"),
        Column("of 4 s", pick("us", seconds=4.0)),
    ]
    table = make_table("t", "A title", [SAMPLES, SAMPLES[:1]], columns, "A note")
    assert table.header == ("contender", "ms", "time p50", "p95", "rounds", "end", "nothing", "of 4 s")
    assert table.rows == (
        ("a", "3.00", "3.00", "", "3", "7", "", "5000"),
        ("a", "2.00", "2.00", "", "2", "", "", ""),
    )
    many = make_table("t", "", [[{"us": list(range(count))}] for count in (20, 100)], columns[2:4])
    assert many.rows == (("0.00950", "0.0181"), ("0.0495", "0.0940"))


def test_series_has_medians_and_ranges():
    ranged = make_series("s", {1: [1.0, 2.0, 6.0], 2: [4.0]})
    assert (ranged.x, ranged.y, ranged.low, ranged.high) == ((1, 2), (2.0, 4.0), (1.0, 4.0), (6.0, 4.0))
