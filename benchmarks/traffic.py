"""Callers in closed loops: each has a list of prompts and sends the next one when the one before is answered."""

import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.counters import Counters

Prompt = list[int]
SETTLED = 0.02  # seconds in which an engine with nothing to do counts no further round


@dataclass(frozen=True)
class Answer:
    """What one caller got for one prompt, and when, in seconds since it was sent."""

    token_ids: tuple[int, ...]
    first_seconds: float
    seconds: float

    @property
    def seconds_per_token(self) -> float:
        """Behind the first token."""
        return (self.seconds - self.first_seconds) / (len(self.token_ids) - 1)


@dataclass(frozen=True)
class Served:
    """One run of all callers. answers: by caller, in the order of its list.

    seconds: from the first prompt sent to the last answer. host_seconds: work of the thread that dispatches.
    rows: those that the rounds computed; padded_rows: of these, without a request; row_rounds: whose verdict counted.
    """

    answers: list[list[Answer]]
    seconds: float
    rounds: int
    rows: int
    row_rounds: int
    padded_rows: int
    host_seconds: float
    compile_events: int


def serve_engine(engine: Engine, lists: Sequence[Sequence[Prompt]], tokens: int) -> Served:
    """One thread per caller."""
    before, began = settle(engine), time.perf_counter()
    with ThreadPoolExecutor(len(lists)) as callers:
        answers = list(callers.map(partial(ask_in_turn, engine, tokens=tokens), lists))
    seconds, after = time.perf_counter() - began, settle(engine)
    return Served(
        answers=answers,
        seconds=seconds,
        rounds=after.rounds - before.rounds,
        rows=_count_rows(after) - _count_rows(before),
        row_rounds=after.row_rounds - before.row_rounds,
        padded_rows=after.padded_rows - before.padded_rows,
        host_seconds=after.host_seconds - before.host_seconds,
        compile_events=after.compile_events - before.compile_events,
    )


def ask_in_turn(engine: Engine, prompts: Iterable[Prompt], tokens: int) -> list[Answer]:
    """One caller."""
    results = (engine.generate(prompt, make_params(tokens)) for prompt in prompts)
    return [Answer(tuple(one.token_ids), one.first_token_seconds or 0.0, one.seconds) for one in results]


def make_params(tokens: int) -> SamplingParams:
    """Greedy, and as many tokens as asked for: no text ends the run of one way earlier."""
    return SamplingParams(max_tokens=tokens, stop_token_ids=())


def settle(engine: Engine) -> Counters:
    """What was counted, once nothing is on its way."""
    while True:
        earlier = engine.stats()
        time.sleep(SETTLED)
        if (now := engine.stats()).rounds == earlier.rounds and not now.running + now.waiting:
            return now


def _count_rows(counters: Counters) -> int:
    return sum(bucket.batch * rounds for (bucket, _), rounds in counters.bucket_rounds.items())


def deal(prompts: Sequence[Prompt], callers: int) -> list[list[Prompt]]:
    """A list for each caller, all prompts used once."""
    return [list(prompts[caller::callers]) for caller in range(callers)]


def gather(lists: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The answers in the order that the prompts had before `deal`."""
    longest = max(map(len, lists))
    return [answers[turn] for turn in range(longest) for answers in lists if turn < len(answers)]


def percentile(values: Sequence[float], share: float) -> float:
    """Between two values as NumPy does: linearly."""
    return float(np.percentile(values, share))


def build_bundle(path: str, buckets: str, *flags: str) -> str:
    """A bundle of greedy executables for this machine; of the embedded pair, unless `flags` name another."""
    command = [sys.executable, "-m", "dflash_aot.bin.precompile", "--bundle", path, "--buckets", buckets]
    subprocess.run([*command, "--sampling", "greedy", "--json", *flags], check=True, stdout=subprocess.DEVNULL)
    return path
