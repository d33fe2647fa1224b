"""dflash-bench kflat: does the time of a target forward pass stay flat as K grows? With PyTorch and the roofline.

A pass is a verification of K + 1 rows or a chunk of a prompt. The roofline is computed from the best bandwidth and
arithmetic that any contender reached in the same run. Contenders take turns, each in a process of its own, on the same
kv and weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from dflash_aot.benchmarks import contenders, messages, tables
from dflash_aot.benchmarks.contenders import BenchmarkPair, Contender, Workers
from dflash_aot.benchmarks.messages import TorchDtype
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.tables import Samples, choose, group_by, median
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.grid import Grid, make_grid
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.compile.programs.programs import Roofline

PEAK_CALLS = 3
BUNDLE, TORCH = "bundle", "PyTorch"
PROGRAM_NAMES = {"verify": "verification", "prefill": "prompt chunk"}


@dataclass(frozen=True)
class Settings(contenders.PairSettings):
    """Flags of `dflash-bench kflat`."""

    length: tuple[int, ...] = setting((256, 1024), "kv positions, with those of the rows", least=2)
    k: tuple[int, ...] = setting((), "default: 0, 1, 3, 7 … up to the draft's block")
    prefill: tuple[int, ...] = setting((64, 128, 256), "rows of prompt chunks", least=1)
    calls: int = setting(3, "calls in each turn; the first one is counted apart", least=2)
    repeats: int = setting(5, "turns of each pass", least=1)
    torch: bool = setting(True, "also measure PyTorch")
    bfloat16: bool = setting(True, "also measure bfloat16")


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """The "work" of each pass; then, in each repeat, a "pass" of each contender, and its "peaks"."""
    pair = contenders.choose_pair(settings, scratch)
    target = read_target(read_config(pair.target))
    grid = choose_grid(settings, read_draft(read_config(pair.draft), target).verified_block)
    text = np.random.default_rng(7).integers(0, target.decoder.vocab, grid.capacity).tolist()
    dtypes: list[TorchDtype] = ["float32", "bfloat16"] if settings.bfloat16 else ["float32"]
    bundles = {
        dtype: contenders.ensure_bundle(pair, str(grid), dtype, scratch, note) for dtype in dtypes
    }
    for bundle in bundles.values():
        yield from list_work(read_manifest(bundle))
    entrants = list_contenders(pair, bundles, text, settings.torch)
    with contenders.open_contenders(entrants, note) as workers:
        list(take_passes(workers, grid, 1))  # warm-up
        for repeat in range(settings.repeats):
            note(f"repeat {repeat + 1} of {settings.repeats}")
            for sample in take_passes(workers, grid, settings.calls):
                yield sample | {"repeat": repeat}
            for one, worker in workers:
                rates = worker.ask(messages.MeasurePeaks(PEAK_CALLS), messages.PeakRates)
                facts = {"kind": "peaks", "way": one.name, "dtype": one.dtype, "repeat": repeat}
                yield facts | msgspec.to_builtins(rates)


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
    pair = manifest.target.facts, manifest.draft.facts
    roofline = Roofline(*pair, manifest.dtype, manifest.grid, formats=manifest.formats)
    for signature in (entry.signature for entry in manifest.entries):
        if signature.program in PROGRAM_NAMES:
            work = roofline.cost(signature)
            sizes = signature.bucket
            yield {
                "kind": "work",
                "way": "roofline",
                "dtype": manifest.dtype,
                "program": signature.program,
                "rows": sizes["prefill"] if signature.program == "prefill" else sizes["k"] + 1,
                "length": sizes["length"],
                "bytes": work.bytes,
                "flops": work.flops,
            }


def list_contenders(
    pair: BenchmarkPair, bundles: Mapping[TorchDtype, Path], text: list[int], torch: bool
) -> Iterator[Contender]:
    """Bundles, and PyTorch in the same dtypes. Raises BadInput where PyTorch is not installed."""
    target = str(pair.target)
    for dtype, bundle in bundles.items():
        spec = messages.BundleForwardSpec(str(bundle), text)
        yield Contender(BUNDLE, "jit_loop", spec, dtype=dtype)
    for dtype in bundles if torch else ():
        yield contenders.torch_contender(TORCH, messages.TorchSpec(target, dtype, text=text))


def take_passes(workers: Workers, grid: Grid, calls: int) -> Iterator[Sample]:
    """Every pass of every contender. first_us: of the first call of a turn; us: of later calls."""
    for number, (program, rows, length) in enumerate(list_passes(grid)):
        question = messages.RunForward(program, rows, length, calls)
        for one, worker in workers:
            found = worker.ask(question, messages.ForwardSeconds)
            start, *later = (round(1e6 * seconds, 1) for seconds in found.seconds)
            yield {
                "kind": "pass",
                "way": one.name,
                "dtype": one.dtype,
                "program": program,
                "rows": rows,
                "length": length,
                "first_us": start,
                "us": later,
                "prompt": number,
                "exact": one.exact,
                "tokens": contenders.hash_tokens(found.token_ids),
            }


def find_fault(samples: Sequence[Sample]) -> str:
    """Exact contenders that choose different tokens."""
    answers = contenders.list_answers(choose(samples, kind="pass", exact=True))
    return contenders.find_faults(answers, samples)


def make_findings(record: Record) -> tables.Findings:
    """A chart for every length, and a table for the longest."""
    passes = choose(record.samples, kind="pass")
    works = add_bounds(choose(record.samples, kind="work"), choose(record.samples, kind="peaks"))
    lengths = sorted({one["length"] for one in passes})
    table = tabulate_passes(choose(passes, length=lengths[-1]))
    charts = [
        chart_passes(choose(passes, length=length), choose(works, length=length))
        for length in lengths
    ]
    return tables.Findings((table,), tuple(charts))


def add_bounds(works: Samples, peaks: Samples) -> list[Sample]:
    """The work of passes with its roofline time, at the best rates of any contender."""
    bandwidth = max(tables.collect(peaks, "bytes_per_second"))
    flops = {
        dtype: max(tables.collect(chosen, "flops_per_second"))
        for (dtype,), chosen in group_by(peaks, "dtype").items()
    }
    if "bfloat16" in flops:
        flops["bfloat16"] = max(flops.values())  # it can be computed in float32
    bounded = []
    for one in works:
        seconds = max(one["bytes"] / bandwidth, one["flops"] / flops[one["dtype"]])
        bounded.append({**one, "bound_ms": 1e3 * seconds})
    return bounded


def tabulate_passes(passes: Samples) -> tables.Table:
    """All passes of one length. A ratio compares the medians of each repeat."""
    entrants = group_by(passes, "way", "dtype")
    columns = [
        tables.label("pass", "program", PROGRAM_NAMES.__getitem__),
        tables.label("rows", "rows"),
    ]
    for (dtype,) in group_by(passes, "dtype"):
        above = {"way": TORCH, "dtype": dtype}
        below = {"way": BUNDLE, "dtype": dtype}
        columns.append(tables.percentile_column(f"{BUNDLE} {dtype} ms", "us", scale=1e-3, **below))
        if (TORCH, dtype) in entrants:
            format_ratio = partial(
                tables.format_ratio, value="median_us", keys=["repeat"], above=above, below=below
            )
            columns.append((f"{TORCH} / {BUNDLE}, {dtype}", format_ratio))
    timed = [{**one, "median_us": median(one["us"])} for one in passes]
    rows = group_by(timed, "program", "rows").values()
    title = f"One pass of the target over its last rows, {passes[0]['length']} positions seen"
    note = (
        "Medians. A verification chooses a token after every row, a prompt chunk after its last row. Roofline, in the "
        "charts: every weight and all kv read once, at the best bandwidth and arithmetic of this run."
    )
    return tables.make_table(title, rows, columns, note)


def chart_passes(passes: Samples, works: Samples) -> tables.Chart:
    """Verifications of one length, by rows."""
    series = []
    for (name, dtype), chosen in group_by(choose(passes, program="verify"), "way", "dtype").items():
        times = {
            rows: [us / 1e3 for us in tables.collect(some, "us")]
            for (rows,), some in sorted(group_by(chosen, "rows").items())
        }
        series.append(tables.make_series(f"{name} {dtype}", times))
    for (dtype,) in group_by(passes, "dtype"):
        chosen = choose(works, dtype=dtype, program="verify")
        bounds = dict(sorted((one["rows"], one["bound_ms"]) for one in chosen))
        series.append(tables.Series(f"roofline {dtype}", tuple(bounds), tuple(bounds.values())))
    length = passes[0]["length"]
    title = f"One verification against its rows (K + 1), {length} positions"
    return tables.Chart(f"rows_{length}", title, "rows", "ms", tuple(series), log=True)
