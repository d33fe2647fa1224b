"""What the samples of decode_bench.py say."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dflash_aot.benchmarks.estimates import Estimate, estimate_median, estimate_ratio, median, percentile
from dflash_aot.benchmarks.findings import Chart, Findings, Series, Table, format_figure, format_range
from dflash_aot.benchmarks.record import Record
from dflash_aot.benchmarks.ways import make_slug

STEPS = ("draft", "verify", "kv_write", "read")
PLAIN, TORCH = "engine, K = 0", "PyTorch float32"


@dataclass(frozen=True)
class Runs:
    """All answers of one way, in the order of prompts and repeats."""

    name: str
    k: int | None
    exact: bool
    samples: Sequence[Mapping[str, Any]]

    @cached_property
    def pace(self) -> dict[tuple[int, int], float]:
        """Seconds per token behind the first one, by prompt and repeat."""
        return {
            (one["prompt"], one["repeat"]): sum(one["gaps_us"][1:]) / (len(one["gaps_us"]) - 1) / 1e6
            for one in self.samples
        }

    @cached_property
    def accepted(self) -> list[int]:
        """Of every round."""
        return [count for one in self.samples for count in one["accepted"]]

    @property
    def accepted_by_prompt(self) -> dict[int, list[int]]:
        """Of every round, all repeats."""
        found: dict[int, list[int]] = {}
        for one in self.samples:
            found.setdefault(one["prompt"], []).extend(one["accepted"])
        return found

    @property
    def speculates(self) -> bool:
        """Whether anything could be accepted."""
        return self.k != 0 and bool(self.accepted)

    @property
    def pass_ms(self) -> float:
        """From one pass of the target to the next: one pass, and what else it takes to get there."""
        return median([sum(one["gaps_us"][1:]) / one["passes"] / 1e3 for one in self.samples])

    def speed(self) -> Estimate:
        """Tokens per second."""
        return estimate_median([1 / seconds for seconds in self.pace.values()])

    def gain(self, other: "Runs") -> Estimate:
        """How many times as fast as the other."""
        return estimate_ratio([other.pace[one] for one in self.pace], [*self.pace.values()])


def describe(record: Record) -> Findings:
    """Speed, pace, acceptance, and the parts of a round."""
    runs = gather_runs(record.samples)
    parts = [one for one in record.samples if one["kind"] == "parts"]
    speculating = [one for one in runs.values() if one.speculates and one.name.startswith("engine")]
    fixed = [one for one in speculating if one.k is not None]
    tables = [tabulate_speed(runs, record), tabulate_pace(runs)]
    charts = [chart_speed(runs)]
    if speculating:
        tables.append(tabulate_acceptance(speculating))
    if fixed:
        tables.append(tabulate_histogram(fixed))
        charts += [chart_positions(fixed), chart_histogram(fixed)]
    if parts:
        tables.append(tabulate_parts(parts, runs))
        charts.append(chart_parts(parts))
    return Findings(tuple(tables), tuple(charts), list_figures(runs))


def gather_runs(samples: Sequence[Mapping[str, Any]]) -> dict[str, Runs]:
    """By name, in the order of the first prompt's turns."""
    by_way: dict[str, list[Mapping[str, Any]]] = {}
    for one in samples:
        if one["kind"] == "answer":
            by_way.setdefault(one["way"], []).append(one)
    return {name: Runs(name, chosen[0]["k"], chosen[0]["exact"], chosen) for name, chosen in by_way.items()}


# -- speed


def tabulate_speed(runs: Mapping[str, Runs], record: Record) -> Table:
    """A way's row: how fast, against what, how long until the first token, how many prompts got the exact tokens."""
    bases = [runs[name] for name in (PLAIN, TORCH) if name in runs]
    reference = {one["prompt"]: one["tokens"] for one in next(one for one in runs.values() if one.exact).samples}
    header = ("way", "tokens/s", "range", *(f"x {base.name}" for base in bases), "first token ms", "ms per pass")
    rows = []
    for own in runs.values():
        speed = own.speed()
        different = {one["prompt"] for one in own.samples if one["tokens"] != reference[one["prompt"]]}
        rows.append(
            (
                own.name,
                format_figure(speed.value),
                format_range(speed.low, speed.high),
                *(format_gain(own.gain(base)) for base in bases),
                format_figure(median([one["gaps_us"][0] / 1e3 for one in own.samples])),
                format_figure(own.pass_ms),
                f"{len(reference) - len(different)}/{len(reference)}",
            )
        )
    return Table("speed", "How fast tokens come", (*header, "same tokens"), tuple(rows), note_speed(runs, record))


