"""Worker processes of benchmarks, and their messages: what a worker is, what it is asked, and what it answers.

Each message is one line of JSON. Structs that a worker is started with, or asked, carry a tag.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, TypeVar, Union

import msgspec
import numpy as np

from dflash_aot.cache.errors import DflashError, PeerFailed
from dflash_aot.cache.json_process import JsonPipe, JsonProcess, ProcessEnded

# -- worker processes
#
# Each contender is a process that stays up, so that contenders can take turns. A worker sends its answer once its
# process is idle again, so that it does not disturb the next contender.

LAST_LINES = 5
# Seconds: of one look at the processor time, of work in it that still counts as rest, of all looks.
REST = 0.02
REST_WORK = 0.002
MAX_REST = 1.0
T = TypeVar("T")
# The function that answers each type of question.
Handlers = Mapping[type[msgspec.Struct], Callable[[Any], Any]]


class WorkerReady(msgspec.Struct, frozen=True):
    """Answer to the first message."""


class Worker:
    """The benchmark's end of one worker."""

    def __init__(self, name: str, module: str, spec: msgspec.Struct):
        """Starts `python -m module`, which calls `run_worker`, and waits until it is ready. Raises PeerFailed."""
        self.name = name
        self._process = JsonProcess(module)
        try:
            self.ask(spec, WorkerReady)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, question: msgspec.Struct, kind: type[T]) -> T:
        """Waits for the answer. Raises PeerFailed if the worker ends first or sends something else."""
        return ask_process(self._process, question, kind, self.name)

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


def ask_process(process: JsonProcess, question: msgspec.Struct, kind: type[T], name: str) -> T:
    """Raises PeerFailed, with the last lines of a process that ended."""
    try:
        return process.ask(question, kind)
    except msgspec.DecodeError as error:
        raise PeerFailed(f"{name} sent an invalid reply: {error}") from error
    except ProcessEnded as ended:
        hint = ", probably because memory ran out" if ended.was_killed else ""
        last = [f"  {line}" for line in ended.last_lines(LAST_LINES)]
        log = "Its last lines:" if last else "It wrote nothing"
        raise PeerFailed(f"the process of {name} {ended.how}{hint}. {log}", *last) from ended


def run_worker(
    spec: Any, open_contender: Callable[[Any], AbstractContextManager[Handlers]]
) -> None:
    """The worker's end, until its input ends. A DflashError ends the process with its message.

    spec: type of the first message. open_contender: gets that message; its handlers answer until the context ends.
    """
    pipe = JsonPipe()
    try:
        first = pipe.receive(spec)
        if first is None:
            return
        with open_contender(first) as handlers:
            questions: Any = Union[tuple(handlers)]  # noqa: UP007  the number of types varies
            answer: msgspec.Struct = WorkerReady()
            while True:
                wait_for_rest()
                pipe.send(answer)
                if (question := pipe.receive(questions)) is None:
                    return
                answer = handlers[type(question)](question)
    except DflashError as error:
        sys.exit(str(error))


def wait_for_rest() -> None:
    """Waits until no thread of this process works: thread pools spin for a while after a matmul."""
    give_up = time.perf_counter() + MAX_REST
    while time.perf_counter() < give_up:
        worked = time.process_time()
        time.sleep(REST)
        if time.process_time() - worked < REST_WORK:
            return


# -- messages

PromptIds = list[int]
TorchDtype = Literal["float32", "bfloat16"]


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
    # When the caller had each token: seconds since the prompt was sent, or was due.
    arrivals: list[float]
    # Drafted tokens accepted in each round; empty for contenders without rounds.
    accepted: list[int] = []


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
