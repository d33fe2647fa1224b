"""What starts say: how long every way takes, of what phases that is made, and how it grows with the grid."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_aot.benchmarks.estimates import Estimate, choose, estimate_ratio, median, pair_up
from dflash_aot.benchmarks.findings import Chart, Findings, Series, Table, format_figure, format_range

BUNDLE, WARM, COLD = WAYS = ("bundle", "jax.jit, cache warm", "jax.jit, cold")
# What is ready at the first token: all programs that the grid serves, or those that this request needs.
SCOPES = {"grid": "whole grid", "request": "first request"}
Sample = Mapping[str, Any]
MOST_SHOWN = 7  # phases in a chart; the rest is one


def describe_starts(samples: Sequence[Sample]) -> Findings:
    """Of the smallest grid, which all ways start; of the others, bundles only."""
    compared = choose(samples, grid=samples[0]["grid"])
    tables, charts = [tabulate_ways(compared)], []
    for scope in SCOPES:
        typical = find_typical(compared, scope)
        tables.append(tabulate_phases(typical, scope))
        charts.append(draw_phases(typical, scope))
    if len(list_grids(samples)) > 1:
        tables.append(tabulate_growth(samples))
        charts.append(draw_growth(samples))
    return Findings(tuple(tables), tuple(charts), make_figures(samples))


def list_grids(samples: Sequence[Sample]) -> list[int]:
    """In the order that they were started in."""
    return list(dict.fromkeys(one["grid"] for one in samples))


def compare(samples: Sequence[Sample], above: Mapping[str, Any], below: Mapping[str, Any]) -> Estimate:
    """How many times as long the starts of `above` took, repeat by repeat."""
    return estimate_ratio(*pair_up(samples, "seconds", ["repeat"], above, below))


def format_ratio(ratio: Estimate) -> str:
    return f"{format_figure(ratio.value)} ({format_range(ratio.low, ratio.high)})"


def tabulate_ways(samples: Sequence[Sample]) -> Table:
    """Every way, with all that it was started under."""
    rows = []
    for scope, files in dict.fromkeys((one["scope"], one["files"]) for one in samples):
        same = {"scope": scope, "files": files}
        for way in WAYS:
            chosen = choose(samples, way=way, **same)
            seconds = [one["seconds"] for one in chosen]
            ratio = compare(samples, {"way": way, **same}, {"way": BUNDLE, **same})
            rows.append(
                (
                    way,
                    SCOPES[scope],
                    f"{files}, {median([one['cached'] for one in chosen]):.0%}",
                    format_figure(median(seconds)),
                    format_range(min(seconds), max(seconds)),
                    "1" if way == BUNDLE else format_ratio(ratio),
                    format_figure(median([one["last_seconds"] for one in chosen])),
                    f"{chosen[0]['ready']} of {chosen[0]['executables']}",
                )
            )
    names = ("way", "ready at the first token", "files in page cache", "first token s", "least-most", "x bundle")
    return Table(
        "ways",
        "From process start to first token",
        (*names, f"token {len(samples[0]['token_ids'])} s", "executables called"),
        tuple(rows),
        "Medians; ratios repeat by repeat, with 95 % intervals. Files: of the bundle, the checkpoints and JAX's cache, "
        "and how much of them the kernel held; the interpreter and its packages were always there. The prompt is token "
        "ids: nobody loads a tokenizer.",
    )


def find_typical(samples: Sequence[Sample], scope: str) -> dict[str, Sample]:
    """Of each way the start in the middle, files in the page cache: unlike medians of phases, its phases add up."""
    typical = {}
    for way in WAYS:
        chosen = sorted(choose(samples, way=way, scope=scope, files="warm"), key=lambda one: one["seconds"])
        typical[way] = chosen[(len(chosen) - 1) // 2]
    return typical


def list_phases(typical: Mapping[str, Sample]) -> list[str]:
    """As they follow each other, the last one last."""
    names = dict.fromkeys(name for one in typical.values() for name in one["phases"])
    last = [*typical[BUNDLE]["phases"]][-1]
    return [*(name for name in names if name != last), last]


def tabulate_phases(typical: Mapping[str, Sample], scope: str) -> Table:
    def cells(values: Sequence[float | None]) -> tuple[str, ...]:
        return tuple("" if value is None else f"{value:.3f}" for value in values)

    rows = [(name, *cells([one["phases"].get(name) for one in typical.values()])) for name in list_phases(typical)]
    rows.append(("together", *cells([one["seconds"] for one in typical.values()])))
    return Table(
        f"phases_{scope}",
        f"Phases in seconds; ready at the first token: {SCOPES[scope]}",
        ("phase", *typical),
        tuple(rows),
        "Of each way the start of median length; files in the page cache.",
    )


def draw_phases(typical: Mapping[str, Sample], scope: str) -> Chart:
    phases, names = [one["phases"] for one in typical.values()], list_phases(typical)
    largest = sorted(names, key=lambda name: -max(one.get(name, 0.0) for one in phases))[:MOST_SHOWN]
    shown = {name: [name] for name in names if name in largest}
    if rest := [name for name in names if name not in largest]:
        shown["rest"] = rest
    series = (
        Series(label, tuple(typical), tuple(sum(one.get(name, 0.0) for name in parts) for one in phases))
        for label, parts in shown.items()
    )
    title = f"Process start to first token; ready then: {SCOPES[scope]}"
    return Chart(f"start_{scope}", title, "", "seconds", tuple(series), "stack")


def tabulate_growth(samples: Sequence[Sample]) -> Table:
    """Of bundles, files in the page cache."""
    grids, rows = list_grids(samples), []
    for grid in grids:
        same = {"way": BUNDLE, "files": "warm"}
        facts = choose(samples, grid=grid)[0]
        cells = [f"{facts['executables']}", f"{facts['bundle_bytes'] / 1e6:.1f}"]
        for scope in SCOPES:
            chosen = choose(samples, grid=grid, scope=scope, **same)
            ratio = compare(samples, {"grid": grid, "scope": scope, **same}, {"grid": grids[0], "scope": scope, **same})
            cells += [format_figure(median([one["seconds"] for one in chosen])), f"{chosen[0]['ready']}"]
            cells.append("1" if grid == grids[0] else format_ratio(ratio))
        rows.append(tuple(cells))
    return Table(
        "growth",
        "Start-up of a bundle by the size of its grid",
        ("executables", "MB", *(cell for name in SCOPES.values() for cell in (f"{name} s", "called", "x smallest"))),
        tuple(rows),
        "Process start to first token, medians; ratios repeat by repeat, with 95 % intervals; files in the page cache.",
    )


def draw_growth(samples: Sequence[Sample]) -> Chart:
    series = []
    for scope, label in SCOPES.items():
        found = [choose(samples, grid=grid, scope=scope, way=BUNDLE, files="warm") for grid in list_grids(samples)]
        times = [[one["seconds"] for one in chosen] for chosen in found]
        counts = tuple(chosen[0]["executables"] for chosen in found)
        ends = tuple(map(min, times)), tuple(map(max, times))
        series.append(Series(label, counts, tuple(map(median, times)), *ends))
    return Chart("sizes", "Start-up of a bundle by the size of its grid", "executables", "seconds", tuple(series))


def make_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Files in the page cache; "grid_cold_ratio": how many times as long as the bundle, the whole grid ready."""
    grids, figures = list_grids(samples), {}
    for scope in SCOPES:
        same = {"scope": scope, "files": "warm"}
        bundle = {"way": BUNDLE, "grid": grids[0], **same}
        figures[f"{scope}_seconds"] = median([one["seconds"] for one in choose(samples, **bundle)])
        for name, way in (("warm", WARM), ("cold", COLD)):
            figures[f"{scope}_{name}_ratio"] = compare(samples, {"way": way, **same}, bundle).value
        if len(grids) > 1:
            figures[f"{scope}_growth"] = compare(samples, {**bundle, "grid": grids[-1]}, bundle).value
    return figures
