"""The engine that other services embed: a bundle and its weights, served by one thread; mailboxes of its streams."""

import asyncio
import atexit
import logging
import os
import queue
import reprlib
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakValueDictionary

import jax

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.devices import ignore_jax_switches
from dflash_aot.cache.errors import BadInput, EngineFailed, QueueFull
from dflash_aot.cache.files.locations import is_url
from dflash_aot.cache.model_config.speculative_config import KChoice
from dflash_aot.cache.remote.transfer import locate_bundle
from dflash_aot.runtime.bounded_worker import CHAT_GUARD, GRAMMAR_GUARD, Leaving, start_with_stack
from dflash_aot.runtime.diagnostics import diagnose_pair
from dflash_aot.runtime.engine_loop import EngineLoop
from dflash_aot.runtime.engine_parts import (
    EngineParts,
    WarmUp,
    load_engine_parts,
    make_offload_costs,
)
from dflash_aot.runtime.executables.executable import (
    CompileGuard,
    estimate_step_bytes,
    return_memory,
)
from dflash_aot.runtime.executables.loaded_bundle import (
    OPEN_ENGINES,
    LazyLoader,
    report_out_of_memory,
)
from dflash_aot.runtime.host_group import LeaderGroup, find_group
from dflash_aot.runtime.metrics.counters import Counters, Watchdog
from dflash_aot.runtime.requests.request import (
    AsyncStream,
    Delta,
    Request,
    Result,
    Stream,
    check_process,
)
from dflash_aot.runtime.requests.request_builder import (
    DEFAULT_OPTIONS,
    Prompt,
    RequestBuilder,
    RequestOptions,
    check_options,
    find_wait_seconds,
)
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from dflash_aot.runtime.scheduler.scheduler import Scheduler
from dflash_aot.runtime.speculation.controller import Decision
from dflash_aot.runtime.weights.checkpoint_pair import read_end_tokens

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from dflash_aot.runtime.structured_output.grammar_matcher import GrammarMatcher
    from dflash_aot.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# -- mailboxes: deltas on their way from the engine's thread to the streams of one event loop


