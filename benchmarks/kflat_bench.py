"""dflash-bench kflat: does the time of a target forward pass stay flat as K grows? With PyTorch and the roofline.

A pass is a verification of K + 1 rows or a chunk of a prompt. The roofline is computed from the best bandwidth and
arithmetic that any contender reached in the same run. Contenders take turns, each in a process of its own, on the same
kv and weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_aot.benchmarks import contenders, messages, tables
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.tables import Estimate, Samples, choose, estimate_ratio, group_by, median
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.grid import Grid, make_grid
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.compile.analysis.roofline import Roofline

PEAK_CALLS = 3
BUNDLE, TORCH = "bundle", "PyTorch"
PROGRAM_NAMES = {"verify": "verification", "prefill": "prompt chunk"}
RATES = "bytes_per_second", "flops_per_second"


@dataclass(frozen=True)
class Settings(contenders.PairSettings):
    """Flags of `dflash-bench kflat`."""

    length: tuple[int, ...] = setting(
        (256, 1024), "kv positions attended to, including the rows themselves", least=2
    )
    k: tuple[int, ...] = setting(
        (), "of verifications; default: 0, 1, 3, 7 … up to the draft's block"
    )
    prefill: tuple[int, ...] = setting((64, 128, 256), "rows of prompt chunks", least=1)
    calls: int = setting(
        3, "calls of a pass in each turn; the first call of a turn is counted separately", least=2
    )
    repeats: int = setting(5, "turns of each pass", least=1)
    torch: bool = setting(True, "also measure PyTorch")
    bfloat16: bool = setting(True, "also measure bfloat16")


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """The "work" of each pass; then, in each repeat, a "pass" of each contender, and its "peaks"."""
    pair = contenders.choose_pair(settings, scratch)
    target = read_target(read_config(pair.target))
    grid = choose_grid(settings, read_draft(read_config(pair.draft), target).block)
    text = np.random.default_rng(7).integers(0, target.decoder.vocab, grid.capacity).tolist()
    dtypes: tuple[messages.TorchDtype, ...] = (
        ("float32", "bfloat16") if settings.bfloat16 else ("float32",)
    )
    bundles = {
        dtype: contenders.ensure_bundle(pair, str(grid), dtype, scratch, note) for dtype in dtypes
    }
    for bundle in bundles.values():
        yield from list_work(read_manifest(bundle))
    entrants = list_contenders(pair, bundles, text, settings.torch)
    with ExitStack() as stack:
        workers = contenders.open_contenders(entrants, stack, note)
        for _ in take_passes(workers, grid, 1):  # warm-up
            pass
        for repeat in range(settings.repeats):
            note(f"repeat {repeat + 1} of {settings.repeats}")
            for sample in (*take_passes(workers, grid, settings.calls), *take_peaks(workers)):
                yield sample | {"repeat": repeat}


def choose_grid(settings: Settings, block: int) -> Grid:
    """A grid of one row; without --k, Ks up to the draft's block. Raises BadInput."""
    ks = settings.k or tuple(2**power - 1 for power in range(block.bit_length()))
    axes = {"batch": (1,), "length": settings.length, "k": ks, "prefill": settings.prefill}
    return make_grid(axes, block, "--length, --k and --prefill")


def list_passes(grid: Grid) -> list[tuple[str, int, int]]:
    """Program, rows and length of each pass."""
    verified = [("verify", one.k + 1, one.length) for one in grid.buckets()]
    return verified + [("prefill", one.prefill, one.length) for one in grid.chunks()]


def list_work(manifest: Manifest) -> Iterator[Sample]:
    """Bytes and operations of each pass, from the roofline model."""
    roofline = Roofline(
        manifest.target.facts,
        manifest.draft.facts,
        manifest.dtype,
        manifest.grid,
        formats=manifest.formats,
    )
    for signature in (entry.signature for entry in manifest.entries):
        if signature.program in PROGRAM_NAMES:
            work = roofline.cost(signature)
            sizes = signature.bucket
            rows = sizes["prefill"] if signature.program == "prefill" else sizes["k"] + 1
            facts: Sample = {"program": signature.program, "rows": rows, "length": sizes["length"]}
            facts |= {"bytes": work.bytes, "flops": work.flops, "dtype": manifest.dtype}
            yield facts | {"kind": "work", "way": "roofline"}


def list_contenders(
    pair: contenders.BenchmarkPair,
    bundles: Mapping[messages.TorchDtype, Path],
    text: list[int],
    torch: bool,
) -> list[contenders.Contender]:
    """Bundles, and PyTorch in the same dtypes. Raises BadInput where PyTorch is not installed."""
    target = str(pair.target)
    draft = str(pair.draft)
    entrants = []
    for dtype, bundle in bundles.items():
        spec = messages.BundleForwardSpec(str(bundle), target, draft, text)
        entrants.append(
            contenders.Contender(BUNDLE, "forward_worker", spec, dtype == "float32", dtype=dtype)
        )
    if torch:
        contenders.check_torch()
        for dtype in bundles:
            torch_spec = messages.TorchForwardSpec(target, dtype, text)
            entrants.append(
                contenders.Contender(
                    TORCH, "torch_worker", torch_spec, dtype == "float32", dtype=dtype
                )
            )
    return entrants


