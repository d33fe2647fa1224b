"""What a record says, for people."""

import pytest

from dflash_aot.benchmarks.findings import Chart, Findings, Table, format_figure, format_range


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.01234, "0.0123"), (2.276, "2.28"), (9.999, "10.0"), (54.26, "54.3"), (543.4, "543"), (12345.6, "12346")]
    + [(0.0, "0.00"), (-1.5, "-1.50")],
)
def test_figures_have_three_digits_and_no_exponent(value, shown):
    assert format_figure(value) == shown


def test_a_range_is_two_figures():
    assert format_range(1.0, 22.22) == "1.00-22.2"


def test_a_name_that_stands_for_two_things_is_refused():
    table, chart = Table("speed", "", ("K",), ()), Chart("speed", "", "", "", ())
    for doubled in ({"tables": (table,), "charts": (chart,)}, {"tables": (table,), "figures": {"speed": 1.0}}):
        with pytest.raises(AssertionError, match="twice"):
            Findings(**doubled)


def test_a_row_that_lacks_a_cell_is_refused():
    with pytest.raises(AssertionError, match="speed: rows of other lengths"):
        Findings(tables=(Table("speed", "", ("K", "tokens/s"), (("0", "249"), ("3",))),))
