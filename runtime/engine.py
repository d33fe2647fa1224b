"""The engine that other services embed: a bundle and its weights behind a queue, served by one thread."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from dflash_aot.cache.errors import BadInput, EngineFailed, GridMiss
from dflash_aot.cache.manifest import Manifest
from dflash_aot.runtime.advice import advise_on_pair
from dflash_aot.runtime.bundle import Bundle
from dflash_aot.runtime.compile_watch import CompileWatch
from dflash_aot.runtime.counters import Counters
from dflash_aot.runtime.executable import DeviceState
from dflash_aot.runtime.loop import Loop
from dflash_aot.runtime.opening import open_bundle
from dflash_aot.runtime.pair import read_end_tokens
from dflash_aot.runtime.request import Delta, Request, Result, SamplingParams

if TYPE_CHECKING:
    from dflash_aot.runtime.text import TextStream, Tokenizer

logger = logging.getLogger(__name__)
Prompt = str | Sequence[int]
GREEDY = SamplingParams()


class Stream:
    """The deltas of one request, to be iterated once; closing it, or leaving the loop early, frees the slot."""

    def __init__(self, request: Request, deltas: "queue.SimpleQueue[Delta]"):
        self._request, self._deltas, self._ended = request, deltas, False

    def __iter__(self) -> Iterator[Delta]:
        try:
            while not self._ended:
                yield self._next()
        finally:
            self.close()

    def _next(self) -> Delta:
        delta = self._deltas.get()
        self._ended = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """Cancels what has not been generated yet."""
        self._request.cancel()

    def result(self) -> Result:
        """Waits for the end. Raises EngineFailed if the engine died."""
        while not self._ended:
            self._next()
        if self._request.error is not None:
            raise EngineFailed(self._request.error)
        return self._request.result()


class Engine:
    """Made by `Engine.open`. All methods may be called from any thread."""

    def __init__(self, bundle: Bundle, state: DeviceState, target: Path, startup: Mapping[str, float]):
        self._bundle, self._target = bundle, target
        self._counters, self._watch = Counters(), CompileWatch()
        self._loop = Loop(bundle, state, self._counters)
        self._arrivals: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_lock, self._door = threading.Lock(), threading.Lock()
        self._ends = read_end_tokens(target)
        for advice in advise_on_pair(bundle.manifest, self._ends):
            logger.warning(advice)
        self._failure: str | None = None
        self._closed = False
        self.k = bundle.k
        self.startup = dict(startup)
        self._thread = threading.Thread(target=self._serve, name="dflash-engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        k: int | Literal["auto"] = "auto",
    ) -> "Engine":
        """Loads a bundle and its weights and calls every executable once.

        target, draft: directories or hub ids instead of the bundle's own, of the same architecture and shapes.
        k: tokens verified per round, one of the grid's; "auto" is the largest.

        Raises MissingBundle, CorruptBundle, IncompatibleBundle, BadCheckpoint, GridMiss.
        """
        opened = open_bundle(Path(bundle), target, draft, k)
        return cls(opened.bundle, opened.state, opened.target, opened.startup)

    # -- requests

    def generate(self, prompt: Prompt, params: SamplingParams = GREEDY) -> Result:
        """Continues one prompt, text or token ids. Raises BadInput, GridMiss, EngineFailed."""
        return self.stream(prompt, params).result()

    def generate_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> list[Result]:
        """Continues all prompts, together; results in their order. A bad prompt raises before any is started."""
        if isinstance(prompts, str | bytes):
            raise BadInput(f"prompts is {prompts[:40]!r}: a list of prompts is needed")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise BadInput(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        prepared = [self._prepare(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        for stream in prepared:
            self._submit(stream._request)
        return [stream.result() for stream in prepared]

    def stream(self, prompt: Prompt, params: SamplingParams = GREEDY) -> Stream:
        """Like `generate`, as it is committed. The request is on its way when this returns."""
        stream = self._prepare(prompt, params)
        self._submit(stream._request)
        return stream

    async def astream(self, prompt: Prompt, params: SamplingParams = GREEDY) -> AsyncIterator[Delta]:
        """`stream` for an event loop; cancelling the task frees the slot."""
        loop, deltas = asyncio.get_running_loop(), asyncio.Queue[Delta]()

        def hand_over(delta: Delta) -> None:
            with suppress(RuntimeError):  # the event loop is gone, and with it the reader
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        request = self._prepare_request(prompt, params, hand_over)
        self._submit(request)
        try:
            while True:
                delta = await deltas.get()
                yield delta
                if delta.finish_reason:
                    return
        finally:
            request.cancel()

    def stats(self) -> Counters:
        """A snapshot of what was counted since the engine was opened."""
        self._counters.compile_events = self._watch.events
        return self._counters.copy()

    @property
    def manifest(self) -> Manifest:
        return self._bundle.manifest

    @property
    def executables(self) -> int:
        return len(self._bundle)

    @property
    def target(self) -> Path:
        """The target's checkpoint directory."""
        return self._target

    @property
    def tokenizer(self) -> "Tokenizer":
        """The target's, loaded at its first use. Raises BadCheckpoint."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                from dflash_aot.runtime.text import Tokenizer  # noqa: PLC0415  token ids need no text layer

                self._tokenizer = Tokenizer.open(self._target)
            return self._tokenizer

    # -- life

    def close(self) -> None:
        """Cancels what is running and stops the thread."""
        if not self._closed:
            self._closed = True
            self._arrivals.put(None)
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        """The engine's thread."""
        with self._watch.forbid_tracing():
            try:
                while self._take_arrivals():
                    self._loop.step()
                self._fail("the engine was closed")
            except BaseException as error:  # a panic of the tokenizer's is no Exception, and requests are waiting
                logger.debug("the engine's loop failed", exc_info=True)
                self._fail(f"the engine's loop failed: {type(error).__name__}: {error}")

    def _take_arrivals(self) -> bool:
        """Everything that has come in; waits while there is nothing to do. False once the engine is closed."""
        while True:
            try:
                request = self._arrivals.get(block=self._loop.idle)
            except queue.Empty:
                return True
            if request is None:
                return False
            self._loop.add(request)

    def _fail(self, why: str) -> None:
        with self._door:
            self._failure = why
        self._loop.fail(why)
        with suppress(queue.Empty):
            while True:
                if request := self._arrivals.get_nowait():
                    request.end("error", why)

    def _submit(self, request: Request) -> None:
        with self._door:  # after the last look into the queue nothing may come in
            if self._closed or self._failure:
                raise EngineFailed(f"no request is taken any more: {self._failure or 'the engine was closed'}")
            self._arrivals.put(request)

    # -- checks

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> Stream:
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        return Stream(self._prepare_request(prompt, params, deltas.put), deltas)

    def _prepare_request(self, prompt: Prompt, params: SamplingParams, emit: Callable[[Delta], None]) -> Request:
        """Everything that can be wrong with a request is found here, before the engine's thread sees it."""
        if isinstance(prompt, bytes | bytearray):  # a sequence of numbers too, and hardly of tokens
            raise BadInput(f"the prompt is {bytes(prompt[:40])!r}: a text or a list of token ids is needed")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        check_tokens("the prompt", ids, self.manifest.target.facts.decoder.vocab)
        check_tokens("stop_token_ids", params.stop_token_ids or (), self.manifest.target.facts.decoder.vocab)
        if not ids:
            raise BadInput("the prompt is empty: at least one token is needed to continue from")
        grid = self.manifest.grid
        # The last token emitted needs no kv: its position is one past the last one written.
        room = grid.capacity + 1 - len(ids)
        wanted = 1 if params.max_tokens is None else params.max_tokens
        if wanted > room:
            raise self._refuse_length(len(ids) + wanted - 1)
        return Request(
            prompt=ids,
            params=params,
            limit=room if params.max_tokens is None else params.max_tokens,
            stop_ids=self._ends if params.stop_token_ids is None else frozenset(params.stop_token_ids),
            text=self._text_stream(prompt, params),
            emit=emit,
        )

    def _refuse_length(self, length: int) -> GridMiss:
        """A longer grid is the remedy, as far as the models go."""
        facts = self.manifest.target.facts.decoder, self.manifest.draft.facts.decoder
        positions = min(decoder.positions for decoder in facts)
        if length <= positions:
            return self.manifest.grid.miss(1, length, 0)
        return GridMiss(
            f"prompt and answer take {length} positions; the models were made for {positions} "
            f"(max_position_embeddings), and the grid ends at {self.manifest.grid.capacity}"
        )

    def _text_stream(self, prompt: Prompt, params: SamplingParams) -> "TextStream | None":
        """Token ids in, token ids out: text is made where there is a tokenizer, and missed where it is needed."""
        if not isinstance(prompt, str) and not params.stop and not (self._target / "tokenizer.json").exists():
            return None
        tokenizer = self.tokenizer
        from dflash_aot.runtime.text import TextStream  # noqa: PLC0415  see `tokenizer`

        return TextStream(tokenizer, params.stop)


def check_tokens(what: str, ids: Sequence[int], vocab: int) -> None:
    """Raises BadInput for anything that is not a token of the target."""
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise BadInput(f"{what} holds {token!r}: the target's tokens are 0 to {vocab - 1}")
