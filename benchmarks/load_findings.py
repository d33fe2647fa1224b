"""What the samples of load_bench.py say."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_aot.benchmarks.estimates import choose, estimate_ratio, median, pair_up, percentile
from dflash_aot.benchmarks.findings import Chart, Findings, Series, Table, format_figure, format_range
from dflash_aot.benchmarks.record import Record
from dflash_aot.benchmarks.ways import make_slug

Samples = Sequence[Mapping[str, Any]]


def describe(record: Record) -> Findings:
    """Of closed loops throughput against time per token, of open ones what callers wait for, by rate."""
    tokens = record.settings["max_tokens"]
    closed, open_ = (choose(record.samples, kind=kind) for kind in ("closed", "open"))
    closed = [{**one, "speed": len(one["tokens"]) * tokens / one["seconds"]} for one in closed]
    tables, charts = [tabulate_callers(closed, tokens)], [chart_callers(closed, tokens)]
    if open_:
        tables.append(tabulate_arrivals(open_, tokens))
        charts += [chart_arrivals(open_, "first_us", "first token"), chart_arrivals(open_, "end_us", "whole answer")]
    return Findings(tuple(tables), tuple(charts), list_figures(closed))


def list_distinct(samples: Samples, key: str) -> list[Any]:
    """In the order in which they first come."""
    return [*dict.fromkeys(one[key] for one in samples)]


def list_ways(samples: Samples) -> list[str]:
    """In the order of their names, which is that of no run: those take turns."""
    return sorted(list_distinct(samples, "way"))


def pool(runs: Samples, key: str) -> list[float]:
    """Milliseconds of all answers of all runs; what was refused has none."""
    return [us / 1e3 for one in runs for us in one[key] if us is not None]


def pool_paces(runs: Samples, tokens: int) -> list[float]:
    """Milliseconds per token behind the first one, of all answers of all runs."""
    return [
        (end - first) / (tokens - 1) / 1e3
        for one in runs
        for first, end in zip(one["first_us"], one["end_us"], strict=True)
        if end is not None
    ]


def show(values: Sequence[float], shares: Iterable[int]) -> list[str]:
    """Percentiles; "" where nothing was answered."""
    return [format_figure(percentile(values, share)) if values else "" for share in shares]


# -- closed loops


def tabulate_callers(closed: Samples, tokens: int) -> Table:
    """A row for each number of callers and way."""
    rows = []
    for callers in list_distinct(closed, "callers"):
        for way in list_ways(closed):
            runs = choose(closed, callers=callers, way=way)
            speeds = [one["speed"] for one in runs]
            rows.append(
                (
                    f"{callers}",
                    way,
                    format_figure(median(speeds)),
                    format_range(min(speeds), max(speeds)),
                    *show(pool_paces(runs, tokens), (50, 95)),
                    *show(pool(runs, "first_us"), (50, 95)),
                    f"{sum(len(one['tokens']) for one in runs) * (tokens - 1) / _add(runs, 'row_rounds'):.2f}",
                    format_figure(_add(runs, "host_us") / _add(runs, "rounds") / 1e3),
                    f"{_add(runs, 'padded_rows') / _add(runs, 'rows'):.1%}",
                )
            )
    header = ("callers", "way", "tokens/s", "least-most", "ms per token", "p95", "first token ms", "p95", "τ")
    return Table(
        "callers",
        "Callers in closed loops",
        (*header, "host ms per round", "padded rows"),
        tuple(rows),
        f"{len(closed[0]['tokens'])} prompts in all, {tokens} tokens each. Tokens per second: of each repeat, the "
        "median and both ends. Times: of all answers of all repeats, median and 95th percentile; per token without the "
        "first. τ: tokens per row and round. Padded rows: of those computed, the ones without a request.",
    )


def _add(runs: Samples, key: str) -> float:
    return sum(one[key] for one in runs)


def chart_callers(closed: Samples, tokens: int) -> Chart:
    """A line for each way, a point for each number of callers."""
    lines = []
    for way in list_ways(closed):
        by_callers = [choose(closed, callers=callers, way=way) for callers in list_distinct(closed, "callers")]
        x = tuple(median(pool_paces(runs, tokens)) for runs in by_callers)
        speeds = [[one["speed"] for one in runs] for runs in by_callers]
        low, high = tuple(map(min, speeds)), tuple(map(max, speeds))
        lines.append(Series(way, x, tuple(map(median, speeds)), low, high))
    callers = ", ".join(map(str, list_distinct(closed, "callers")))
    title = f"Throughput against time per token, {callers} callers"
    return Chart("throughput-against-pace", title, "milliseconds per token", "tokens per second", tuple(lines))


def list_figures(closed: Samples) -> dict[str, float]:
    """Tokens per second by way and callers, and how many times the plain loop's."""
    figures = {}
    (loop,) = (way for way in list_ways(closed) if way.startswith("jax.jit"))
    for callers in list_distinct(closed, "callers"):
        here = choose(closed, callers=callers)
        for way in list_ways(closed):
            name = f"{make_slug(way)}_{callers}_callers"
            figures[f"{name}_tokens_per_second"] = median([one["speed"] for one in choose(here, way=way)])
            sides = pair_up(here, "speed", ("repeat",), {"way": way}, {"way": loop})
            figures[f"{name}_over_jit"] = estimate_ratio(*sides).value
    return figures


# -- open loops


def tabulate_arrivals(open_: Samples, tokens: int) -> Table:
    """A row for each rate and way."""
    rows = []
    for rate in sorted(list_distinct(open_, "rate")):
        for way in list_ways(open_):
            runs = choose(open_, rate=rate, way=way)
            ends = [end for one in runs for end in one["end_us"]]
            rows.append(
                (
                    f"{rate:g}",
                    way,
                    f"{len(ends)}",
                    f"{ends.count(None)}",
                    *show(pool(runs, "first_us"), (50, 95, 99)),
                    *show(pool_paces(runs, tokens), (50, 95, 99)),
                    *show(pool(runs, "end_us"), (50, 95, 99)),
                    *show(pool(runs, "late_us"), (99,)),
                )
            )
    header = ("per second", "way", "prompts", "refused", "first token p50", "p95", "p99", "per token p50", "p95", "p99")
    return Table(
        "arrivals",
        "Callers who come when they come, ms",
        (*header, "whole p50", "p95", "p99", "sent late p99"),
        tuple(rows),
        f"Prompts at independent times (a Poisson process drawn beforehand, the same for all ways), {tokens} tokens "
        "each. First token and whole answer: since the prompt was to come, so that what waits is counted, and what was "
        "sent late, too. All repeats; refused ones have no times.",
    )


def chart_arrivals(open_: Samples, key: str, what: str) -> Chart:
    """Two lines for each way: half of all wait no longer, and all but one of twenty."""
    rates = sorted(list_distinct(open_, "rate"))
    lines = []
    for way in list_ways(open_):
        waits = {rate: pool(choose(open_, rate=rate, way=way), key) for rate in rates}
        there = tuple(rate for rate in rates if waits[rate])
        for share in (50, 95):
            waiting = tuple(percentile(waits[rate], share) for rate in there)
            lines.append(Series(f"{way.removeprefix('engine, ')}, p{share}", there, waiting))
    name, title = what.replace(" ", "-"), f"{what[0].upper()}{what[1:]}, by arrivals"
    return Chart(f"{name}-by-rate", title, "prompts per second", "milliseconds", tuple(lines))
