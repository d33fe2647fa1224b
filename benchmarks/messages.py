"""Worker processes of benchmarks, and their messages: what a worker is, what it is asked, and what it answers.

Each message is one line of JSON. Structs that a worker is started with, or asked, carry a tag. Imports little, so that
starting a process takes little time.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar, Union

import msgspec

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
# The function that answers each type of question; the function that opens a contender for each type of spec.
Handlers = Mapping[type[msgspec.Struct], Callable[[Any], Any]]
Openers = Mapping[type[msgspec.Struct], Callable[[Any], AbstractContextManager[Handlers]]]


class WorkerReady(msgspec.Struct, frozen=True):
    """Answer to the first message."""


class Worker(JsonProcess):
    """The benchmark's end of a process; messages name it."""

    def __init__(self, name: str, module: str):
        super().__init__(module)
        self.name = name

    def ask(self, message: msgspec.Struct, kind: type[T], most: int = -1) -> T:
        """Waits for the answer. Raises PeerFailed, with the last lines of a process that ended."""
        try:
            return super().ask(message, kind, most)
        except msgspec.DecodeError as error:
            raise PeerFailed(f"{self.name} sent an invalid reply: {error}") from error
        except ProcessEnded as ended:
            hint = ", probably because memory ran out" if ended.was_killed else ""
            last = [f"  {line}" for line in ended.last_lines(LAST_LINES)]
            log = "Its last lines:" if last else "It wrote nothing"
            failure = f"the process of {self.name} {ended.how}{hint}. {log}"
            raise PeerFailed(failure, *last) from ended


@contextmanager
def open_worker(name: str, module: str, spec: msgspec.Struct) -> Iterator[Worker]:
    """Starts a module that calls `run_worker`, and waits until it is ready. Raises PeerFailed."""
    with Worker(name, module) as worker:
        worker.ask(spec, WorkerReady)
        yield worker


def run_worker(openers: Openers) -> None:
    """The worker's end, until its input ends. A DflashError ends the process with its message.

    openers: by the type of the first message, what takes this message; the handlers answer until the context ends.
    """
    pipe = JsonPipe()
    try:
        first: Any = pipe.receive(make_union(openers))
        if first is None:
            return
        with openers[type(first)](first) as handlers:
            questions = make_union(handlers)
            answer: msgspec.Struct = WorkerReady()
            while True:
                wait_for_rest()
                pipe.send(answer)
                if (question := pipe.receive(questions)) is None:
                    return
                answer = handlers[type(question)](question)
    except DflashError as error:
        sys.exit(str(error))


def make_union(types: Iterable[type]) -> Any:
    """The type of messages that are of any of these types."""
    return Union[tuple(types)]  # noqa: UP007  the number of types varies


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
Prompts = Sequence[PromptIds]
FixedOrChosen = int | Literal["auto"]  # a K, or one that the engine chooses
TorchDtype = Literal["float32", "bfloat16"]


class EngineSpec(msgspec.Struct, frozen=True, tag=True):
    """The engine on a bundle; k and max_waiting as `Engine.open` takes them, None for the default."""

    bundle: str
    k: FixedOrChosen
    max_waiting: int | None = None


class JitSpec(msgspec.Struct, frozen=True, tag=True):
    """The plain `jax.jit` loop on the pair and the grid of a bundle, without its executables."""

    bundle: str
    k: int
    longest: int  # tokens of the longest prompt


class TorchSpec(msgspec.Struct, frozen=True, tag=True):
    """PyTorch transformers' model: `generate`, or single forward passes over a text."""

    target: str
    dtype: TorchDtype
    lookup_tokens: int | None = None  # that `generate` drafts by prompt lookup
    exit_layer: int | None = None  # after which `generate` drafts by early exit
    text: PromptIds | None = None


class LlamaSpec(msgspec.Struct, frozen=True, tag=True):
    """llama.cpp's greedy answers."""

    gguf: str
    longest: int  # tokens of the longest prompt and its answer
    threads: int


class BundleForwardSpec(msgspec.Struct, frozen=True, tag=True):
    """Single forward passes of a bundle's executables."""

    bundle: str
    text: PromptIds  # as many tokens as the bundle's longest length


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Answers of `max_tokens` tokens each. Answered by Served."""

    prompts: Prompts
    max_tokens: int
    callers: int = 1  # each sends the next prompt when it has its last answer
    # For an open loop, with a caller for each prompt: seconds from the start at which each prompt is sent.
    due: list[float] | None = None
    temperature: float = 0.0  # only the engine samples


class TimedAnswer(msgspec.Struct, frozen=True):
    """The answer to one prompt; nothing for a refused prompt."""

    token_ids: PromptIds
    # When the caller had each token: seconds since the prompt was sent, or was due.
    arrivals: list[float]
    # Drafted tokens accepted in each round; empty for contenders without rounds.
    accepted: list[int] = []


class ServingWork(msgspec.Struct, frozen=True):
    """What was counted while prompts were served. Fields of samples."""

    rounds: int = 0  # forward passes of the target after the prompts
    rows: int = 0  # rows that the rounds computed
    row_rounds: int = 0  # rows that committed tokens, summed over rounds
    host_us: int = 0  # processor time of the thread that dispatches, in microseconds
    compile_events: int = 0  # traces and compilations


class Served(msgspec.Struct, frozen=True):
    """The answers to a Serve."""

    answers: list[TimedAnswer]  # in the order of the prompts
    seconds: float  # until the last token
    work: ServingWork


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
    """Of each call: bytes read from memory, and operations of a matmul in the worker's dtype. Fields of samples."""

    bytes_per_second: list[int]
    flops_per_second: list[int]