def format_gain(gain: Estimate) -> str:
    """A ratio and its range."""
    return f"{gain.value:.2f} ({gain.low:.2f}-{gain.high:.2f})"


def note_speed(runs: Mapping[str, Runs], record: Record) -> str:
    """What was measured, and how to read it."""
    first = next(iter(runs.values()))
    prompts, tokens = len({one["prompt"] for one in first.samples}), len(first.samples[0]["gaps_us"])
    idle = [one for one in record.samples if one["kind"] == "idle"]
    busiest = max((one["cpu_seconds"] / one["seconds"] for one in idle if one["seconds"]), default=0.0)
    parts = [
        f"Prompts: {prompts}, one at a time; repeats: {len(first.samples) // prompts}; tokens per answer: {tokens}.",
        "Tokens per second and time per pass (of the target, with all that leads to the next one) leave out the first "
        "token, which has its own column. All are medians of the answers; ratios are of the same prompt and repeat. "
        "Ranges: 95 % by the bootstrap.",
    ]
    guessing = [one for one in runs.values() if one.name.startswith(f"{TORCH},")]
    if guessing:
        parts.append(f"Of {TORCH}'s ways to guess the faster is {max(guessing, key=_median_speed).name}.")
    parts.append(f"While others worked, no way's process used more than {100 * busiest:.1f} % of a core.")
    return " ".join(parts)


def _median_speed(runs: Runs) -> float:
    return -median([*runs.pace.values()])


def chart_speed(runs: Mapping[str, Runs]) -> Chart:
    """A bar for each way."""
    speeds = [own.speed() for own in runs.values()]
    low, high = tuple(one.low for one in speeds), tuple(one.high for one in speeds)
    bars = Series("tokens per second", tuple(runs), tuple(one.value for one in speeds), low, high)
    return Chart("speed-bars", "Tokens per second, one prompt at a time", "", "tokens per second", (bars,), "bar")


def list_figures(runs: Mapping[str, Runs]) -> dict[str, float]:
    """Each way's speed; each engine's gain over the other ways; τ; and those of the fastest float32 engine, "best"."""
    figures = {f"{make_slug(name)}_tokens_per_second": own.speed().value for name, own in runs.items()}
    engines = {make_slug(name): own for name, own in runs.items() if name.startswith("engine")}
    exact = [own for own in engines.values() if own.exact]
    if exact:
        engines["best"] = max(exact, key=_median_speed)
        figures["best_tokens_per_second"] = engines["best"].speed().value
    for slug, own in engines.items():
        figures |= {f"{slug}_over_{make_slug(name)}": own.gain(other).value for name, other in runs.items()}
        if own.speculates:
            figures[f"{slug}_tau"] = 1 + sum(own.accepted) / len(own.accepted)
    return figures


# -- pace


def tabulate_pace(runs: Mapping[str, Runs]) -> Table:
    """Percentiles of the time per token, both ways to take it."""
    rows = []
    for own in runs.values():
        requests = [1e3 * seconds for seconds in own.pace.values()]
        gaps = [gap / 1e3 for one in own.samples for gap in one["gaps_us"][1:]]
        values = [percentile(times, share) for times in (requests, gaps) for share in (50, 95, 99)]
        rows.append((own.name, *map(format_figure, values)))
    return Table(
        "pace",
        "Time per output token, ms",
        ("way", "answer p50", "p95", "p99", "token p50", "p95", "p99"),
        tuple(rows),
        "Behind the first token. Of answers: each one's time per token. Of tokens: each one's time since the one "
        "before it; those of a round, or of several in one dispatch, come together: most wait for nothing, and some "
        "for all of that.",
    )


# -- acceptance


def tabulate_acceptance(runs: Sequence[Runs]) -> Table:
    """τ, and for a fixed K the share of rounds in which the token at each position stood."""
    widest = max((own.k for own in runs if own.k), default=0)
    rows = []
    for own in runs:
        shares = [f"{share:.2f}" for share in share_by_position(own)] if own.k else []
        taus = [1 + sum(accepted) / len(accepted) for accepted in own.accepted_by_prompt.values() if accepted]
        over_rounds = 1 + sum(own.accepted) / len(own.accepted)
        cells = (own.name, f"{len(own.accepted)}", f"{over_rounds:.2f}", f"{sum(taus) / len(taus):.2f}")
        rows.append((*cells, *shares, *[""] * (widest - len(shares))))
    return Table(
        "acceptance",
        "Tokens per round (τ), and the share of rounds in which the drafted token at each position stood",
        ("way", "rounds", "τ over rounds", "τ mean of prompts", *map(str, range(1, widest + 1))),
        tuple(rows),
        " ".join(
            (
                "τ counts the target's own token. Over rounds: all tokens by all rounds. Mean of prompts: of each "
                "one's own τ.",
                *(note_choice(own) for own in runs if own.k is None),
            )
        ),
    )


