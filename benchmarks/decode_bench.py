"""dflash-bench decode: tokens per second at every K, at a chosen K, in the plain `jax.jit` loop and in PyTorch.

One prompt at a time. Contenders take turns prompt by prompt, in another order each time. All float32 contenders must
give the same tokens, unless --temperature makes the engine draw them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dflash_aot.benchmarks import contenders, messages, tables
from dflash_aot.benchmarks.contenders import BenchmarkPair, Contender, Workers, ask_in_turn
from dflash_aot.benchmarks.messages import FixedOrChosen, Prompts
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.benchmarks.tables import Samples, choose, group_by
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.target import read_target

PLAIN = "engine, K = 0"
BASES = PLAIN, "engine, int8, K = 0", "PyTorch float32", "llama.cpp"  # of ratios
# Looked-up tokens, as in transformers' documentation; of 3, 7 and 10 the number with the fewest passes.
LOOKUP_TOKENS = 10
# Share of the layers that draft; of 0.25, 0.5 and 0.75 the best on the embedded pair.
EARLY_EXIT = 0.75


@dataclass(frozen=True)
class Settings(contenders.PromptSettings):
    """Flags of `dflash-bench decode`."""

    repeats: int = setting(3, "times that every contender answers every prompt", least=1)
    torch: bool = setting(True, "also measure PyTorch")
    assisted: bool = setting(True, "also measure PyTorch's own ways to speculate")
    bfloat16: bool = setting(False, "also measure the engine on a bfloat16 bundle")
    int8: bool = setting(False, "also measure the engine on a bundle of int8 weights")
    llama_cpp: str | None = setting(None, "also measure llama.cpp on this GGUF file of the target")
    temperature: float = setting(0.0, "above 0 the engine alone is measured", least=0)


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """An "answer" for each contender, prompt and repeat."""
    pair = contenders.choose_pair(settings, scratch)
    bundle = contenders.ensure_bundle(pair, settings.buckets, "float32", scratch, note)
    prompts = contenders.choose_turns(settings, pair, bundle)
    grid = read_manifest(bundle).grid
    longest = max(map(len, prompts))
    length = longest + settings.max_tokens
    # Raises if the grid is too short: otherwise the last rounds would be cut short.
    grid.fit(1, length + grid.k[-1], grid.k[-1])
    entrants = list_engines(bundle, grid)
    greedy = settings.temperature == 0
    if greedy:
        entrants.append(contenders.jit_contender(bundle, grid.k[-1], longest))
    also: dict[contenders.Arithmetic, bool] = {"bfloat16": settings.bfloat16, "int8": settings.int8}
    for weights in (name for name, is_chosen in also.items() if is_chosen):
        rounded = contenders.ensure_bundle(pair, settings.buckets, weights, scratch, note)
        for one in list_engines(rounded, grid):
            name = one.name.replace("engine", f"engine, {weights}")
            entrants.append(replace(one, name=name, dtype=weights))
    if settings.llama_cpp and greedy:
        entrants.append(contenders.llama_contender(settings.llama_cpp, length))
    if settings.torch and greedy:
        entrants += list_torch(pair, settings.assisted)
    entrants = [replace(one, sampled=not greedy) for one in entrants]
    with contenders.open_contenders(entrants, note) as workers:
        yield from take_answers(workers, prompts, settings, note)


def list_engines(bundle: Path, grid: Grid) -> list[Contender]:
    """The engine at each K, and with K chosen while running."""
    ks: list[FixedOrChosen] = [*grid.k, contenders.CHOSEN] if grid.k[-1] else [*grid.k]
    return [contenders.engine_contender(bundle, k) for k in ks]


def list_torch(pair: BenchmarkPair, assisted: bool) -> list[Contender]:
    """Greedy `generate`; with `assisted` also its speculation without other weights. Raises BadInput."""
    target = str(pair.target)
    specs = {
        "float32": messages.TorchSpec(target, "float32"),
        "bfloat16": messages.TorchSpec(target, "bfloat16"),
    }
    if assisted:
        layers = read_target(read_config(pair.target)).decoder.layers
        exit_layer = max(1, int(EARLY_EXIT * layers))
        specs |= {
            "float32, prompt lookup": messages.TorchSpec(target, "float32", LOOKUP_TOKENS),
            "float32, early exit": messages.TorchSpec(target, "float32", exit_layer=exit_layer),
            "bfloat16, prompt lookup": messages.TorchSpec(target, "bfloat16", LOOKUP_TOKENS),
        }
    return [contenders.torch_contender(f"PyTorch {name}", spec) for name, spec in specs.items()]


def take_answers(
    workers: Workers, prompts: Prompts, settings: Settings, note: ProgressNote
) -> Iterator[Sample]:
    """Every contender's answer to each prompt, `repeats` times."""

    def ask(prompt: messages.PromptIds) -> messages.Serve:
        return messages.Serve([prompt], settings.max_tokens, temperature=settings.temperature)

    list(ask_in_turn(workers, ask(prompts[0]), 0))  # warm-up
    for repeat in range(settings.repeats):
        note(f"repeat {repeat + 1} of {settings.repeats}")
        for number, prompt in enumerate(prompts):
            for contender, served in ask_in_turn(workers, ask(prompt), number + repeat):
                yield make_answer(contender, served) | {"prompt": number, "repeat": repeat}


