"""Responses: submits the choices of a request, and builds one JSON object or server-sent events from their deltas."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_aot.cache.sampling_state import MAX_TOP_LOGPROBS
from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.requests.request import GRAMMAR_FAILURE, AsyncStream, Delta
from dflash_aot.server.api_errors import (
    NOT_ANSWERED,
    ApiError,
    internal_error,
    shutting_down,
    timed_out,
    to_api_error,
)
from dflash_aot.server.request_parsing import ParsedRequest
from dflash_aot.server.response_formats import (
    ChoiceOutput,
    JsonFields,
    ResponseFormat,
    format_usage,
)
from dflash_aot.server.served_model import ServedModel, ServerState

logger = logging.getLogger(__name__)

# -- streaming: submits the choices of a request, merges their deltas, sends events, stops when the client disconnects

T = TypeVar("T")


class Generation:
    """The running choices of one request. `close` frees their slots and their places in the limit of the key."""

    def __init__(
        self, request: ParsedRequest, streams: Sequence[AsyncStream], close: Callable[[], None]
    ):
        self.request = request
        self._streams = streams
        self.close = close

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yields (index of the choice, delta) in the order of commits, until all choices have ended."""
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield 0, delta
            return
        pending = {
            asyncio.ensure_future(anext(stream)): index
            for index, stream in enumerate(self._streams)
        }
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=pending.__getitem__):
                    index = pending.pop(future)
                    delta = future.result()
                    if delta.finish_reason is None:
                        pending[asyncio.ensure_future(anext(self._streams[index]))] = index
                    yield index, delta
        finally:
            for future in pending:
                future.cancel()


async def start_generation(
    engine: Engine,
    admission: AbstractContextManager[None],
    parse: Callable[[], Awaitable[ParsedRequest]],
    deadline: float,
) -> Generation:
    """Submits all choices of a request, or none.

    admission: entered before `parse`, left when the generation is closed. deadline: when the request is cancelled, in
    monotonic seconds. Raises what `admission` and `parse` raise, TimeoutError where parsing takes until `deadline`,
    QueueFull, EngineFailed.
    """
    with ExitStack() as stack:
        stack.enter_context(admission)
        async with asyncio.timeout(deadline - time.monotonic()):
            request = await parse()
        streams = []
        for prompt, params in request.list_choices():
            stream = await engine.asubmit(
                prompt,
                params,
                deadline=max(deadline - time.monotonic(), 0.001),
                grammar=request.grammar,
                markers=request.channels.surrogates if request.channels else {},
            )
            stack.callback(stream.close)
            streams.append(stream)
        return Generation(request, streams, stack.pop_all().close)


class ClientDisconnected(Exception):
    """The client has closed the connection."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises ClientDisconnected, and what `work` raises.
    """
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events; `close` is called when they end, and when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None]):
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
            await self._events.aclose()


# -- responses

# Log-probabilities that are formatted on the event loop: some milliseconds.
MAX_SCORES_AT_ONCE = 4096
END = b"data: [DONE]\n\n"


@dataclass(kw_only=True)
class ResponseBuilder(ABC):
    """Builds the response to one request, which arrived at `began` in monotonic seconds."""

    state: ServerState
    model: ServedModel
    generation: Generation
    request_id: str
    began: float
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[ChoiceOutput] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [ChoiceOutput() for _ in range(self.generation.request.choice_count)]

    @abstractmethod
    async def build(self) -> bytes:
        """The whole response as JSON, when all choices are complete. Raises ApiError."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events, with an error event where an error ends the answer."""

    def _add(self, index: int, delta: Delta) -> None:
        """Raises ApiError for a choice that was cancelled or failed."""
        self.choices[index].add(delta)
        if delta.finish_reason == "cancelled":
            raise timed_out(self.state.limits.request_seconds)
        if delta.finish_reason == "error":
            if self.state.status == "draining":
                raise shutting_down()
            if (delta.error or "").startswith(GRAMMAR_FAILURE):
                raise ApiError(400, delta.error or "", "invalid_value")
            logger.error("%s ended in an error: %s", self.request_id, delta.error)
            raise internal_error(self.request_id, "engine_failed")

    def _format_usage(self) -> JsonFields:
        request = self.generation.request
        return format_usage(request.prompt_tokens, self.choices, request.n)


