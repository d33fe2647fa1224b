"""dflash-bench structured: tokens per round and time of an answer under JSON schemas of three sizes, at every K.

One prompt at a time in one engine; forms and Ks take turns. Every K must give the same tokens.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_aot.benchmarks import contenders, tables
from dflash_aot.benchmarks.estimates import Samples, choose, compare, group_by
from dflash_aot.benchmarks.prompts import HELD_OUT
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.runtime import Engine, SamplingParams

FREE = "none"


def _make_object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT, LABELS = {"type": "string", "maxLength": 24}, {"type": "array", "items": {"enum": ["low", "mid"]}, "maxItems": 2}
PERSON = _make_object({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "labels": LABELS})
# Properties that an answer must have: 1, 3 and 12 of three kinds, one of them nested.
FORMS: Mapping[str, dict[str, Any] | None] = {
    FREE: None,
    "1 property": _make_object({"name": TEXT}),
    "3 properties": PERSON,
    "12 properties": _make_object({f"part_{n}": (TEXT, {"type": "boolean"}, PERSON)[n % 3] for n in range(6)}),
}


@dataclass(frozen=True)
class Settings(contenders.PairSettings):
    """Flags of `dflash-bench structured`."""

    buckets: str = setting("batch=1 length=512 k=0,7,15 prefill=64", "the grid, as dflash-precompile takes it")
    prompts: int = setting(8, "number of prompts", least=1)
    prompt_tokens: int = setting(32, "tokens of each prompt", least=1)
    max_tokens: int = setting(400, "limit of an answer, more than any document has; 64 without a schema", least=2)
    repeats: int = setting(3, "times that every form and K answers every prompt", least=1)


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """An "answer" for each form, K, prompt and repeat. Raises BadInput, BadCheckpoint, BuildFailed, GridMiss."""
    pair = contenders.choose_pair(settings, scratch)
    prompts = contenders.choose_prompts(HELD_OUT, settings.prompts, settings.prompt_tokens, pair)
    bundle = contenders.ensure_bundle(pair, settings.buckets, "float32", scratch, note, ("greedy", "constrain"))
    with Engine.open(bundle, pair.target, pair.draft, k="auto", prefix_caching=False) as engine:
        for repeat in range(-1, settings.repeats):  # -1: warm-up
            note(f"repeat {repeat + 1} of {settings.repeats}")
            for number, prompt in enumerate(prompts):
                for form, schema in FORMS.items():
                    for k in engine.manifest.grid.k:
                        sample = answer(engine, prompt, schema, k, settings.max_tokens)
                        if repeat >= 0:
                            yield sample | {"form": form, "k": k, "prompt": number, "repeat": repeat}


def answer(engine: Engine, prompt: Sequence[int], schema: dict[str, Any] | None, k: int, most: int) -> Sample:
    """us: microseconds of the whole answer. rounds: without a schema the prefill gives the first token, before them."""
    asked = {"structured_outputs": {"json": schema}} if schema else {"stop_token_ids": ()}
    params = SamplingParams(max_tokens=most if schema else min(64, most), k=k, **asked)
    began = time.perf_counter()
    result = engine.generate(prompt, params)
    seconds = time.perf_counter() - began
    return {
        "kind": "answer",
        "us": 1e6 * seconds,
        "rounds": len(result.accepted),
        "tokens": result.token_ids,
        "finish": result.finish_reason,
    }


def find_fault(samples: Sequence[Sample]) -> str:
    """Answers that depend on K, and documents that did not end."""
    for (form, prompt), group in group_by(samples, "form", "prompt").items():
        if len({tuple(one["tokens"]) for one in group}) > 1:
            return f"prompt {prompt}, {form}: the tokens depend on K"
        if form != FREE and any(one["finish"] != "stop" for one in group):
            return f"prompt {prompt}, {form}: the document did not end, give more --max_tokens"
    return ""


def make_findings(record: Record) -> tables.Findings:
    """Tokens per round, the time of an answer, and that against K = 0 of the same form."""
    samples = choose(record.samples, kind="answer")

    def speed_up(row: Samples) -> Any:
        form, k = row[0]["form"], row[0]["k"]
        keys = ["prompt", "repeat"]
        return compare(samples, "us", keys, {"form": form, "k": 0}, {"form": form, "k": k}) if k else None

    columns = [
        tables.label("schema", "form"),
        tables.label("K", "k"),
        tables.Column("tokens of an answer", lambda row: [len(one["tokens"]) for one in row]),
        tables.Column("tokens per round", count_per_round),
        tables.Column("ms of an answer", "us", scale=1e-3),
        tables.ratio_column("speed-up over K = 0", speed_up),
    ]
    rows = group_by(samples, "form", "k").values()
    return tables.Findings((tables.make_table("forms", "Structured output", rows, columns, NOTE),))


def count_per_round(row: Samples) -> list[float]:
    """Tokens that a round gave, of each answer with rounds."""
    first = int(row[0]["form"] == FREE)
    return [(len(one["tokens"]) - first) / one["rounds"] for one in row if one["rounds"]]


NOTE = (
    "Medians over prompts and repeats; an answer's time includes the prefill. The schema says which properties an "
    "answer has; tokens that it forces are verified without having been drafted by the model. Without a schema: 64 "
    "tokens of plain text."
)
