"""The engine that other services embed: a bundle and its weights behind a queue, served by one thread."""

import asyncio
import atexit
import logging
import math
import os
import queue
import reprlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.errors import BadInput, EngineFailed, QueueFull
from dflash_aot.cache.remote.fetch import locate_bundle
from dflash_aot.cache.remote.urls import is_url
from dflash_aot.runtime.diagnostics import diagnose_pair
from dflash_aot.runtime.engine_loop import EngineLoop
from dflash_aot.runtime.executables.bundle_loading import EngineParts, load_engine_parts
from dflash_aot.runtime.executables.compile_guard import CompileGuard
from dflash_aot.runtime.executables.warm_up import WarmUp
from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.runtime.requests.async_stream import AsyncStream
from dflash_aot.runtime.requests.request import Delta, Request, Result
from dflash_aot.runtime.requests.request_builder import Prompt, RequestBuilder
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.requests.stream import Stream, check_process
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from dflash_aot.runtime.speculation.controller import Decision
from dflash_aot.runtime.weights.checkpoint_pair import read_end_tokens

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from dflash_aot.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
GREEDY = SamplingParams()
MAX_WAITING = 1024


class Engine:
    """Made by `Engine.open`. All methods may be called from any thread, and from any event loop."""

    def __init__(self, opened: EngineParts, max_waiting: int = MAX_WAITING):
        self._bundle, self._target = opened.bundle, opened.target
        self._watch, self._line = CompileGuard(), RequestQueue(max_waiting)
        self._depth = opened.controller
        self._loop = EngineLoop(opened.bundle, opened.state, Counters(), self._line, self._depth)
        self._warm_up = WarmUp(opened.bundle, opened.state, opened.controller)
        ends = read_end_tokens(opened.target)
        self._intake = RequestBuilder(opened.bundle, opened.target, ends)
        for advice in diagnose_pair(opened.bundle.manifest, ends):
            logger.warning(advice)
        self._drain_until = 0.0
        self._process = os.getpid()
        self.k = opened.bundle.k
        self.startup = dict(opened.startup)
        self._thread = threading.Thread(target=self._serve, name="dflash-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before JAX takes its devices down under a round

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        k: int | Literal["auto"] = "auto",
        max_waiting: int = MAX_WAITING,
        require_signature: str | Path | None = None,
        preload: bool = False,
        on_phase: Callable[[str], None] | None = None,
    ) -> "Engine":
        """Verifies a bundle and loads its weights.

        bundle: a directory, or the URL of one that was pushed: it is copied to the user's cache first.
        target, draft: directories or hub ids instead of the bundle's own, of the same architecture and shapes.
        k: tokens verified per round, one of the grid's; "auto" chooses among all of them, round by round, by their
        times on this machine and by how much is accepted. max_waiting: requests that may wait for a slot; further
        ones are refused, or wait outside if their caller says so. require_signature: the public key, a PEM file, of
        whoever must have signed the bundle. preload: every executable is loaded and called once, and rounds are timed,
        before this returns; otherwise that is done where something needs it, and while there is nothing else to do.
        on_phase: told of "fetch" (of a URL), "bundle", "weights" and, with preload, "canaries" and "timing", as they
        begin.

        Raises MissingBundle, CorruptBundle, IncompatibleBundle, BadCheckpoint, BadInput, GridMiss, StoreFailed.
        """
        if type(max_waiting) is not int or max_waiting < 1:
            raise BadInput(f"max_waiting is {max_waiting!r}: a whole number of at least 1 is needed")
        signed_by = None if require_signature is None else Path(require_signature)
        if on_phase and is_url(str(bundle)):
            on_phase("fetch")
        opened = load_engine_parts(locate_bundle(bundle, signed_by), target, draft, k, signed_by, preload, on_phase)
        try:
            return cls(opened, max_waiting)
        except BaseException:
            opened.bundle.executables.close()
            raise

    # -- requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        deadline: float | None = None,
        wait: bool | float = False,
    ) -> Result:
        """Continues one prompt, text or token ids.

        priority: lower is served earlier; what has a slot keeps it. deadline: seconds from now, after which it ends
        as "cancelled" with what it has. wait: for a place, where too many are waiting; True, or so many seconds.

        Raises BadInput, GridMiss, QueueFull, EngineFailed.
        """
        return self.stream(prompt, params, priority=priority, deadline=deadline, wait=wait).result()

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        priority: int = 0,
        deadline: float | None = None,
        wait: bool | float = True,
    ) -> list[Result]:
        """Continues all prompts, together; results in their order. A bad prompt raises before any is started."""
        if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
            raise BadInput(f"prompts is {reprlib.repr(prompts)}: a list of prompts is needed")
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise BadInput(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        prepared = [self._prepare(prompt, one, priority, deadline) for prompt, one in zip(prompts, each, strict=True)]
        try:
            for stream in prepared:
                self._submit(stream._request, wait)
            return [stream.result() for stream in prepared]
        except BaseException:  # whoever keeps it keeps its frames, and the streams in them
            for stream in prepared:
                stream.close()
            raise

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        deadline: float | None = None,
        wait: bool | float = False,
    ) -> Stream:
        """Like `generate`, as it is committed. The request is on its way when this returns."""
        stream = self._prepare(prompt, params, priority, deadline)
        self._submit(stream._request, wait)
        return stream

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        deadline: float | None = None,
        wait: bool | float = False,
    ) -> AsyncIterator[Delta]:
        """`stream` for an event loop, which is never blocked; cancelling the task frees the slot."""
        stream = await self.asubmit(prompt, params, priority=priority, deadline=deadline, wait=wait)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    async def asubmit(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        deadline: float | None = None,
        wait: bool | float = False,
    ) -> AsyncStream:
        """Like `astream`, but the request is on its way, or was refused, when this has been awaited.

        Who awaits it closes the stream: nobody else frees the slot of what is not read to its end.
        """
        loop, deltas = asyncio.get_running_loop(), asyncio.Queue[Delta]()

        def hand_over(delta: Delta) -> None:
            try:
                loop.call_soon_threadsafe(deltas.put_nowait, delta)
            except RuntimeError:  # the event loop is gone, and with it the reader
                request.cancel()

        # In a thread: the first request loads the tokenizer, and a long text takes its time.
        prepare = partial(self._prepare_request, prompt, params, hand_over, priority, deadline, time.monotonic())
        request = await asyncio.to_thread(prepare)
        try:
            await self._submit_async(request, wait)
        except BaseException:
            request.cancel()
            raise
        return AsyncStream(request, deltas)

    def stats(self) -> Counters:
        """A snapshot of what was counted since the engine was opened, with all that anybody was told of."""
        check_process(self._process)
        copied = self._loop.stats()
        copied.compile_events = self._watch.events
        copied.executables, copied.loaded = self.executables, len(self._bundle.executables)
        return copied

    def decisions(self) -> tuple[Decision, ...]:
        """The latest changes of K and their reasons, oldest first; none where K is fixed."""
        return self._depth.decisions

    def metrics(self, model_name: str | None = None) -> "CollectorRegistry":
        """A registry of Prometheus metrics, read from the engine when they are asked for.

        model_name: their label; by default the target as the bundle names it.
        """
        from dflash_aot.runtime.metrics.prometheus import make_registry  # noqa: PLC0415  loaded only where somebody watches

        return make_registry(self.stats, model_name or self.manifest.target.reference)

    @property
    def manifest(self) -> Manifest:
        return self._bundle.manifest

    @property
    def executables(self) -> int:
        """How many serve, loaded or not."""
        return len(self._bundle.executables.order)

    @property
    def target(self) -> Path:
        """The target's checkpoint directory."""
        return self._target

    @property
    def tokenizer(self) -> "Tokenizer":
        """The target's, loaded at its first use. Raises BadCheckpoint."""
        check_process(self._process)
        return self._intake.tokenizer

    # -- life

    @property
    def failure(self) -> str | None:
        """Why no request is taken any more; None while the engine serves."""
        return self._line.closed

    def close(self, drain_seconds: float = 0.0) -> None:
        """Takes no more requests and stops the thread; what has not ended within `drain_seconds` ends as an error."""
        if os.getpid() != self._process:
            return  # a fork: the thread is in the other process
        if not drain_seconds >= 0:
            raise BadInput(f"drain_seconds is {drain_seconds!r}: a number of at least 0 is needed")
        self._drain_until = max(self._drain_until, time.monotonic() + drain_seconds)
        self._line.close("the engine was closed")
        self._thread.join()
        atexit.unregister(self.close)

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
                while self._goes_on():
                    self._loop.step()
            except EngineFailed as error:
                self._line.close(f"the engine's loop failed: {error}")
            except BaseException as error:  # a panic of the tokenizer's is no Exception, and requests are waiting
                logger.debug("the engine's loop failed", exc_info=True)
                self._line.close(f"the engine's loop failed: {type(error).__name__}: {error}")
            self._loop.end_all(self._line.closed or "")
        self._bundle.executables.close()

    def _goes_on(self) -> bool:
        """Waits while there is nothing to do. False once the engine is closed and drained."""
        if self._loop.idle:
            return self._wait_for_work()
        return self._line.closed is None or time.monotonic() < self._drain_until

    def _wait_for_work(self) -> bool:
        """Meanwhile what was left to do when it was opened: loading, first calls, times. False for a closed line."""
        self._bundle.executables.resume(self._line.wake)
        while not self._line and self._line.closed is None:
            if not self._warm_up.step():
                self._line.wait()
        self._bundle.executables.pause()
        return bool(self._line)

    def _submit(self, request: Request, wait: bool | float) -> None:
        check_process(self._process)
        patience = _patience(wait, request)
        if wait is False:
            self._line.join(request)
            return
        with self._outside(request):
            self._line.ask(request).result(patience)

    async def _submit_async(self, request: Request, wait: bool | float) -> None:
        check_process(self._process)
        patience = _patience(wait, request)
        if wait is False:
            self._line.join(request)
            return
        with self._outside(request):
            place = self._line.ask(request)
            if place.done():
                return place.result()
            async with asyncio.timeout(patience):  # `wait_for` may swallow a cancel of the task
                await asyncio.wrap_future(place)

    @contextmanager
    def _outside(self, request: Request) -> Iterator[None]:
        """While its caller waits for a place. Raises QueueFull for one who waited in vain."""
        try:
            yield
        except TimeoutError as error:
            self._line.withdraw(request, in_vain=True)
            raise QueueFull(
                f"no place came free in time: {len(self._line)} requests are waiting, as many as may (max_waiting)"
            ) from error
        except BaseException:
            self._line.withdraw(request)
            raise

    def _prepare(self, prompt: Prompt, params: SamplingParams, priority: int, deadline: float | None) -> Stream:
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        return Stream(self._prepare_request(prompt, params, deltas.put, priority, deadline), deltas)

    def _prepare_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        emit: Callable[[Delta], None],
        priority: int = 0,
        deadline: float | None = None,
        submitted: float | None = None,
    ) -> Request:
        check_process(self._process)
        submitted = time.monotonic() if submitted is None else submitted
        return self._intake.prepare(prompt, params, emit, self._line.note_cancel, priority, deadline, submitted)


def _patience(wait: bool | float, request: Request) -> float | None:
    """Seconds to wait for a place: as the caller says, and not beyond the deadline."""
    if not isinstance(wait, bool | int | float) or wait < 0 or math.isnan(wait):
        raise BadInput(f"wait is {wait!r}: True, False or seconds are needed")
    limits = [] if wait is True else [wait]
    limits += [] if request.deadline is None else [request.deadline - time.monotonic()]
    patience = min(limits, default=math.inf)
    return None if patience > threading.TIMEOUT_MAX else max(patience, 0.0)