def make_answer(contender: Contender, served: messages.Served) -> Sample:
    """gaps_us: microseconds from each token to the next one, and from the prompt to the first token."""
    (answer,) = served.answers
    at = [0, *(round(1e6 * seconds) for seconds in answer.arrivals)]
    return {
        "kind": "answer",
        "way": contender.name,
        "k": contender.k,
        "exact": contender.exact,
        "tokens": contenders.hash_tokens(answer.token_ids),
        # Rounded so that their sums are exact.
        "gaps_us": [later - earlier for earlier, later in itertools.pairwise(at)],
        "accepted": answer.accepted,
        "passes": len(answer.accepted) or served.work.rounds,
        **msgspec.to_builtins(served.work),
    }


def find_fault(samples: Sequence[Sample]) -> str:
    """Contenders that disagree on tokens, or that compiled while serving."""
    answers = contenders.list_answers(choose(samples, exact=True))
    return contenders.find_faults(answers, samples)


def make_findings(record: Record) -> tables.Findings:
    """Speed and acceptance."""
    answers = []
    for one in record.samples:
        start, *later = one["gaps_us"]
        seconds = sum(later) / len(later) / 1e6  # times and speed leave out the first token
        times = {"first_us": start, "token_seconds": seconds, "speed": 1 / seconds}
        answers.append(one | times)
    runs = {name: chosen for (name,), chosen in group_by(answers, "way").items()}
    fixed = [one for name, one in runs.items() if name.startswith("engine") and one[0]["k"]]
    charts = (chart_positions(fixed),) if fixed else ()
    return tables.Findings((tabulate_speed(answers, runs),), charts)


def tabulate_speed(answers: Samples, runs: Mapping[str, Samples]) -> tables.Table:
    """A row for each contender: how fast, compared with others, time to the first token, same tokens."""
    first = next(iter(runs.values()))  # exact, unless the answers are sampled
    reference = {one["prompt"]: one["tokens"] for one in first}

    def ratio_to(base: str) -> tables.Column:
        def format_ratio(row: Samples) -> str:
            sides = {"way": base}, {"way": row[0]["way"]}
            return tables.format_ratio(answers, "token_seconds", ("prompt", "repeat"), *sides)

        return f"x {base}", format_ratio

    def format_tau(row: Samples) -> str:
        accepted = tables.collect(row, "accepted")
        return f"{1 + sum(accepted) / len(accepted):.2f}" if accepted else ""

    def count_same(row: Samples) -> str:
        different = {one["prompt"] for one in row if one["tokens"] != reference[one["prompt"]]}
        return f"{len(reference) - len(different)}/{len(reference)}"

    columns = [
        tables.label("contender", "way"),
        tables.percentile_column("tokens/s", "speed"),
        *(ratio_to(base) for base in BASES if base in runs),
        ("τ", format_tau),
        tables.percentile_column("first token ms", "first_us", scale=1e-3),
    ]
    if first[0]["exact"]:
        columns.append(("same tokens", count_same))
    note = (
        f"Prompts: {len(reference)}, one at a time; repeats: {len(first) // len(reference)}; tokens per answer: "
        f"{len(first[0]['gaps_us'])}. Medians; the speed leaves out the first token. τ: 1 + accepted drafted tokens "
        "per round."
    )
    return tables.make_table("How fast tokens come", runs.values(), columns, note)


def chart_positions(runs: Sequence[Samples]) -> tables.Chart:
    """A line for each K: the share of rounds that accept at least so many drafted tokens."""
    lines = []
    for samples in runs:
        accepted = tables.collect(samples, "accepted")
        places = range(1, samples[0]["k"] + 1)
        shares = (sum(one >= place for one in accepted) / len(accepted) for place in places)
        lines.append(tables.Series(samples[0]["way"], tuple(places), tuple(shares)))
    labels = "position in the block", "share of rounds that accept it"
    return tables.Chart("acceptance-by-position", "Acceptance", *labels, tuple(lines))
