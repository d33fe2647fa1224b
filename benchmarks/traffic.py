"""What is asked of a way to decode, and what it answers: prompts in lists, one per caller, or at times of their own."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

Prompt = list[int]
T = TypeVar("T")


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Closed loops: each caller has a list of prompts and sends the next one when the one before is answered.

    Every answer is greedy and has `max_tokens` tokens, whatever they are. Answered by Served.
    """

    lists: list[list[Prompt]]
    max_tokens: int


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """An open loop: each prompt is sent at its own time, `due` seconds from the beginning, whatever became of others.

    Answered by Arrived.
    """

    prompts: list[Prompt]
    due: list[float]
    max_tokens: int


class Answer(msgspec.Struct, frozen=True):
    """What one caller got for one prompt.

    arrivals: when it had each token, in seconds since it sent the prompt, or was to send it. accepted: drafted tokens
    that stood, by round; empty where there are no rounds.
    """

    token_ids: list[int]
    arrivals: list[float]
    accepted: list[int] = []

    @property
    def first_seconds(self) -> float:
        return self.arrivals[0]

    @property
    def seconds(self) -> float:
        return self.arrivals[-1]

    @property
    def seconds_per_token(self) -> float:
        """Behind the first token, of at least two."""
        return (self.seconds - self.first_seconds) / (len(self.token_ids) - 1)


class Work(msgspec.Struct, frozen=True):
    """What serving took.

    rounds: passes of the target behind the prompts. rounds_by_k: where a way has Ks. rows: those that the rounds
    computed; padded_rows: of these, without a request; row_rounds: whose verdict counted. host_seconds: work of the
    thread that dispatches; host_wall_seconds: what passed meanwhile, its waits left out.
    """

    rounds: int = 0
    rounds_by_k: dict[int, int] = {}
    rows: int = 0
    row_rounds: int = 0
    padded_rows: int = 0
    host_seconds: float = 0.0
    host_wall_seconds: float = 0.0
    compile_events: int = 0


class Served(msgspec.Struct, frozen=True):
    """answers: by caller, in the order of its list. seconds: from the first prompt sent to the last token."""

    answers: list[list[Answer]]
    seconds: float
    work: Work


class Arrived(msgspec.Struct, frozen=True):
    """answers: in the order of the prompts, None where one was refused.

    late: by how much each was sent after its time, in seconds; it is in the arrivals.
    """

    answers: list[Answer | None]
    late: list[float]
    work: Work


class Dissect(msgspec.Struct, frozen=True, tag=True):
    """One prompt at one K, with a wait behind every program. Answered by Parts."""

    prompt_ids: Prompt
    max_tokens: int
    k: int


class Parts(msgspec.Struct, frozen=True):
    """seconds: of "prefill"; and by round of "draft", "verify", "kv_write", "read": the verdict's way to the caller.

    A step's time begins where the one before ends, its own dispatch included. No answer where the bundle has no such
    programs.
    """

    answer: Answer | None
    seconds: dict[str, list[float]]


def deal(prompts: Sequence[T], callers: int) -> list[list[T]]:
    """A list for each caller, all prompts used once."""
    return [list(prompts[caller::callers]) for caller in range(callers)]


def gather(lists: Sequence[Sequence[T]]) -> list[T]:
    """The answers in the order that the prompts had before `deal`."""
    longest = max(map(len, lists))
    return [answers[turn] for turn in range(longest) for answers in lists if turn < len(answers)]


def draw_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When each of `count` independent callers comes, `rate` of them per second on average: a Poisson process."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()
