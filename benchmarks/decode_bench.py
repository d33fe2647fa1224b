"""dflash-bench decode: tokens per second at every K, at a chosen K, in the plain `jax.jit` loop and in PyTorch.

One prompt at a time. Contenders take turns prompt by prompt, in another order each time. All float32 contenders must
give the same tokens.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_aot.benchmarks import contenders, messages, tables
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.tables import Samples, choose, compare, group_by
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.grid import Grid

PLAIN = "engine, K = 0"
TORCH = "PyTorch float32"


@dataclass(frozen=True)
class Settings(contenders.PromptSettings):
    """Flags of `dflash-bench decode`."""

    repeats: int = setting(3, "times that every contender answers every prompt", least=1)
    torch: bool = setting(True, "also measure PyTorch")
    assisted: bool = setting(True, "also measure PyTorch's own ways to speculate")
    bfloat16: bool = setting(False, "also measure the engine on a bfloat16 bundle")


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """An "answer" for each contender, prompt and repeat."""
    pair = contenders.choose_pair(settings, scratch)
    bundle = contenders.ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    prompts = contenders.choose_turns(settings, pair, bundle)
    grid = read_manifest(bundle).grid
    longest = max(map(len, prompts))
    # Raises if the grid is too short: otherwise the last rounds would be cut short.
    grid.fit(1, longest + settings.max_tokens + grid.k[-1], grid.k[-1])
    entrants = [
        *list_engines(bundle, pair, grid, "float32"),
        contenders.jit_contender(bundle, pair, grid.k[-1], longest),
    ]
    if settings.bfloat16:
        rounded = contenders.ensure_bundle(pair, settings.buckets, "bfloat16", scratch, note)
        entrants += list_engines(rounded, pair, grid, "bfloat16")
    if settings.torch:
        entrants += contenders.torch_contenders(pair, settings.assisted)
    with ExitStack() as stack:
        workers = contenders.open_contenders(entrants, stack, note)
        yield from take_answers(workers, prompts, settings.max_tokens, settings.repeats, note)


def list_engines(
    bundle: Path, pair: contenders.BenchmarkPair, grid: Grid, dtype: str
) -> list[contenders.Contender]:
    """The engine at each K, and with K chosen while running."""
    fixed = [contenders.engine_contender(bundle, pair, k, dtype) for k in grid.k]
    return (
        [*fixed, contenders.engine_contender(bundle, pair, contenders.CHOSEN, dtype)]
        if grid.k[-1]
        else fixed
    )


def take_answers(
    workers: contenders.Workers,
    prompts: Sequence[messages.PromptIds],
    tokens: int,
    repeats: int,
    note: ProgressNote,
) -> Iterator[Sample]:
    """Every contender's answer to each prompt, `repeats` times."""
    for _, worker in workers:  # warm-up
        worker.ask(messages.ServeClosed([[prompts[0]]], tokens), messages.ServedClosed)
    for repeat in range(repeats):
        note(f"repeat {repeat + 1} of {repeats}")
        for number, prompt in enumerate(prompts):
            for contender, worker in contenders.take_turns(workers, number + repeat):
                served = worker.ask(messages.ServeClosed([[prompt]], tokens), messages.ServedClosed)
                yield make_answer(contender, served) | {"prompt": number, "repeat": repeat}


def make_answer(contender: contenders.Contender, served: messages.ServedClosed) -> Sample:
    """gaps_us: microseconds from each token to the next one, and from the prompt to the first token."""
    ((answer,),) = served.answers
    work = served.work
    at = [0, *(round(1e6 * seconds) for seconds in answer.arrivals)]
    # Rounded so that their sums are exact.
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    facts: Sample = {
        "kind": "answer",
        "way": contender.name,
        "k": contender.k,
        "exact": contender.exact,
    }
    facts |= {"tokens": contenders.hash_tokens(answer.token_ids), "gaps_us": gaps}
    facts |= {
        "accepted": answer.accepted,
        "passes": len(answer.accepted) or work.rounds,
        "rounds": work.rounds,
    }
    return facts | {"compile_events": work.compile_events}