def take_passes(workers: contenders.Workers, grid: Grid, calls: int) -> Iterator[Sample]:
    """Every pass of every contender. first_us: of the first call of a turn; us: of later calls."""
    for number, (program, rows, length) in enumerate(list_passes(grid)):
        for one, worker in workers:
            found = worker.ask(
                messages.RunForward(program, rows, length, calls), messages.ForwardSeconds
            )
            start, *later = (round(1e6 * seconds, 1) for seconds in found.seconds)
            facts = {
                "kind": "pass",
                "way": one.name,
                "dtype": one.dtype,
                "prompt": number,
                "exact": one.exact,
            }
            place = {
                "program": program,
                "rows": rows,
                "length": length,
                "first_us": start,
                "us": later,
            }
            yield facts | place | {"tokens": contenders.hash_tokens(found.token_ids)}


def take_peaks(workers: contenders.Workers) -> Iterator[Sample]:
    """Peak rates that each contender reaches."""
    for one, worker in workers:
        rates = worker.ask(messages.MeasurePeaks(PEAK_CALLS), messages.PeakRates)
        values = {name: [round(rate) for rate in getattr(rates, name)] for name in RATES}
        yield {"kind": "peaks", "way": one.name, "dtype": one.dtype, **values}


def find_fault(samples: Sequence[Sample]) -> str:
    """Exact contenders that choose different tokens."""
    return contenders.find_disagreement(choose(samples, kind="pass"))


@dataclass(frozen=True)
class MachinePeak:
    """The best rates of any contender; operations per second by dtype."""

    bytes_per_second: float
    flops_per_second: Mapping[str, float]

    def bound_ms(self, work: Mapping[str, Any]) -> float:
        """Roofline time of a pass."""
        flops = self.flops_per_second[work["dtype"]]
        return 1e3 * max(work["bytes"] / self.bytes_per_second, work["flops"] / flops)


def find_peak(samples: Samples) -> MachinePeak:
    """bfloat16 counts as at least as fast as float32, because it can be computed in float32."""
    peaks = choose(samples, kind="peaks")
    flops = {
        dtype: max(max(one["flops_per_second"]) for one in chosen)
        for (dtype,), chosen in group_by(peaks, "dtype").items()
    }
    if "bfloat16" in flops:
        flops["bfloat16"] = max(flops.values())
    return MachinePeak(max(max(one["bytes_per_second"]) for one in peaks), flops)


def make_findings(record: Record) -> tables.Findings:
    """A chart for every length, and a table for the longest."""
    peak = find_peak(record.samples)
    passes = choose(record.samples, kind="pass")
    works = [{**one, "bound_ms": peak.bound_ms(one)} for one in choose(record.samples, kind="work")]
    lengths = sorted({one["length"] for one in passes})
    table = tabulate_passes(choose(passes, length=lengths[-1]))
    charts = [
        chart_passes(choose(passes, length=length), choose(works, length=length))
        for length in lengths
    ]
    return tables.Findings((table,), tuple(charts))


def compare_torch(passes: Samples, dtype: str) -> Estimate | None:
    """Time of PyTorch over time of the bundle: medians of each repeat, pair by pair."""
    sides = []
    for name in (TORCH, BUNDLE):
        chosen = choose(passes, way=name, dtype=dtype)
        sides.append([median(one["us"]) for one in sorted(chosen, key=lambda one: one["repeat"])])
    return estimate_ratio(*sides) if all(sides) else None


def tabulate_passes(passes: Samples) -> tables.Table:
    """All passes of one length."""
    entrants = group_by(passes, "way", "dtype")
    columns = [
        tables.Column(
            "pass", lambda rows: [PROGRAM_NAMES[rows[0]["program"]]], tables.first, show=str
        ),
        tables.label("rows", "rows"),
    ]
    for (dtype,) in group_by(passes, "dtype"):
        columns.append(
            tables.Column(
                f"{BUNDLE} {dtype} ms",
                tables.pick("us", kind="pass", way=BUNDLE, dtype=dtype),
                scale=1e-3,
            )
        )
        if (TORCH, dtype) in entrants:
            columns.append(
                tables.ratio_column(
                    f"{TORCH} / {BUNDLE}, {dtype}", partial(compare_torch, dtype=dtype)
                )
            )
    rows = group_by(passes, "program", "rows").values()
    length = passes[0]["length"]
    title = f"One pass of the target over its last rows, {length} positions seen"
    note = (
        "Medians. A verification chooses a token after every row, a prompt chunk after its last row. Roofline, in the "
        "charts: every weight and all kv read once, at the best bandwidth and arithmetic of this run."
    )
    return tables.make_table(f"passes_{length}", title, rows, columns, note)


def chart_passes(passes: Samples, works: Samples) -> tables.Chart:
    """Verifications of one length, by rows."""
    series = []
    for (name, dtype), chosen in group_by(choose(passes, program="verify"), "way", "dtype").items():
        times = {
            rows: [us / 1e3 for one in some for us in one["us"]]
            for (rows,), some in sorted(group_by(chosen, "rows").items())
        }
        series.append(tables.make_series(f"{name} {dtype}", times))
    for (dtype,) in group_by(passes, "dtype"):
        chosen = sorted(choose(works, dtype=dtype, program="verify"), key=lambda one: one["rows"])
        bounds = tuple(one["bound_ms"] for one in chosen)
        series.append(
            tables.Series(f"roofline {dtype}", tuple(one["rows"] for one in chosen), bounds)
        )
    length = passes[0]["length"]
    title = f"One verification against its rows (K + 1), {length} positions"
    return tables.Chart(
        f"rows_{length}", title, "rows", "ms", tuple(series), "line", log_x=True, log_y=True
    )
