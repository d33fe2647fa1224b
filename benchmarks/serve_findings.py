"""What the samples of serve_bench.py say."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_aot.benchmarks.estimates import choose, estimate_ratio, median, pair_up, percentile
from dflash_aot.benchmarks.findings import Chart, Findings, Series, Table, format_figure, format_range
from dflash_aot.benchmarks.load_findings import list_distinct, list_ways, pool, show
from dflash_aot.benchmarks.record import Record

Sample = Mapping[str, Any]
Samples = Sequence[Sample]
SHARES = (50, 90, 99)


def describe(record: Record) -> Findings:
    """Throughput and what callers wait for by connections, of both ways; what HTTP costs a request."""
    full, open_, cost = (choose(record.samples, kind=kind) for kind in ("full", "open", "cost"))
    full = [{**one, "speed": count_answers(one) * one["max_tokens"] / one["seconds"]} for one in full]
    tables = (tabulate_throughput(full), tabulate_cost(cost), tabulate_arrivals(open_))
    charts = (chart_throughput(full), *(chart_waits(open_, *one) for one in WAITS))
    return Findings(tables, charts, list_figures(full, cost))


def count_answers(sample: Sample) -> int:
    return sum(status == 200 for status in sample["statuses"])


def find_server(samples: Samples) -> str:
    """The way that is asked from outside; there is one more, which is the engine."""
    (name,) = {one["way"] for one in samples if one["client_us"] is not None}
    return name


def find_engine(samples: Samples) -> str:
    (name,) = {one["way"] for one in samples if one["client_us"] is None}
    return name


# -- all at once


def tabulate_throughput(full: Samples) -> Table:
    """A row for each number of connections and way."""
    rows = []
    for connections in list_distinct(full, "connections"):
        for way in list_ways(full):
            runs = choose(full, connections=connections, way=way)
            speeds = [one["speed"] for one in runs]
            rows.append(
                (
                    f"{connections}",
                    way,
                    format_figure(median([count_answers(one) / one["seconds"] for one in runs])),
                    format_figure(median(speeds)),
                    format_range(min(speeds), max(speeds)),
                    *show(pool_since_sent(runs, "first_us"), SHARES),
                    *show(pool_since_sent(runs, "end_us"), SHARES),
                    f"{sum(one['statuses'].count(200) for one in runs)}",
                    f"{sum(len(one['statuses']) - count_answers(one) for one in runs)}",
                    format_figure(sum(one["loop_us"] for one in runs) / sum(map(count_answers, runs)) / 1e3),
                    *(show_share(runs, key) for key in ("loop_us", "host_us", "client_us")),
                )
            )
    header = ("connections", "way", "requests/s", "tokens/s", "least-most", "first part p50, ms", "p90", "p99")
    return Table(
        "throughput",
        "All prompts at once",
        (
            *header,
            "whole p50",
            "p90",
            "p99",
            "answered",
            "refused",
            "ms per answer",
            "event loop",
            "engine's host",
            "client",
        ),
        tuple(rows),
        f"{len(full[0]['prompts'])} prompts in all, {full[0]['max_tokens']} tokens each, streamed. Rates: of each "
        "repeat, the median and both ends. Times: since a prompt was sent, of all answers of all repeats. Event loop, "
        "engine's host, client: processor time of the thread that hands answers out, of the engine's own, and of the "
        "process that asks, in percent of one core; per answer: of the first of them.",
    )


def pool_since_sent(runs: Samples, key: str) -> list[float]:
    """Milliseconds of all answers of all runs, without what they waited for a connection."""
    return [
        (us - late) / 1e3 for one in runs for us, late in zip(one[key], one["late_us"], strict=True) if us is not None
    ]


def show_share(runs: Samples, key: str) -> str:
    """Of a core, in percent; "" for who has none."""
    if runs[0][key] is None:
        return ""
    return f"{sum(one[key] for one in runs) / sum(1e6 * one['seconds'] for one in runs):.1%}"


def chart_throughput(full: Samples) -> Chart:
    lines = []
    for way in list_ways(full):
        x = tuple(map(float, list_distinct(full, "connections")))
        speeds = [[one["speed"] for one in choose(full, connections=int(place), way=way)] for place in x]
        lines.append(Series(way, x, tuple(map(median, speeds)), tuple(map(min, speeds)), tuple(map(max, speeds))))
    title = "Throughput over HTTP, and inside the process"
    return Chart("throughput-by-connections", title, "connections", "tokens per second", tuple(lines), log_x=True)


# -- what HTTP costs


def tabulate_cost(cost: Samples) -> Table:
    """A row for each who works for an answer."""
    server, engine = find_server(cost), find_engine(cost)
    workers = ((server, "loop_us", "event loop"), (engine, "loop_us", "event loop"), (server, "client_us", "client"))
    rows = []
    for way, key, worker in workers:
        per_request, per_part = solve_cost(cost, way, key)
        longest = choose(cost, way=way, max_tokens=max(list_distinct(cost, "max_tokens")))
        rows.append(
            (
                way,
                worker,
                *(
                    f"{format_figure(median(ones))} ({format_range(min(ones), max(ones))})"
                    for ones in (per_request, per_part)
                ),
                format_figure(sum(one[key] for one in longest) / count_prompts(longest) / 1e3),
                *show(pool_since_sent(longest, "first_us"), (50,)),
                *show(pool_since_sent(longest, "end_us"), (50,)),
            )
        )
    longest = choose(cost, max_tokens=max(list_distinct(cost, "max_tokens")))
    parts = sum(part for one in longest for part in one["parts"] if part) / count_prompts(longest)
    return Table(
        "cost",
        "What an answer costs, one at a time",
        ("way", "work of", "ms per request", "ms per part", "ms per answer", "first part p50, ms", "whole p50"),
        tuple(rows),
        f"Processor time. Per part of an answer: what answers of {longest[0]['max_tokens']} tokens, in {parts:.1f} "
        "parts, take beyond those of one; per request: what is left of those of one. Medians of the repeats, and both "
        "ends. The event loop of the engine's own process is that of callers inside it, their own work included.",
    )


def count_prompts(runs: Samples) -> int:
    return sum(len(one["prompts"]) for one in runs)


def solve_cost(cost: Samples, way: str, key: str) -> tuple[list[float], list[float]]:
    """Milliseconds per request and per part of an answer, of each repeat.

    From answers of one part and of many: both are a request, and so many parts.
    """
    per_request, per_part = [], []
    for repeat in list_distinct(cost, "repeat"):
        short, long = sorted(choose(cost, way=way, repeat=repeat), key=lambda one: one["max_tokens"])
        (few, least), (many, most) = (
            (sum(filter(None, one["parts"])) / len(one["prompts"]), one[key] / len(one["prompts"]) / 1e3)
            for one in (short, long)
        )
        part = (most - least) / (many - few)
        per_part.append(part)
        per_request.append(least - few * part)
    return per_request, per_part


# -- at their own times


def tabulate_arrivals(open_: Samples) -> Table:
    """A row for each number of connections and way."""
    rows = []
    for connections in list_distinct(open_, "connections"):
        for way in list_ways(open_):
            runs = choose(open_, connections=connections, way=way)
            rows.append(
                (
                    f"{connections}",
                    f"{runs[0]['rate']:g}",
                    way,
                    f"{count_prompts(runs)}",
                    f"{count_prompts(runs) - sum(map(count_answers, runs))}",
                    *show(pool(runs, "first_us"), SHARES),
                    *show(pool(runs, "end_us"), SHARES),
                    *show(pool(runs, "late_us"), (50, 99)),
                )
            )
    header = ("connections", "per second", "way", "prompts", "refused", "first part p50, ms", "p90", "p99")
    return Table(
        "arrivals",
        "Callers who come when they come",
        (*header, "whole p50", "p90", "p99", "sent late p50", "p99"),
        tuple(rows),
        f"Prompts at independent times (a Poisson process drawn beforehand, the same for both ways), "
        f"{open_[0]['max_tokens']} tokens each. Times: since a prompt was to come, so that waiting for a connection, "
        "which is what makes it late, counts. All repeats; refused ones have no times.",
    )


WAITS = (("first_us", "first part"), ("end_us", "whole answer"))


def chart_waits(open_: Samples, key: str, what: str) -> Chart:
    """Two lines for each way: half of all wait no longer, and all but one of a hundred."""
    x = tuple(map(float, list_distinct(open_, "connections")))
    lines = []
    for way in list_ways(open_):
        waits = {place: pool(choose(open_, connections=int(place), way=way), key) for place in x}
        there = tuple(place for place in x if waits[place])
        for share in (50, 99):
            lines.append(Series(f"{way}, p{share}", there, tuple(percentile(waits[place], share) for place in there)))
    title = f"{what[0].upper()}{what[1:]}, by connections"
    return Chart(
        f"{what.replace(' ', '-')}-by-connections", title, "connections", "milliseconds", tuple(lines), log_x=True
    )


def list_figures(full: Samples, cost: Samples) -> dict[str, float]:
    """What HTTP costs, and how much of the engine's throughput is left."""
    server, engine = find_server(cost), find_engine(cost)
    outside, inside = (solve_cost(cost, way, "loop_us") for way in (server, engine))
    figures = {
        "request_ms": median(outside[0]),
        "part_ms": median(outside[1]),
        "request_more_ms": median(outside[0]) - median(inside[0]),
        "part_more_ms": median(outside[1]) - median(inside[1]),
    }
    for connections in list_distinct(full, "connections"):
        here = choose(full, connections=connections)
        sides = pair_up(here, "speed", ("repeat",), {"way": server}, {"way": engine})
        figures[f"over_engine_{connections}_connections"] = estimate_ratio(*sides).value
    return figures
