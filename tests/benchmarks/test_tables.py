"""Tables from samples by declared columns, and numbers as text."""

from dflash_aot.benchmarks.tables import format_figure, label, make_series, make_table, percentile_column


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
        percentile_column("ms", "us", scale=1e-3),
        percentile_column("p95", "us", 95, 1e-3),  # three values have no 95th percentile
        label("end", "end", "{}".format),
        percentile_column("nothing", "missing"),
        percentile_column("ends", "end"),
        percentile_column("of 4 s", "us", seconds=4.0),
    ]
    table = make_table("A title", [SAMPLES, SAMPLES[1:]], columns, "A note")
    assert table.header == ("contender", "ms", "p95", "end", "nothing", "ends", "of 4 s")
    assert table.rows == (
        ("a", "3.00", "", "None", "", "7.00", "5000"),
        ("a", "5.00", "", "7.0", "", "7.00", "5000"),
    )
    many = make_table("", [[{"us": list(range(count))}] for count in (20, 100)], columns[1:3])
    assert many.rows == (("0.00950", "0.0181"), ("0.0495", "0.0940"))


def test_series_has_medians_and_ranges():
    ranged = make_series("s", {1: [1.0, 2.0, 6.0], 2: [4.0]})
    assert (ranged.x, ranged.y, ranged.bars) == ((1, 2), (2.0, 4.0), ((1.0, 0.0), (4.0, 0.0)))
