"""dflash-bench startup: time from process start to first token of a bundle, `jax.jit` cold, and `jax.jit` cached.

All contenders have the same programs, weights and prompt, and take turns; each start is a process of its own. "Cached"
means JAX's persistent compilation cache. Each start is measured with the whole grid ready before the first token, and
with only what the request needs. Bundles of larger grids are started, too.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec

from dflash_aot.benchmarks import contenders, start, tables
from dflash_aot.benchmarks.contenders import PairSettings, ensure_bundle
from dflash_aot.benchmarks.messages import Worker
from dflash_aot.benchmarks.prompts import HELD_OUT
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, read_files, setting
from dflash_aot.benchmarks.tables import Samples, choose, group_by
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput

# Grids by their approximate number of executables. All have the same state, and the request's own buckets.
GRIDS = {
    10: "batch=1 length=256,1024 k=0,7 prefill=64",
    50: "batch=1 length=256,512,768,1024 k=0,1,3,5,7 prefill=64,256",
    200: "batch=1 length=256,320,384,512,640,768,896,1024 k=0,1,2,3,4,5,7,9,11,13,15 prefill=64,256",
}
WAYS = start.BUNDLE, start.CACHED, start.COLD
SCOPES = {"grid": "whole grid", "request": "first request"}  # what is ready at the first token


@dataclass(frozen=True)
class Settings(PairSettings):
    """Flags of `dflash-bench startup`."""

    grids: tuple[int, ...] = setting(
        tuple(GRIDS), f"bundles of so many executables, of {[*GRIDS]}; the first also in jax.jit"
    )
    repeats: int = setting(5, "starts of each kind", least=1)
    prompt_tokens: int = setting(48, "tokens of the prompt", least=1)
    tokens: int = setting(16, "tokens of the answer", least=2)


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """A sample per start."""
    if not settings.grids or set(settings.grids) - GRIDS.keys():
        given = ",".join(map(str, settings.grids))
        raise BadInput(f"--grids {given}: there are {', '.join(map(str, GRIDS))}")
    pair = contenders.choose_pair(settings, scratch)
    bundles = {
        grid: ensure_bundle(pair, GRIDS[grid], "float32", scratch, note) for grid in settings.grids
    }
    manifests = {grid: read_manifest(bundle) for grid, bundle in bundles.items()}
    (prompt,) = contenders.choose_prompts(HELD_OUT, 1, settings.prompt_tokens, pair)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="jax-cache-") as cache:
        starts = list(list_starts(settings, bundles, prompt, cache))
        note("filling JAX's persistent cache")
        run_start(next(spec for _, spec in starts if spec.way == start.CACHED))
        for repeat in range(settings.repeats):
            for grid, spec in starts:
                note(f"start {repeat + 1} of {settings.repeats}: {spec.way}, {SCOPES[spec.scope]}")
                read_files((Path(spec.bundle), pair.target, pair.draft, Path(cache)))
                entries = manifests[grid].entries
                yield {
                    "way": spec.way,
                    "scope": spec.scope,
                    "grid": grid,
                    "executables": len(entries),
                    "bundle_bytes": sum(entry.bytes for entry in entries),
                    "repeat": repeat,
                    **msgspec.to_builtins(run_start(spec)),
                }


def list_starts(
    settings: Settings, bundles: Mapping[int, Path], prompt: list[int], cache: str
) -> Iterator[tuple[int, start.StartSpec]]:
    """All kinds of starts in the order of a repeat, with their grids; the first of CACHED compiles the whole grid."""
    for grid, bundle in bundles.items():
        for scope in get_args(start.Scope):
            for way in WAYS if grid == settings.grids[0] else (start.BUNDLE,):
                kept = cache if way == start.CACHED else ""
                yield grid, start.StartSpec(str(bundle), way, scope, prompt, settings.tokens, kept)


def run_start(spec: start.StartSpec) -> start.TimedStart:
    """Starts a process. Raises PeerFailed."""
    timed = msgspec.structs.replace(spec, started=start.read_clock())
    with Worker("a start", "dflash_aot.benchmarks.start") as process:
        return process.ask(timed, start.TimedStart)


def find_fault(samples: Sequence[Sample]) -> str:
    """Contenders that disagree on the tokens."""
    answers = [(one["way"], 0, contenders.hash_tokens(one["token_ids"])) for one in samples]
    return contenders.find_faults(answers, samples)


def make_findings(record: Record) -> tables.Findings:
    """The smallest grid in all contenders; larger grids as bundles."""
    samples = [{**one, "MB": one["bundle_bytes"] / 1e6} for one in record.samples]
    compared = choose(samples, grid=samples[0]["grid"])
    page_tables = [tabulate_contenders(compared)]
    if len(group_by(samples, "grid")) > 1:
        page_tables.append(tabulate_growth(choose(samples, way=start.BUNDLE)))
    charts = (chart_phases(compared, scope) for scope in SCOPES)
    return tables.Findings(tuple(page_tables), tuple(charts))


def compare_starts(samples: Samples, base: Mapping[str, Any], row: Samples) -> str:
    """How many times as long the starts of a row took as those of `base`, repeat by repeat; "1" for the same starts."""
    own = {key: row[0][key] for key in base}
    if own == base:
        return "1"
    return tables.format_ratio(samples, "seconds", ["repeat"], own, base)


def tabulate_contenders(samples: Samples) -> tables.Table:
    """Every contender, in all conditions."""

    def times_bundle(row: Samples) -> str:
        return compare_starts(choose(samples, scope=row[0]["scope"]), {"way": start.BUNDLE}, row)

    columns = [
        tables.label("contender", "way"),
        tables.label("ready at the first token", "scope", SCOPES.__getitem__),
        tables.percentile_column("first token s", "seconds"),
        ("x bundle", times_bundle),
    ]
    groups = group_by(samples, "scope", "way")
    rows = [groups[scope, name] for (scope,) in group_by(samples, "scope") for name in WAYS]
    note = "Medians. All files are in the page cache. The prompt is token ids: no contender loads a tokenizer."
    return tables.make_table("From process start to first token", rows, columns, note)


def chart_phases(samples: Samples, scope: str) -> tables.Chart:
    """A bar for each contender: the phases of its median start. They add up, unlike medians of phases."""
    typical: dict[str, Mapping[str, float]] = {}
    for name in WAYS:
        starts = choose(samples, way=name, scope=scope)
        chosen = sorted(starts, key=lambda one: one["seconds"])
        typical[name] = chosen[(len(chosen) - 1) // 2]["phases"]
    names = dict.fromkeys(name for phases in typical.values() for name in phases)
    series = []
    for name in names:
        seconds = tuple(phases.get(name, 0.0) for phases in typical.values())
        series.append(tables.Series(name, tuple(typical), seconds))
    title = f"Process start to first token; ready then: {SCOPES[scope]}"
    return tables.Chart(f"start_{scope}", title, "", "seconds", tuple(series), "stack")


def tabulate_growth(starts: Samples) -> tables.Table:
    """Bundles by the size of their grids."""
    smallest = {"grid": starts[0]["grid"]}
    columns = [
        tables.label("executables", "executables"),
        tables.label("MB", "MB", "{:.1f}".format),
    ]
    for scope, name in SCOPES.items():
        columns += [
            tables.percentile_column(f"{name} s", "seconds", scope=scope),
            ("x smallest", partial(compare_starts, choose(starts, scope=scope), smallest)),
        ]
    title = "Start-up of a bundle by the size of its grid"
    note = "From process start to first token; medians."
    return tables.make_table(title, group_by(starts, "grid").values(), columns, note)
