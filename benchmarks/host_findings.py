"""What the samples of host_bench.py say, all of it per round."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dflash_aot.benchmarks.estimates import Estimate, choose, estimate_median, median, pair_up, percentile
from dflash_aot.benchmarks.findings import Chart, Findings, Series, Table, format_figure, format_range
from dflash_aot.benchmarks.record import Record

Samples = Sequence[Mapping[str, Any]]
# The engine, also on a bundle that runs several rounds per call; the plain `jax.jit` loop.
ENGINE, BURSTS, LOOP = "engine", "engine, bursts", "jax.jit loop"
FIGURES = {ENGINE: "engine", BURSTS: "bursts", LOOP: "loop"}
COUNTED = {
    "calls": "executables",
    "to_device": "copies to device",
    "to_host": "copies to host",
    "reads": "reads",
    "waits": "waits",
}


@dataclass(frozen=True)
class Case:
    """One way at one K under so many callers. Figures in microseconds per round, repeat by repeat."""

    callers: int
    k: int
    way: str
    samples: Samples

    @property
    def place(self) -> str:
        return f"{self.callers} caller{'s' * (self.callers > 1)}, K = {self.k}"

    @cached_property
    def work(self) -> list[float]:
        """Of the processor."""
        return self._subtract("host_us")

    @cached_property
    def clock(self) -> list[float]:
        """As the engine counts it; of the loop nothing."""
        return self._subtract("host_wall_us")

    @cached_property
    def whole(self) -> list[float]:
        """The round."""
        return self._subtract("us")

    @property
    def share(self) -> float:
        """Of the round that is the host's work."""
        return median([work / whole for work, whole in zip(self.work, self.whole, strict=True)])

    @cached_property
    def traced(self) -> Samples:
        return choose(self.samples, kind="counts")

    def count(self, value: str) -> list[float]:
        """Per round, trace by trace; "calls": of all programs."""
        found = [sum(one[value].values()) if value == "calls" else one[value] for one in self.traced]
        return [count / one["rounds"] for count, one in zip(found, self.traced, strict=True)]

    def traced_clock(self) -> float:
        """In which a traced loop did not wait."""
        return median([whole - wait for whole, wait in zip(self.count("us"), self.count("wait_us"), strict=True)])

    def _subtract(self, value: str) -> list[float]:
        """What long answers have more than short ones: what comes before the rounds is in neither."""
        long, short = ({"kind": "times", "length": length} for length in ("long", "short"))
        values, rounds = (pair_up(self.samples, name, ["repeat"], long, short) for name in (value, "rounds"))
        return [(more - less) / (b - a) for more, less, b, a in zip(*values, *rounds, strict=True)]


def describe(record: Record) -> Findings:
    """Time, counts and the floor."""
    cases = list_cases([one for one in record.samples if one["kind"] != "floor"])
    floor = choose(record.samples, kind="floor")
    return Findings(
        (tabulate_times(cases), tabulate_counts(cases), tabulate_floor(floor)),
        (draw_work(cases), draw_counts(cases)),
        make_figures(cases),
    )


def list_cases(samples: Samples) -> list[Case]:
    """By callers and K; of each the ways as they took turns."""
    names = dict.fromkeys((one["callers"], one["k"], one["way"]) for one in samples)
    return [
        Case(callers, k, way, choose(samples, callers=callers, k=k, way=way))
        for callers, k, way in sorted(names, key=lambda name: name[:2])
    ]


def tabulate_times(cases: Iterable[Case]) -> Table:
    rows = (
        (
            f"{one.callers}",
            f"{one.k}",
            one.way,
            format_estimate(estimate_median(one.work)),
            format_figure(median(one.clock)) if any(one.clock) else "",
            format_figure(one.traced_clock()),
            format_figure(median(one.count("call_us"))),
            f"{median(one.whole) / 1e3:.3f}",
            f"{one.share:.1%}",
        )
        for one in cases
    )
    return Table(
        "times",
        "The host's time per round",
        ("callers", "K", "way", "work µs", "clock µs", "clock µs, traced", "of it calls", "round ms", "work of round"),
        tuple(rows),
        "Work: of the processor, in the thread that dispatches; medians of the repeats with 95 % intervals. Clock: "
        "what passed while it did not wait for the device, as the engine counts it; traced: of all ways, slower for "
        "the trace, and how much of it went to calls of executables. On a CPU the device works on the same cores, "
        "which lengthens the clock and cools the caches. Bursts: several rounds per call, of a caller who is alone.",
    )


def format_estimate(one: Estimate) -> str:
    return f"{format_figure(one.value)} ({format_range(one.low, one.high)})"


def tabulate_counts(cases: Iterable[Case]) -> Table:
    rows = (
        (
            f"{one.callers}",
            f"{one.k}",
            one.way,
            *(format_count(one.count(value)) for value in COUNTED),
            " ".join(sorted({program for trace in one.traced for program in trace["calls"]})),
        )
        for one in cases
    )
    return Table(
        "counts",
        "What a round asks of JAX",
        ("callers", "K", "way", *COUNTED.values(), "programs"),
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


def draw_work(cases: Sequence[Case]) -> Chart:
    series = []
    for way in dict.fromkeys(one.way for one in cases):
        chosen = {one.place: estimate_median(one.work) for one in cases if one.way == way}
        values, low, high = zip(*((one.value, one.low, one.high) for one in chosen.values()), strict=True)
        series.append(Series(way, tuple(chosen), values, low, high))
    return Chart("work", "The host's work per round", "", "µs", tuple(series), "bar")


def draw_counts(cases: Sequence[Case]) -> Chart:
    """Of the fewest callers, at the largest K."""
    callers, k = cases[0].callers, max(one.k for one in cases)
    chosen = [one for one in cases if (one.callers, one.k) == (callers, k)]
    series = (
        Series(one.way, tuple(COUNTED.values()), tuple(median(one.count(value)) for value in COUNTED)) for one in chosen
    )
    return Chart("asked", f"Asked of JAX per round: {chosen[0].place}", "", "per round", tuple(series), "bar")


def make_figures(cases: Iterable[Case]) -> dict[str, float]:
    """Such as "engine_1_k7_us": work per round; "…_share": of the round."""
    figures: dict[str, float] = {}
    for one in cases:
        name = f"{FIGURES[one.way]}_{one.callers}_k{one.k}"
        figures |= {f"{name}_us": median(one.work), f"{name}_share": one.share}
    return figures