@dataclass(kw_only=True)
class ChoicesBuilder(ResponseBuilder):
    """Builds a response of /v1/completions or /v1/chat/completions: a list of choices."""

    format: ResponseFormat
    include_usage: bool = False  # in a stream, in its last chunk; other responses always have it
    continuous_usage: bool = False  # with `include_usage`: in every chunk, so far

    async def build(self) -> bytes:
        async with aclosing(self.generation.deltas()) as deltas:
            traces: list[list[Any]] = [[] for _ in self.choices]
            async for index, delta in deltas:
                self._add(index, delta)
                traces[index] += self._format_rounds(delta)
        if sum(choice.count_scores() for choice in self.choices) > MAX_SCORES_AT_ONCE:
            return await asyncio.to_thread(self._format_choices, traces)
        return self._format_choices(traces)

    def _format_choices(self, traces: Sequence[Sequence[Any]]) -> bytes:
        formatted = [
            {**self.format.format_choice(index, choice), **self._format_trace(trace)}
            for index, (choice, trace) in enumerate(zip(self.choices, traces, strict=True))
        ]
        return msgspec.json.encode(
            {**self._frame(self.format.object_name, formatted), "usage": self._format_usage()}
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events, one per delta. An error becomes the last event before [DONE]."""
        try:
            for index in range(len(self.choices)):
                if first := self.format.format_first_chunk(index):
                    yield self._make_chunk([first])
            async with aclosing(self.generation.deltas()) as deltas:
                async for index, delta in deltas:
                    self._add(index, delta)
                    if not self._is_shown(delta):
                        continue
                    if len(delta.prompt_logprobs) > MAX_SCORES_AT_ONCE // (MAX_TOP_LOGPROBS + 1):
                        yield await asyncio.to_thread(self._format_delta, index, delta)
                    else:
                        yield self._format_delta(index, delta)
            if self.include_usage:
                yield self._make_chunk([], self._format_usage())
        except NOT_ANSWERED:
            raise
        except BaseException as error:
            yield _make_event(to_api_error(error, self.request_id).body)
        yield END

    def _format_delta(self, index: int, delta: Delta) -> bytes:
        trace = self._format_trace(self._format_rounds(delta))
        return self._make_chunk([{**self.format.format_chunk(index, delta), **trace}])

    @property
    def _traced(self) -> bool:
        return self.generation.request.params.trace

    def _is_shown(self, delta: Delta) -> bool:
        """Incomplete characters, and what may be the beginning of a stop text, are held back: such deltas are empty."""
        return bool(
            delta.text
            or delta.finish_reason
            or delta.logprobs
            or delta.prompt_logprobs
            or self._traced
        )

    def _format_rounds(self, delta: Delta) -> Sequence[Any]:
        return self.format.tokens.format_rounds(delta) if self._traced else []

    def _format_trace(self, rounds: Sequence[Any]) -> JsonFields:
        return (
            {"dflash": {"rounds": rounds, "seconds": time.monotonic() - self.began}}
            if self._traced
            else {}
        )

    def _make_chunk(self, choices: Sequence[JsonFields], usage: JsonFields | None = None) -> bytes:
        if self.continuous_usage:
            usage = self._format_usage()
        usage_field = {"usage": usage} if self.include_usage else {}
        frame = self._frame(self.format.chunk_object_name, choices)
        return _make_event(msgspec.json.encode({**frame, **usage_field}))

    def _frame(self, object_name: str, choices: Sequence[JsonFields]) -> JsonFields:
        return {
            "id": f"{self.format.id_prefix}-{self.request_id}",
            "object": object_name,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
            "choices": choices,
        }


def _make_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