def find_fault(samples: Sequence[Sample]) -> str:
    """Contenders that disagree on tokens, or that compiled while serving."""
    return contenders.find_faults(choose(samples, kind="answer"))


def make_findings(record: Record) -> tables.Findings:
    """Speed and acceptance."""
    answers = [add_times(one) for one in choose(record.samples, kind="answer")]
    runs = {name: chosen for (name,), chosen in group_by(answers, "way").items()}
    fixed = [one for name, one in runs.items() if name.startswith("engine") and one[0]["k"]]
    return tables.Findings((tabulate_speed(runs),), (chart_positions(fixed),) if fixed else ())


def add_times(sample: Mapping[str, Any]) -> Sample:
    """A sample with what the columns need. Times and speed leave out the first token."""
    start, *later = sample["gaps_us"]
    seconds = sum(later) / len(later) / 1e6
    return {
        **sample,
        "first_us": start,
        "token_seconds": seconds,
        "speed": 1 / seconds,
    }


def compute_tau(samples: Samples) -> list[float]:
    """1 + accepted drafted tokens per round, over all rounds; nothing for a contender without rounds."""
    accepted = tables.collect(samples, "accepted")
    return [1 + sum(accepted) / len(accepted)] if accepted else []


def tabulate_speed(runs: Mapping[str, Samples]) -> tables.Table:
    """A row for each contender: how fast, compared with others, time to the first token, same tokens."""
    answers = [one for chosen in runs.values() for one in chosen]
    exact = next(chosen for chosen in runs.values() if chosen[0]["exact"])
    reference = {one["prompt"]: one["tokens"] for one in exact}

    def ratio_to(base: str) -> tables.Column:
        sides = {"way": base}, lambda samples: {"way": samples[0]["way"]}
        keys = ("prompt", "repeat")
        return tables.ratio_column(
            f"x {base}",
            lambda rows: compare(answers, "token_seconds", keys, sides[0], sides[1](rows)),
        )

    def count_same(samples: Samples) -> list[str]:
        different = {one["prompt"] for one in samples if one["tokens"] != reference[one["prompt"]]}
        return [f"{len(reference) - len(different)}/{len(reference)}"]

    columns = [
        tables.label("contender", "way"),
        tables.Column("tokens/s", "speed"),
        *(ratio_to(base) for base in (PLAIN, TORCH) if base in runs),
        tables.Column("τ", compute_tau, tables.first, show="{:.2f}".format),
        tables.Column("first token ms", "first_us", scale=1e-3),
        tables.Column("same tokens", count_same, tables.first, show=str),
    ]
    return tables.make_table(
        "speed", "How fast tokens come", runs.values(), columns, note_speed(runs)
    )


def note_speed(runs: Mapping[str, Samples]) -> str:
    """What was measured, and how to read the table."""
    samples = next(iter(runs.values()))
    prompts = len({one["prompt"] for one in samples})
    tokens = len(samples[0]["gaps_us"])
    return (
        f"Prompts: {prompts}, one at a time; repeats: {len(samples) // prompts}; tokens per answer: {tokens}. "
        "Medians; the speed leaves out the first token. τ: 1 + accepted drafted tokens per round."
    )


def share_from(samples: Samples, count: int) -> float:
    """Share of rounds that accept at least `count` drafted tokens."""
    accepted = tables.collect(samples, "accepted")
    return sum(one >= count for one in accepted) / len(accepted)


def chart_positions(runs: Sequence[Samples]) -> tables.Chart:
    """A line for each K."""
    lines = []
    for samples in runs:
        places = range(1, samples[0]["k"] + 1)
        lines.append(
            tables.Series(
                samples[0]["way"], tuple(places), tuple(share_from(samples, at) for at in places)
            )
        )
    y_label = "share of rounds that accept it"
    return tables.Chart(
        "acceptance-by-position", "Acceptance", "position in the block", y_label, tuple(lines)
    )