def note_choice(runs: Runs) -> str:
    """How often each K was chosen."""
    counts: Counter[int] = Counter()
    for one in runs.samples:
        counts.update({int(k): count for k, count in one["rounds_by_k"].items()})
    shares = ", ".join(f"{count / counts.total():.0%} at K = {k}" for k, count in sorted(counts.items()))
    return f"Rounds of {runs.name}: {shares}."


def share_by_position(runs: Runs) -> list[float]:
    """Of the rounds, those in which the drafted tokens up to each position stood."""
    assert runs.k, "of a fixed K"
    return [sum(count >= place for count in runs.accepted) / len(runs.accepted) for place in range(1, runs.k + 1)]


def tabulate_histogram(runs: Sequence[Runs]) -> Table:
    """Shares of rounds by drafted tokens accepted."""
    widest = max(own.k or 0 for own in runs)
    rows = []
    for own in runs:
        shares = [f"{share:.2f}" for share in share_by_count(own)]
        rows.append((own.name, *shares, *[""] * (1 + widest - len(shares))))
    header = ("way", *map(str, range(widest + 1)))
    return Table("histogram", "Share of rounds by drafted tokens accepted", header, tuple(rows))


def share_by_count(runs: Runs) -> list[float]:
    """Of the rounds, those with 0 … K tokens accepted."""
    assert runs.k, "of a fixed K"
    counts = Counter(runs.accepted)
    return [counts[count] / len(runs.accepted) for count in range(runs.k + 1)]


def chart_positions(runs: Sequence[Runs]) -> Chart:
    """A line for each K."""
    lines = tuple(Series(own.name, tuple(range(1, (own.k or 0) + 1)), tuple(share_by_position(own))) for own in runs)
    return Chart(
        "acceptance-by-position", "Acceptance", "position in the block", "share of rounds that accept it", lines
    )


def chart_histogram(runs: Sequence[Runs]) -> Chart:
    """A group of bars for each K."""
    groups = tuple(Series(own.name, tuple(range((own.k or 0) + 1)), tuple(share_by_count(own))) for own in runs)
    return Chart("accepted-per-round", "Drafted tokens accepted per round", "tokens", "share of rounds", groups, "bar")


# -- parts


def tabulate_parts(parts: Sequence[Mapping[str, Any]], runs: Mapping[str, Runs]) -> Table:
    """Medians of each step's time by K, beside a whole round as it is served and the host's work in it."""
    rows = []
    for k, steps in gather_steps(parts).items():
        served = runs[f"engine, K = {k}"].samples
        rows.append(
            (
                f"{k}",
                *(format_figure(steps[step]) if step in steps else "" for step in STEPS),
                format_figure(sum(steps.values())),
                format_figure(runs[f"engine, K = {k}"].pass_ms),
                format_figure(median([one["host_us"] / one["rounds"] / 1e3 for one in served])),
                format_figure(median([one["host_wall_us"] / one["rounds"] / 1e3 for one in served])),
            )
        )
    return Table(
        "parts",
        "The parts of a round, ms",
        ("K", *STEPS, "sum", "round as served", "host's work", "host's clock"),
        tuple(rows),
        "Medians. The parts come from a pass of its own that waits for the device behind every program, dispatch "
        "included (read: the verdict's way to the caller). That forbids all overlap, and a round as it is served may "
        "be one program: they need not add up to it. Host: the engine's own thread while it serves, as processor time "
        "and by the clock, waits for the device left out.",
    )


def gather_steps(parts: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """By K: median milliseconds of each step that its rounds have."""
    found: dict[int, dict[str, list[float]]] = {}
    for one in parts:
        steps = found.setdefault(one["k"], {})
        for step in STEPS:
            if f"{step}_us" in one:
                steps.setdefault(step, []).extend(us / 1e3 for us in one[f"{step}_us"])
    return {k: {step: median(times) for step, times in steps.items()} for k, steps in found.items()}


def chart_parts(parts: Sequence[Mapping[str, Any]]) -> Chart:
    """A bar for each K, made of its steps."""
    steps = gather_steps(parts)
    ks = tuple(f"K = {k}" for k in steps)
    layers = tuple(Series(step, ks, tuple(one.get(step, 0.0) for one in steps.values())) for step in STEPS)
    return Chart("parts-of-a-round", "The parts of a round, each waited for", "", "milliseconds", layers, "stack")