class DeltaMailbox:
    """Hands deltas over to an event loop: one call delivers all deltas that wait for it.

    So the streams of a round usually wake the loop once together. The loop is woken again only if it takes the first
    deltas while others are still posted.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._lock = threading.Lock()
        self._posted: list[tuple[asyncio.Queue[Delta], Delta]] = []

    def post(self, deltas: asyncio.Queue[Delta], delta: Delta) -> None:
        """Puts a delta into the queue of its stream, from any thread. Raises RuntimeError where the loop is closed."""
        with self._lock:
            if not self._posted or self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._deliver)
            self._posted.append((deltas, delta))

    def _deliver(self) -> None:
        with self._lock:
            posted = self._posted
            self._posted = []
        rest = iter(posted)
        try:
            for deltas, delta in rest:
                deltas.put_nowait(delta)
        finally:
            if left := [*rest]:  # one stream took no delta: the others get theirs
                with self._lock:
                    self._posted[:0] = left
                    self._loop.call_soon(self._deliver)


ABANDON_SECONDS = 2.0  # for the engine's thread to end, where a host has failed
JOIN_SECONDS = 1.0  # between two looks whether a host has failed

# Does a step of what makes later requests faster; returns False if nothing is left.
Prepare = Callable[[], bool]
# A mailbox is kept as long as a request posts to it.
Mailboxes = WeakValueDictionary[asyncio.AbstractEventLoop, DeltaMailbox]


def find_mailbox(mailboxes: Mailboxes) -> DeltaMailbox:
    """The mailbox of the running event loop, made at its first use."""
    loop = asyncio.get_running_loop()
    return mailboxes.setdefault(loop, DeltaMailbox(loop))


# -- the thread of an engine


class EngineThread:
    """Serves the request queue until it is closed.

    Does not refer to the Engine, so that an engine to which nothing else refers is found and closed.

    Attributes:
        compile_guard: forbids tracing on the thread.
        group: the hosts that this engine leads, None where it has one.
    """

    def __init__(
        self,
        executables: LazyLoader,
        loop: EngineLoop,
        queue: RequestQueue,
        warm_up: WarmUp,
        prepare: Prepare,
    ):
        self.compile_guard = CompileGuard()
        group = find_group()
        self.group = group if isinstance(group, LeaderGroup) else None
        self._abandoned = False
        self._executables = executables
        self._loop = loop
        self._queue = queue
        self._warm_up = warm_up
        self._prepare = prepare
        self._process = os.getpid()
        self._drain_until = 0.0
        # Closers wait for each other: one frees what the other may still read.
        self._closing = threading.RLock()
        self._thread = threading.Thread(target=self._serve, name="dflash-engine", daemon=True)
        start_with_stack(self._thread)  # masks of grammars
        atexit.register(self.close)  # before JAX releases its devices while a round runs

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stops the thread; requests not done within `drain_seconds` end as errors. No-op in a fork."""
        if os.getpid() != self._process:
            return  # the thread is in the other process
        self._drain_until = max(self._drain_until, time.monotonic() + drain_seconds)
        self._queue.close("the engine was closed")
        if threading.current_thread() is not self._thread:
            self._join()  # not where the garbage collector runs in it
        if self.group:
            with self._closing:
                self.group.close()
        atexit.unregister(self.close)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended in this process, so that nothing calls a device. A fork has no such thread."""
        return os.getpid() == self._process and not self._thread.is_alive()

    def release(self) -> None:
        """Frees the executables, the weights and the state, if the thread has ended."""
        if self.has_ended:
            with self._closing:
                self._executables.release()
                self._loop.release()
            return_memory()

    def watch(self) -> None:
        """Ends all requests where another host fails, or where there is no progress for a minute."""
        watchdog = Watchdog()
        if self.group:
            self.group.is_stuck = lambda: watchdog.is_stalled(self._loop.stats(), time.monotonic())
            self.group.on_failure = self._abandon

    def _abandon(self, reason: str) -> None:
        """Ends all requests from another thread: the engine's own may wait for a device for ever."""
        self._queue.close(f"a host failed: {reason}")
        self._thread.join(ABANDON_SECONDS)
        if self._thread.is_alive():
            try:
                self._loop.end_all(f"a host failed: {reason}")
            finally:
                self._abandoned = True

    def _join(self) -> None:
        """Waits for the thread's end, until a host fails: then it may wait for a device for ever."""
        while self._thread.is_alive() and not self._abandoned:
            self._thread.join(JOIN_SECONDS)

    def close_garbage(self, engine: str) -> None:
        """Closes the thread of an engine to which nothing refers."""
        if os.getpid() == self._process and self._thread.is_alive():
            warnings.warn(f"{engine} was not closed: use `with`, or close()", ResourceWarning)  # noqa: B028
            self.close()
            self.release()

    def _serve(self) -> None:
        with self.compile_guard.forbid_tracing(), jax.thread_guard(self.group is not None):
            try:
                while self._has_work():
                    self._loop.step()
            except EngineFailed as error:
                self._fail(str(error))
            except BaseException as error:  # also a tokenizer's panic, which is not an Exception
                logger.debug("the engine's loop failed", exc_info=True)
                self._fail(f"{type(error).__name__}: {error}")
            self._loop.end_all(self._queue.closed or "")
        self._executables.close()

    def _fail(self, reason: str) -> None:
        """Closes the queue. Commands of a failed step may be missing, so the group ends with it."""
        self._queue.close(f"the engine's loop failed: {reason}")
        if self.group and self.group.failure is None:
            self.group.failure = reason

    def _has_work(self) -> bool:
        """Waits while there is nothing to do. False once the engine is closed and drained, or a host failed."""
        if self.group and self.group.failure is not None:
            self._queue.close(f"a host failed: {self.group.failure}")
            return False
        if self._loop.is_idle or (self._queue.closed is not None and self._loop.has_answered):
            return self._wait_for_request()
        return self._queue.closed is None or time.monotonic() < self._drain_until

    def _wait_for_request(self) -> bool:
        """Loads, warms up and times executables until a request comes. False where the queue was closed instead."""
        self._executables.resume(self._queue.wake)
        while not self._queue and self._queue.closed is None:
            if not (self._warm_up.step() or self._executables.has_ended and self._prepare()):
                self._queue.wait()
        self._executables.pause()
        return bool(self._queue)


# -- the engine


GREEDY = SamplingParams()
MAX_WAITING = 1024


