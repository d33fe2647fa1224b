"""What the samples of kflat_bench.py say: seconds by rows, beside PyTorch's and the least that this machine allows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_aot.benchmarks.estimates import Estimate, choose, estimate_ratio, median
from dflash_aot.benchmarks.findings import Chart, Findings, Series, Table, format_figure, format_range
from dflash_aot.benchmarks.record import Record

Sample = Mapping[str, Any]
BUNDLE, TORCH = "bundle", "PyTorch"
PROGRAMS = {"verify": "verification", "prefill": "prompt chunk"}


@dataclass(frozen=True)
class Peak:
    """The best that was seen of this machine, by anybody; flops by dtype."""

    bytes_per_second: float
    flops_per_second: Mapping[str, float]

    def bound_ms(self, work: Sample) -> float:
        """The least that a pass can take."""
        flops = self.flops_per_second[work["dtype"]]
        return 1e3 * max(work["bytes"] / self.bytes_per_second, work["flops"] / flops)


def find_peak(samples: Sequence[Sample]) -> Peak:
    """A product in a narrower dtype is at least as fast as the machine, or it would be done in a wider one."""
    peaks, flops = choose(samples, kind="peaks"), {}
    for dtype in dict.fromkeys(one["dtype"] for one in peaks):
        flops[dtype] = max(max(one["flops_per_second"]) for one in choose(peaks, dtype=dtype))
    if "bfloat16" in flops:
        flops["bfloat16"] = max(flops.values())
    return Peak(max(max(one["bytes_per_second"]) for one in peaks), flops)


def describe(record: Record) -> Findings:
    """A table of every length; how much slower a pass is that meets others' caches; the peaks."""
    samples, peak = record.samples, find_peak(record.samples)
    passes = choose(samples, kind="pass")
    lengths = sorted({one["length"] for one in passes})
    return Findings(
        (
            *(tabulate_passes(samples, peak, length) for length in lengths),
            tabulate_first(passes),
            tabulate_peaks(samples, peak),
        ),
        tuple(draw_passes(samples, peak, length) for length in lengths),
        make_figures(passes),
    )


