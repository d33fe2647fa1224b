"""What the samples of host_bench.py say, all of it per round."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_aot.benchmarks.estimates import Estimate, choose, estimate_median, median, pair_up, percentile
from dflash_aot.benchmarks.findings import Chart, Findings, Series, Table, format_figure, format_range
from dflash_aot.benchmarks.record import Record

Samples = Sequence[Mapping[str, Any]]
COUNTED = ("calls", "to_device", "to_host", "reads", "waits")


def describe(record: Record) -> Findings:
    """Time, counts and the floor."""
    samples = record.samples
    served = [one for one in samples if one["kind"] != "floor"]
    places = sorted({(one["callers"], one["k"]) for one in served})
    ways = list(dict.fromkeys(one["way"] for one in served))
    return Findings(
        (
            tabulate_times(samples, places, ways),
            tabulate_counts(samples, places, ways),
            tabulate_floor(choose(samples, kind="floor")),
        ),
        (draw_times(samples, places, ways), draw_counts(samples, places, ways)),
        make_figures(samples, places, ways),
    )


def subtract(samples: Samples, value: str, **wanted: Any) -> list[float]:
    """`value` per round that long answers have more than short ones, repeat by repeat."""
    rounds = pair_up(samples, "rounds", ["repeat"], *_lengths(wanted))
    values = pair_up(samples, value, ["repeat"], *_lengths(wanted))
    return [(long - short) / (more - fewer) for long, short, more, fewer in zip(*values, *rounds, strict=True)]


def _lengths(wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return {**wanted, "kind": "times", "length": "long"}, {**wanted, "kind": "times", "length": "short"}


def per_round(sample: Mapping[str, Any], value: str) -> float:
    """Of a watched loop. calls: of all programs."""
    found = sample[value]
    return (sum(found.values()) if value == "calls" else found) / sample["rounds"]


def clock(sample: Mapping[str, Any]) -> float:
    """Microseconds per round of a watched loop in which it did not wait."""
    return (sample["us"] - sample["wait_us"]) / sample["rounds"]


def format_estimate(one: Estimate) -> str:
    return f"{format_figure(one.value)} ({format_range(one.low, one.high)})"


def tabulate_times(samples: Samples, places: Sequence[tuple[int, int]], ways: Sequence[str]) -> Table:
    rows = []
    for callers, k in places:
        for way in ways:
            same = {"callers": callers, "k": k, "way": way}
            host, round_ = subtract(samples, "host_us", **same), subtract(samples, "us", **same)
            wall = subtract(samples, "host_wall_us", **same)
            share = median([one / whole for one, whole in zip(host, round_, strict=True)])
            rows.append(
                (
                    f"{callers}",
                    f"{k}",
                    way,
                    format_estimate(estimate_median(host)),
                    format_figure(median(wall)) if any(wall) else "",
                    format_figure(median([clock(one) for one in choose(samples, kind="counts", **same)])),
                    format_figure(
                        median([per_round(one, "call_us") for one in choose(samples, kind="counts", **same)])
                    ),
                    f"{median(round_) / 1e3:.3f}",
                    f"{share:.1%}",
                )
            )
    return Table(
        "times",
        "The host's time per round",
        ("callers", "K", "way", "work µs", "clock µs", "clock µs, traced", "of it calls", "round ms", "work of round"),
        tuple(rows),
        "Work: of the processor, in the thread that dispatches; medians of the repeats with 95 % intervals. Clock: "
        "what passed while it did not wait for the device, as the engine counts it; traced: of both ways, slower for "
        "the trace, and how much of it went to calls of executables. On a CPU the device works on the same cores, "
        "which lengthens the clock and cools the caches.",
    )


def tabulate_counts(samples: Samples, places: Sequence[tuple[int, int]], ways: Sequence[str]) -> Table:
    rows = []
    for callers, k in places:
        for way in ways:
            chosen = choose(samples, kind="counts", callers=callers, k=k, way=way)
            counted = (format_count([per_round(one, value) for one in chosen]) for value in COUNTED)
            programs = dict.fromkeys(name for one in chosen for name in one["calls"])
            rows.append((f"{callers}", f"{k}", way, *counted, " ".join(programs)))
    return Table(
        "counts",
        "What a round asks of JAX",
        ("callers", "K", "way", "executables", "copies to device", "copies to host", "reads", "waits", "programs"),
        tuple(rows),
        "Counted from traces of the thread that dispatches, between all prefills and the last round; means over the "
        "rounds of a trace, and least to most where repeats differ. Waits: reads that blocked, since what they read "
        "was not there yet.",
    )


def format_count(values: Sequence[float]) -> str:
    """A whole number where it is one."""
    low, high = (f"{value:.2f}".removesuffix(".00") for value in (min(values), max(values)))
    return low if low == high else f"{low}-{high}"


def tabulate_floor(samples: Samples) -> Table:
    """Of the bare calls."""
    rows = []
    for arguments in dict.fromkeys(one["arguments"] for one in samples):
        cells = [f"{arguments}"]
        for device in ("idle", "busy"):
            (chosen,) = choose(samples, arguments=arguments, device=device)
            cells += [f"{median(chosen['work_us']):.0f}", f"{percentile(chosen['work_us'], 95):.0f}"]
        rows.append(tuple(cells))
    return Table(
        "floor",
        "The floor: work of one call of a compiled program, in µs",
        ("arguments", "idle device", "p95", "busy device", "p95"),
        tuple(rows),
        "Nothing of this project is called. Medians and 95th percentiles; busy: each call makes the device multiply.",
    )


def draw_times(samples: Samples, places: Sequence[tuple[int, int]], ways: Sequence[str]) -> Chart:
    labels = tuple(f"{callers} callers, K = {k}" for callers, k in places)
    series = []
    for way in ways:
        found = [estimate_median(subtract(samples, "host_us", callers=callers, k=k, way=way)) for callers, k in places]
        values, low, high = zip(*((one.value, one.low, one.high) for one in found), strict=True)
        series.append(Series(way, labels, values, low, high))
    return Chart("work", "The host's work per round", "", "µs", tuple(series), "bar")


def draw_counts(samples: Samples, places: Sequence[tuple[int, int]], ways: Sequence[str]) -> Chart:
    """Of both ways at the largest batch and K."""
    callers, k = places[-1]
    series = []
    for way in ways:
        chosen = choose(samples, kind="counts", callers=callers, k=k, way=way)
        values = tuple(median([per_round(one, value) for one in chosen]) for value in COUNTED)
        series.append(Series(way, ("executables", "to device", "to host", "reads", "waits"), values))
    return Chart("asked", f"Asked of JAX per round: {callers} callers, K = {k}", "", "per round", tuple(series), "bar")


def make_figures(samples: Samples, places: Sequence[tuple[int, int]], ways: Sequence[str]) -> dict[str, float]:
    """Such as "engine_1_k7_us": work per round; "…_share": of the round."""
    figures = {}
    for callers, k in places:
        for way in ways:
            same = {"callers": callers, "k": k, "way": way}
            name = f"{'engine' if way == 'engine' else 'loop'}_{callers}_k{k}"
            host, round_ = subtract(samples, "host_us", **same), subtract(samples, "us", **same)
            figures[f"{name}_us"] = median(host)
            figures[f"{name}_share"] = median([one / whole for one, whole in zip(host, round_, strict=True)])
    return figures