class Engine:
    """A served bundle, made by `Engine.open`. Any thread and any event loop may call its methods.

    Close it, or use `with`. An engine to which nothing refers is closed with a ResourceWarning.

    Attributes:
        k: the largest K that is served.
        checkpoints: the directories of target and draft.
        weights: a fingerprint of their weights: other weights give other answers.
        startup: seconds of each phase of `open`.
        end_tokens: the target's tokens that end an answer, and where they are named.
    """

    @ignore_jax_switches()
    def __init__(
        self,
        parts: EngineParts,
        max_waiting: int = MAX_WAITING,
        prefix_caching: bool = True,
        kv_offloading_size: float = 0,
    ):
        self._bundle = parts.bundle
        self.checkpoints = dict(parts.directories)
        self.weights = parts.weights
        self._queue = RequestQueue(max_waiting)
        self._controller = parts.controller
        manifest = parts.bundle.manifest
        grid = manifest.grid
        prefix_caching &= manifest.target.facts.caches_prefixes or grid.saved_states > 0
        scheduler = Scheduler(
            grid,
            manifest.sampling,
            parts.bundle.k,
            self._queue,
            self._controller,
            prefix_caching,
            make_offload_costs(parts, kv_offloading_size, prefix_caching),
        )
        step_bytes = estimate_step_bytes(manifest)
        self._loop = EngineLoop(
            parts.bundle, parts.state, Counters(), self._queue, scheduler, step_bytes
        )
        self._warm_up = WarmUp(parts.bundle, parts.state, parts.controller, self._loop.reset_state)
        target = parts.directories["target"]
        self.end_tokens = read_end_tokens(target, manifest.target.facts.decoder.vocab)
        self._builder = RequestBuilder(parts.bundle, target, self.end_tokens.ids)
        for warning in (*self.end_tokens.warnings, *diagnose_pair(manifest, self.end_tokens.ids)):
            logger.warning(warning)
        self._mailboxes = Mailboxes()
        self._process = os.getpid()
        self.k = parts.bundle.k
        self.startup = dict(parts.startup)
        self._thread = EngineThread(
            parts.bundle.executables,
            self._loop,
            self._queue,
            self._warm_up,
            self._builder.prepare,
        )
        self._finalizer = weakref.finalize(self, self._thread.close_garbage, repr(self))
        self._finalizer.atexit = False  # the thread's own function closes it earlier
        self._thread.watch()
        OPEN_ENGINES.add(self)

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        k: KChoice = "auto",
        max_waiting: int = MAX_WAITING,
        require_signature: str | Path | None = None,
        preload: bool = False,
        on_phase: Callable[[str], None] | None = None,
        prefix_caching: bool = True,
        kv_offloading_size: float = 0,
    ) -> "Engine":
        """Verifies a bundle and loads its weights.

        bundle: a directory, or the URL of a pushed bundle, which is copied to the user's cache first.
        target, draft: directories or hub ids instead of the bundle's own, of the same architecture and shapes.
        k: drafted tokens verified per round, one of the grid's K; "auto" chooses a K of the grid for every round, by
            measured round times and by how many drafted tokens are accepted; ((first, last, K), ...) is K by the number
            of requests in the round, see `check_k_ranges`.
        max_waiting: requests that may wait for a slot; further requests are refused, or wait if their caller says so.
        require_signature: the public key, a PEM file, that must have signed the bundle.
        preload: loads, calls and times every executable before this returns; otherwise that happens when a request
            needs an executable, and while the engine has nothing else to do.
        prefix_caching: shares the kv of equal beginnings of texts among requests; False shares nothing. Gemma 4, and
            hybrids in a grid without `saved_states`, compute every prompt.
        kv_offloading_size: GiB of host memory for kv pages and saved states that the device evicts; needs a grid with
            offload=1.
        on_phase: called when a phase begins, with "fetch" (of a URL), "bundle", "weights" and, with preload,
            "first_calls" and "timing".

        Raises MissingBundle, CorruptBundle, IncompatibleBundle, BadCheckpoint, BadInput, GridMiss, StoreFailed.
        """
        if type(max_waiting) is not int or max_waiting < 1:
            raise BadInput(
                f"max_waiting is {max_waiting!r}: a whole number of at least 1 is needed"
            )
        signed_by = None if require_signature is None else Path(require_signature)
        if on_phase and is_url(str(bundle)):
            on_phase("fetch")
        parts = load_engine_parts(
            locate_bundle(bundle, signed_by), target, draft, k, signed_by, preload, on_phase
        )
        try:
            with report_out_of_memory(parts.bundle.path, parts.bundle.manifest):
                engine = cls(parts, max_waiting, prefix_caching, kv_offloading_size)
        except BaseException:
            parts.bundle.executables.close()
            raise
        if preload:
            try:
                engine._builder.prepare(starts_guard=True)
            except BaseException:
                engine.close()
                raise
        return engine

    # -- requests

    def generate(
        self, prompt: Prompt, params: SamplingParams = GREEDY, **options: Unpack[RequestOptions]
    ) -> Result:
        """Continues one prompt, text or token ids. options: see `RequestOptions`.

        Raises BadInput, GridMiss, QueueFull, EngineFailed.
        """
        return self.stream(prompt, params, **options).result()

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams = GREEDY, **options: Unpack[RequestOptions]
    ) -> Result:
        """`generate` for an event loop, which is never blocked; cancelling the task frees the slot."""
        stream = await self.asubmit(prompt, params, **options)
        try:
            return await stream.result()
        finally:
            stream.close()

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        **options: Unpack[RequestOptions],
    ) -> list[Result]:
        """Continues all prompts together; results in the order of prompts. Waits for places in the queue by default.

        A bad prompt raises before any prompt is started. Raises as `generate`.
        """
        if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
            raise BadInput(f"prompts is {reprlib.repr(prompts)}: a list of prompts is needed")
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise BadInput(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        checked = check_options({"wait": True, **options})
        streams = [
            self._make_stream(prompt, one, checked)
            for prompt, one in zip(prompts, each, strict=True)
        ]
        try:
            for stream in streams:
                self._submit(stream._request, checked)
            return [stream.result() for stream in streams]
        except BaseException:  # its traceback keeps these frames alive, and the streams in them
            for stream in streams:
                stream.close()
            raise

    def stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Like `generate`, as tokens are committed. The request is in the queue when this returns."""
        checked = check_options(options)
        stream = self._make_stream(prompt, params, checked)
        self._submit(stream._request, checked)
        return stream

    async def astream(
        self, prompt: Prompt, params: SamplingParams = GREEDY, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Delta]:
        """`stream` for an event loop, which is never blocked; cancelling the task frees the slot."""
        stream = await self.asubmit(prompt, params, **options)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    async def asubmit(
        self, prompt: Prompt, params: SamplingParams = GREEDY, **options: Unpack[RequestOptions]
    ) -> AsyncStream:
        """Like `astream`, but the request is in the queue, or was refused, when this has been awaited.

        The caller must close the stream, or read it to its end: nothing else frees the request's slot.
        """
        checked = check_options(options)
        mailbox = find_mailbox(self._mailboxes)
        deltas = asyncio.Queue[Delta]()

        def hand_over(delta: Delta) -> None:
            try:
                mailbox.post(deltas, delta)
            except RuntimeError:  # the event loop is gone, and with it the reader
                request.cancel()

        # In a thread: the first request loads the tokenizer, and a long text takes its time.
        build = partial(self._build_request, prompt, params, hand_over, checked, time.monotonic())
        request = await asyncio.to_thread(build)
        try:
            await self._submit_async(request, checked)
        except BaseException:
            request.cancel()
            raise
        return AsyncStream(request, deltas, self)

    def compile_grammar(
        self, asked: Mapping[str, Any], owner: int = 0, leaving: Leaving | None = None
    ) -> "GrammarMatcher":
        """Compiles `structured_outputs` for the option `grammar` of requests; takes up to some seconds.

        owner: of the grammar, for the cache: grammars of one owner never push out all of another's. leaving: ends the
        compilation. Raises BadInput.
        """
        check_process(self._process)
        return self._builder.grammars.compile(asked, owner, leaving)

    def stats(self) -> Counters:
        """A copy of the counters since the engine was opened. It includes everything that was sent to a caller."""
        check_process(self._process)
        copied = self._loop.stats()
        copied.compile_events = self._thread.compile_guard.events
        copied.executables = self.executables
        copied.loaded = len(self._bundle.executables.list_loaded())
        copied.guard_failures = CHAT_GUARD.failures + GRAMMAR_GUARD.failures
        return copied

    def decisions(self) -> tuple[Decision, ...]:
        """The latest changes of K and their reasons, oldest first; none unless `k` is "auto"."""
        return tuple(self._controller.decisions)

    def metrics(self, model_name: str | None = None) -> "CollectorRegistry":
        """A registry of Prometheus metrics, read from the engine at each scrape.

        model_name: the label of the metrics; by default the target as the bundle names it.
        """
        from dflash_aot.runtime.metrics.prometheus import make_registry  # noqa: PLC0415  only services with metrics load it

        return make_registry(self.stats, model_name or self.manifest.target.reference)

    @property
    def manifest(self) -> Manifest:
        return self._bundle.manifest

    @property
    def executables(self) -> int:
        """Number of executables that serve, loaded or not."""
        return len(self._bundle.executables.order)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The target's end tokens, which end the answers to requests that name none."""
        return self._builder.default_stop_token_ids

    @property
    def target(self) -> Path:
        """The target's checkpoint directory."""
        return self.checkpoints["target"]

    @property
    def tokenizer(self) -> "Tokenizer":
        """The target's tokenizer, loaded at its first use. Raises BadCheckpoint."""
        check_process(self._process)
        return self._builder.tokenizer

    # -- life

    @property
    def failure(self) -> str | None:
        """Why requests are refused; None while the engine serves."""
        return self._queue.closed

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuses further requests and stops the thread; requests not done within `drain_seconds` end as errors.

        Frees the device memory of this engine. The memory stays where another host has failed and the thread still
        waits for a device.
        """
        if not drain_seconds >= 0:
            raise BadInput(f"drain_seconds is {drain_seconds!r}: a number of at least 0 is needed")
        self._thread.close(drain_seconds)
        self._finalizer.detach()
        OPEN_ENGINES.discard(self)
        self._thread.release()
        if not OPEN_ENGINES:  # engines share them
            CHAT_GUARD.close()
            GRAMMAR_GUARD.close()

    def __repr__(self) -> str:
        environment = self.manifest.environment
        devices = f"{environment.device_count} {environment.device_kind} device"
        state = "open" if self.failure is None else self.failure
        return (
            f"<Engine of {self._bundle.path} on {devices}{'s' * (environment.device_count > 1)}, "
            f"{self.manifest.grid.slots} slots, K up to {self.k}: {state}>"
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make_stream(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Stream:
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        return Stream(self._build_request(prompt, params, deltas.put, options), deltas, self)

    def _build_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        emit: Callable[[Delta], None],
        options: RequestOptions = DEFAULT_OPTIONS,
        submitted: float | None = None,
    ) -> Request:
        check_process(self._process)
        submitted = time.monotonic() if submitted is None else submitted
        try:
            return self._builder.build(
                prompt, params, emit, self._queue.note_cancel, options, submitted
            )
        except MemoryError as error:
            raise EngineFailed("no memory is left in this process for another request") from error

    def _submit(self, request: Request, options: RequestOptions = DEFAULT_OPTIONS) -> None:
        check_process(self._process)
        if options["wait"] is False:
            return self._queue.put(request)
        with self._waiting_for_place(request):
            self._queue.put_when_free(request).result(find_wait_seconds(options, request))

    async def _submit_async(self, request: Request, options: RequestOptions) -> None:
        check_process(self._process)
        if options["wait"] is False:
            return self._queue.put(request)
        with self._waiting_for_place(request):
            place = self._queue.put_when_free(request)
            if place.done():
                return place.result()
            # Not `wait_for`, which may swallow a cancel.
            async with asyncio.timeout(find_wait_seconds(options, request)):
                await asyncio.wrap_future(place)

    @contextmanager
    def _waiting_for_place(self, request: Request) -> Iterator[None]:
        """Withdraws a request whose caller stops waiting for a place. Raises QueueFull where none came free in time."""
        try:
            yield
        except TimeoutError as error:
            self._queue.withdraw(request, timed_out=True)
            limit = self._queue.limit
            raise QueueFull(
                f"the queue stayed full ({len(self._queue)} of {limit} waiting, max_waiting) for as long as the "
                "caller was ready to wait. Try again later, or open the engine with a larger max_waiting"
            ) from error
        except BaseException:
            self._queue.withdraw(request)
            raise
