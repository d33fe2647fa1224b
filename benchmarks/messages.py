"""Messages between a benchmark and its worker processes: what a worker is, what it is asked, and what it answers.

Each message is one line of JSON. Structs that a worker is started with, or asked, carry a tag.
"""

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np

PromptIds = list[int]
TorchDtype = Literal["float32", "bfloat16"]
T = TypeVar("T")


class PairSpec(msgspec.Struct, frozen=True):
    """A bundle and the directories of its checkpoints."""

    bundle: str
    target: str
    draft: str


class EngineSpec(PairSpec, frozen=True, tag=True):
    """The engine on a bundle; k and max_waiting as `Engine.open` takes them, None for the default."""

    k: int | Literal["auto"]
    max_waiting: int | None = None


class JitSpec(PairSpec, frozen=True, tag=True):
    """The plain `jax.jit` loop on the pair and the grid of a bundle, without its executables."""

    k: int
    longest: int  # tokens of the longest prompt


class TorchSpec(msgspec.Struct, frozen=True, tag=True):
    """PyTorch transformers' `generate`: without speculation, by prompt lookup, or by early exit of the model."""

    target: str
    dtype: TorchDtype
    lookup_tokens: int | None = None
    exit_layer: int | None = None


class BundleForwardSpec(PairSpec, frozen=True, tag=True):
    """Single forward passes of a bundle's executables."""

    text: PromptIds  # as many tokens as the bundle's longest length


class TorchForwardSpec(msgspec.Struct, frozen=True, tag=True):
    """Single forward passes of PyTorch transformers' model on the same weights."""

    target: str
    dtype: TorchDtype
    text: PromptIds


class ServeClosed(msgspec.Struct, frozen=True, tag=True):
    """Closed loops: each caller sends its next prompt when the last one is answered. Answered by ServedClosed."""

    lists: list[list[PromptIds]]  # the prompts of each caller
    max_tokens: int


class ServeOpen(msgspec.Struct, frozen=True, tag=True):
    """An open loop: each prompt is sent when it is due, whether others are answered or not. Answered by ServedOpen."""

    prompts: list[PromptIds]
    due: list[float]  # seconds from the start
    max_tokens: int


class TimedAnswer(msgspec.Struct, frozen=True):
    """The answer to one prompt."""

    token_ids: PromptIds
    arrivals: list[float]  # when the caller had each token: seconds since the prompt was sent, or was due
    accepted: list[int] = []  # drafted tokens accepted in each round; empty for contenders without rounds


class ServingWork(msgspec.Struct, frozen=True):
    """What was counted while prompts were served."""

    rounds: int = 0  # forward passes of the target after the prompts
    rows: int = 0  # rows that the rounds computed
    row_rounds: int = 0  # rows that committed tokens, summed over rounds
    host_seconds: float = 0.0  # processor time of the thread that dispatches
    compile_events: int = 0  # traces and compilations


class ServedClosed(msgspec.Struct, frozen=True):
    """The answers of closed loops."""

    answers: list[list[TimedAnswer]]  # by caller, in the order of its list
    seconds: float  # from the first prompt sent to the last token
    work: ServingWork


class ServedOpen(msgspec.Struct, frozen=True):
    """The answers of an open loop."""

    answers: list[TimedAnswer | None]  # in the order of the prompts; None: refused
    work: ServingWork


def deal(prompts: Sequence[T], callers: int) -> list[list[T]]:
    """A list of prompts for each caller; every prompt is used once."""
    return [list(prompts[caller::callers]) for caller in range(callers)]


def gather(lists: Sequence[Sequence[T]]) -> list[T]:
    """Undoes `deal`: one answer per prompt, in the order of the prompts."""
    longest = max(map(len, lists))
    return [answers[turn] for turn in range(longest) for answers in lists if turn < len(answers)]


def draw_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times of `count` independent callers, on average `rate` per second: a Poisson process."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()


class RunForward(msgspec.Struct, frozen=True, tag=True):
    """The last `rows` of the first `length` tokens of the text, after the kv of the tokens before, `calls` times.

    A verification chooses a token after every row, a prefill after the last one. Answered by ForwardSeconds.
    """

    program: str  # "verify" or "prefill"
    rows: int
    length: int
    calls: int


class ForwardSeconds(msgspec.Struct, frozen=True):
    """Times of forward passes and the chosen tokens."""

    seconds: list[float]  # of each call, until all results are computed
    token_ids: list[int]


class MeasurePeaks(msgspec.Struct, frozen=True, tag=True):
    """The best memory bandwidth and arithmetic that this process reaches. Answered by PeakRates."""

    calls: int


class PeakRates(msgspec.Struct, frozen=True):
    """Of each call: bytes read from memory per second, and operations per second of a matmul in the worker's dtype."""

    bytes_per_second: list[float]
    flops_per_second: list[float]
