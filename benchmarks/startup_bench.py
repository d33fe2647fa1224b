"""dflash-bench startup: time from process start to first token of a bundle, `jax.jit` cold, and `jax.jit` cached.

All contenders have the same programs, weights and prompt, and take turns; each start is a process of its own. "Cached"
means JAX's persistent compilation cache. Each start is measured with the whole grid ready before the first token, and
with only what the request needs. Bundles of larger grids are started, too.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from dflash_aot.benchmarks import tables
from dflash_aot.benchmarks.contenders import (
    BenchmarkPair,
    PairSettings,
    choose_pair,
    choose_prompts,
    ensure_bundle,
)
from dflash_aot.benchmarks.messages import ask_process
from dflash_aot.benchmarks.prompts import HELD_OUT
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, read_files, setting
from dflash_aot.benchmarks.start import Scope, StartSpec, TimedStart, read_clock
from dflash_aot.benchmarks.tables import Samples, choose, compare, group_by
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.json_process import JsonProcess

# Grids by their approximate number of executables. All have the same state, and the request's own buckets.
GRIDS = {
    10: "batch=1 length=256,1024 k=0,7 prefill=64",
    50: "batch=1 length=256,512,768,1024 k=0,1,3,5,7 prefill=64,256",
    200: "batch=1 length=256,320,384,512,640,768,896,1024 k=0,1,2,3,4,5,7,9,11,13,15 prefill=64,256",
}
PHASE_TOLERANCE = 1e-3  # seconds between the sum of the phases and the whole
BUNDLE, CACHED, COLD = NAMES = ("bundle", "jax.jit, cache warm", "jax.jit, cold")
SCOPES = {"grid": "whole grid", "request": "first request"}  # what is ready at the first token


@dataclass(frozen=True)
class Settings(PairSettings):
    """Flags of `dflash-bench startup`."""

    grids: tuple[int, ...] = setting(
        tuple(GRIDS),
        f"bundles of about so many executables, the first bundle also in jax.jit; of {', '.join(map(str, GRIDS))}",
    )
    repeats: int = setting(5, "starts of each kind", least=1)
    prompt_tokens: int = setting(48, "tokens of the prompt", least=1)
    tokens: int = setting(16, "tokens of the answer", least=2)


@dataclass(frozen=True)
class StartContender:
    """What is started. grid: key of GRIDS."""

    name: str
    spec: StartSpec
    grid: int


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """A sample per start."""
    if not settings.grids or set(settings.grids) - GRIDS.keys():
        raise BadInput(
            f"--grids {','.join(map(str, settings.grids))}: there are {', '.join(map(str, GRIDS))}"
        )
    pair = choose_pair(settings, scratch)
    bundles = {
        grid: ensure_bundle(pair, GRIDS[grid], "float32", scratch, note) for grid in settings.grids
    }
    manifests = {grid: read_manifest(bundle) for grid, bundle in bundles.items()}
    (prompt,) = choose_prompts(HELD_OUT, 1, settings.prompt_tokens, pair)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="jax-cache-") as cache:
        contenders = list(list_contenders(settings, pair, bundles, prompt, cache))
        note("filling JAX's persistent cache")
        run_start(
            next(one.spec for one in contenders if one.name == CACHED and one.spec.scope == "grid")
        )
        for repeat in range(settings.repeats):
            for one in contenders:
                note(
                    f"start {repeat + 1} of {settings.repeats}: {one.name}, {SCOPES[one.spec.scope]}"
                )
                places = (one.spec.bundle, one.spec.target, one.spec.draft, one.spec.cache)
                read_files(Path(place) for place in places if place)
                yield make_sample(one, manifests[one.grid], run_start(one.spec)) | {
                    "repeat": repeat
                }


def list_contenders(
    settings: Settings,
    pair: BenchmarkPair,
    bundles: Mapping[int, Path],
    prompt: list[int],
    cache: str,
) -> Iterator[StartContender]:
    """All kinds of starts in the order of a repeat."""

    def spec(way: Literal["bundle", "jit"], scope: Scope, grid: int, cache: str = "") -> StartSpec:
        places = f"{bundles[grid]}", f"{pair.target}", f"{pair.draft}"
        return StartSpec(way, scope, *places, prompt, settings.tokens, cache)

    smallest, *larger = settings.grids
    for scope in get_args(Scope):
        yield StartContender(BUNDLE, spec("bundle", scope, smallest), smallest)
        yield StartContender(CACHED, spec("jit", scope, smallest, cache), smallest)
        yield StartContender(COLD, spec("jit", scope, smallest), smallest)
    for grid in larger:
        for scope in get_args(Scope):
            yield StartContender(BUNDLE, spec("bundle", scope, grid), grid)


def run_start(spec: StartSpec) -> TimedStart:
    """Starts a process. Raises PeerFailed."""
    timed = msgspec.structs.replace(spec, started=read_clock())
    with JsonProcess("dflash_aot.benchmarks.start") as process:
        return ask_process(process, timed, TimedStart, "a start")


def make_sample(contender: StartContender, manifest: Manifest, start: TimedStart) -> Sample:
    """seconds: to the first token."""
    facts: Sample = {"way": contender.name, "scope": contender.spec.scope}
    facts |= {"grid": contender.grid, "executables": len(manifest.entries)}
    facts |= {
        "bundle_bytes": sum(entry.bytes for entry in manifest.entries),
        "ready": start.executables,
    }
    facts |= {"seconds": start.first, "last_seconds": start.last, "phases": start.phases}
    return facts | {"token_ids": start.token_ids}


def find_fault(samples: Sequence[Sample]) -> str:
    """Tokens that differ, or phases that do not add up to the whole."""
    if len(answers := {tuple(one["token_ids"]) for one in samples}) > 1:
        return (
            f"the contenders do not agree on the tokens: {' and '.join(map(str, sorted(answers)))}"
        )
    for one in samples:
        phases = one["phases"]
        if (
            abs(sum(phases.values()) - one["seconds"]) > PHASE_TOLERANCE
            or min(phases.values()) < -PHASE_TOLERANCE
        ):
            return f"a start of {one['way']} took {one['seconds']} s, and its phases do not add up to that: {phases}"
    return ""


def make_findings(record: Record) -> tables.Findings:
    """The smallest grid in all contenders; larger grids as bundles."""
    samples = [{**one, "MB": one["bundle_bytes"] / 1e6} for one in record.samples]
    compared = choose(samples, grid=samples[0]["grid"])
    page_tables = [tabulate_contenders(compared)]
    charts = []
    for scope in SCOPES:
        charts.append(chart_phases(find_typical(compared, scope), scope))
    if len(group_by(samples, "grid")) > 1:
        page_tables.append(tabulate_growth(samples))
    return tables.Findings(tuple(page_tables), tuple(charts))


def compare_starts(samples: Samples, above: Mapping[str, Any], below: Mapping[str, Any]) -> str:
    """How many times as long the starts of `above` took, repeat by repeat; "1" for the same starts."""
    return (
        "1"
        if above == below
        else tables.format_estimate(compare(samples, "seconds", ["repeat"], above, below))
    )


def tabulate_contenders(samples: Samples) -> tables.Table:
    """Every contender, in all conditions."""

    def times_bundle(rows: Samples) -> list[str]:
        scope = rows[0]["scope"]
        return [
            compare_starts(
                samples, {"way": rows[0]["way"], "scope": scope}, {"way": BUNDLE, "scope": scope}
            )
        ]

    columns = [
        tables.label("contender", "way"),
        tables.label("ready at the first token", "scope", SCOPES.__getitem__),
        tables.Column("first token s", "seconds"),
        tables.Column("x bundle", times_bundle, tables.first, show=str),
    ]
    groups = group_by(samples, "scope", "way")
    rows = [groups[scope, name] for (scope,) in group_by(samples, "scope") for name in NAMES]
    note = "Medians. All files are in the page cache. The prompt is token ids: no contender loads a tokenizer."
    return tables.make_table("ways", "From process start to first token", rows, columns, note)


def find_typical(samples: Samples, scope: str) -> dict[str, Mapping[str, Any]]:
    """The median start of each contender. Its phases add up, unlike medians of phases."""
    typical = {}
    for name in NAMES:
        chosen = sorted(choose(samples, way=name, scope=scope), key=lambda one: one["seconds"])
        typical[name] = chosen[(len(chosen) - 1) // 2]
    return typical


def chart_phases(typical: Mapping[str, Mapping[str, Any]], scope: str) -> tables.Chart:
    """A bar for each contender, made of its phases."""
    names = dict.fromkeys(name for one in typical.values() for name in one["phases"])
    series = (
        tables.Series(
            name, tuple(typical), tuple(one["phases"].get(name, 0.0) for one in typical.values())
        )
        for name in names
    )
    title = f"Process start to first token; ready then: {SCOPES[scope]}"
    return tables.Chart(f"start_{scope}", title, "", "seconds", tuple(series), "stack")


def tabulate_growth(samples: Samples) -> tables.Table:
    """Bundles by the size of their grids."""
    starts = choose(samples, way=BUNDLE)
    smallest = starts[0]["grid"]
    columns = [
        tables.label("executables", "executables"),
        tables.label("MB", "MB", "{:.1f}".format),
    ]
    for scope, name in SCOPES.items():

        def times_smallest(rows: Samples, scope: str = scope) -> list[str]:
            grid = rows[0]["grid"]
            return [
                compare_starts(
                    starts, {"grid": grid, "scope": scope}, {"grid": smallest, "scope": scope}
                )
            ]

        columns += [
            tables.Column(f"{name} s", tables.pick("seconds", scope=scope)),
            tables.Column("x smallest", times_smallest, tables.first, show=str),
        ]
    title = "Start-up of a bundle by the size of its grid"
    note = "From process start to first token; medians."
    return tables.make_table("growth", title, group_by(starts, "grid").values(), columns, note)