def list_makers(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Way and dtype, as they come."""
    return list(dict.fromkeys((one["way"], one["dtype"]) for one in choose(samples, kind="pass")))


def list_places(passes: Sequence[Sample]) -> list[tuple[str, int]]:
    """Program and rows, as they come."""
    return list(dict.fromkeys((one["program"], one["rows"]) for one in passes))


def read_times(samples: Sequence[Sample], **wanted: Any) -> list[float]:
    """Milliseconds of the calls behind each first one."""
    return [us / 1e3 for one in choose(samples, kind="pass", **wanted) for us in one["us"]]


def compare(passes: Sequence[Sample], dtype: str, **place: Any) -> Estimate:
    """How many times as long PyTorch takes as the bundle: medians of each repeat, pair by pair."""
    sides = []
    for way in (TORCH, BUNDLE):
        chosen = choose(passes, way=way, dtype=dtype, **place)
        sides.append([median(one["us"]) for one in sorted(chosen, key=lambda one: one["repeat"])])
    return estimate_ratio(*sides)


def tabulate_passes(samples: Sequence[Sample], peak: Peak, length: int) -> Table:
    """All rows at one length."""
    makers, passes = list_makers(samples), choose(samples, kind="pass", length=length)
    dtypes = list(dict.fromkeys(dtype for _, dtype in makers))
    rows = []
    for program, count in list_places(passes):
        place = {"program": program, "rows": count, "length": length}
        cells = [PROGRAMS[program], f"{count}"]
        for dtype in dtypes:
            cells += [
                format_figure(median(read_times(samples, way=way, dtype=dtype, **place)))
                for way, one in makers
                if one == dtype
            ]
            (work,) = choose(samples, kind="work", dtype=dtype, **place)
            cells.append(format_figure(peak.bound_ms(work)))
            if (TORCH, dtype) in makers:
                ratio = compare(passes, dtype, **place)
                cells.append(f"{format_figure(ratio.value)} ({format_range(ratio.low, ratio.high)})")
        rows.append(tuple(cells))
    header = ["pass", "rows"]
    for dtype in dtypes:
        header += [f"{way} {dtype} ms" for way, one in makers if one == dtype] + [f"roofline {dtype} ms"]
        header += [f"{TORCH} / {BUNDLE}, {dtype}"] * ((TORCH, dtype) in makers)
    return Table(
        f"passes_{length}",
        f"One pass of the target over its last rows, {length} positions seen",
        tuple(header),
        tuple(rows),
        "Medians of all calls but the first one of each turn, waited for; ratios repeat by repeat, 95 % intervals. A "
        "verification chooses a token behind every row, a prompt chunk behind its last one. Roofline: every weight and "
        "all kv read once, no waiting, at the best bandwidth and arithmetic seen in this run.",
    )


def tabulate_first(passes: Sequence[Sample]) -> Table:
    """By maker and rows of verifications, over all lengths."""
    makers = list_makers(passes)
    counts = sorted({rows for program, rows in list_places(passes) if program == "verify"})
    rows = []
    for count in counts:
        cells = [f"{count}"]
        for way, dtype in makers:
            chosen = choose(passes, way=way, dtype=dtype, program="verify", rows=count)
            cells.append(format_figure(median([one["first_us"] / median(one["us"]) for one in chosen])))
        rows.append(tuple(cells))
    return Table(
        "first",
        "The first verification of a turn against those behind it",
        ("rows", *(f"{way} {dtype}" for way, dtype in makers)),
        tuple(rows),
        "Median of ratios: the first call comes after other processes had the machine and its caches.",
    )


def tabulate_peaks(samples: Sequence[Sample], peak: Peak) -> Table:
    rows = []
    for way, dtype in list_makers(samples):
        chosen = choose(samples, kind="peaks", way=way, dtype=dtype)
        figures = [
            median([value for one in chosen for value in one[what]]) / 1e9
            for what in ("bytes_per_second", "flops_per_second")
        ]
        rows.append((f"{way} {dtype}", *map(format_figure, figures)))
    best = " ".join(f"{dtype} {value / 1e9:.0f}" for dtype, value in peak.flops_per_second.items())
    return Table(
        "peaks",
        "What this machine was seen to do",
        ("way", "GB/s read", "Gflop/s"),
        (*rows, ("the roofline's, the best of all", format_figure(peak.bytes_per_second / 1e9), best)),
        "A sum over 512 MiB, and a product of 2048 by 2048 in the dtype; medians, and the best single one.",
    )


def draw_passes(samples: Sequence[Sample], peak: Peak, length: int) -> Chart:
    """Verifications."""
    series = []
    for way, dtype in list_makers(samples):
        chosen = choose(samples, kind="pass", way=way, dtype=dtype, program="verify", length=length)
        counts = sorted({one["rows"] for one in chosen})
        times = [read_times(chosen, rows=count) for count in counts]
        ends = tuple(map(min, times)), tuple(map(max, times))
        series.append(Series(f"{way} {dtype}", tuple(counts), tuple(map(median, times)), *ends))
    for dtype in dict.fromkeys(dtype for _, dtype in list_makers(samples)):
        works = sorted(
            choose(samples, kind="work", dtype=dtype, program="verify", length=length), key=lambda one: one["rows"]
        )
        bounds = tuple(map(peak.bound_ms, works))
        series.append(Series(f"roofline {dtype}", tuple(one["rows"] for one in works), bounds))
    title = f"One verification against its rows (K + 1), {length} positions"
    return Chart(f"rows_{length}", title, "rows", "ms", tuple(series), "line", log_x=True, log_y=True)


def make_figures(passes: Sequence[Sample]) -> dict[str, float]:
    """Such as "float32_256_verify_16": PyTorch's time over ours; "flat_…": ours at most rows over ours at one."""
    figures = {}
    for dtype in dict.fromkeys(dtype for _, dtype in list_makers(passes)):
        for length in sorted({one["length"] for one in passes}):
            ours = choose(passes, way=BUNDLE, dtype=dtype, length=length)
            for program, rows in list_places(ours):
                if (TORCH, dtype) in list_makers(passes):
                    ratio = compare(passes, dtype, length=length, program=program, rows=rows)
                    figures[f"{dtype}_{length}_{program}_{rows}"] = ratio.value
            verified = [rows for program, rows in list_places(ours) if program == "verify"]
            least, most = (read_times(ours, program="verify", rows=of(verified)) for of in (min, max))
            figures[f"flat_{dtype}_{length}"] = median(most) / median(least)
    return figures
