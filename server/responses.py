"""Response building: one JSON object or server-sent events, from the deltas of a generation."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dflash_aot.cache.sampling_state import MAX_TOP_LOGPROBS
from dflash_aot.runtime.requests.request import Delta
from dflash_aot.server.api_errors import NOT_ANSWERED, internal_error, shutting_down, timed_out, to_api_error
from dflash_aot.server.response_formats import ChoiceOutput, JsonFields, ResponseFormat, format_usage
from dflash_aot.server.served_model import ServedModel
from dflash_aot.server.server_state import ServerState
from dflash_aot.server.streaming import Generation

logger = logging.getLogger(__name__)
MAX_SCORES_AT_ONCE = 4096  # log-probabilities that are formatted on the event loop: some milliseconds
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
            if self.state.draining:
                raise shutting_down()
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
        return msgspec.json.encode({**self._frame(self.format.object_name, formatted), "usage": self._format_usage()})

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
        return bool(delta.text or delta.finish_reason or delta.logprobs or delta.prompt_logprobs or self._traced)

    def _format_rounds(self, delta: Delta) -> Sequence[Any]:
        return self.format.tokens.format_rounds(delta) if self._traced else []

    def _format_trace(self, rounds: Sequence[Any]) -> JsonFields:
        return {"dflash": {"rounds": rounds, "seconds": time.monotonic() - self.began}} if self._traced else {}

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
