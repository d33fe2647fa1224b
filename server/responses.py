"""From an answer on its way to what is sent: one JSON object, or server-sent events as rounds are committed."""

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dflash_aot.runtime.requests.request import Delta
from dflash_aot.server.api_errors import Problem, inside, report_error, shutting_down
from dflash_aot.server.generation import Answer
from dflash_aot.server.response_formats import Fields, Format
from dflash_aot.server.served_model import Model
from dflash_aot.server.server_state import Service
from dflash_aot.server.usage import Choice, describe_usage

logger = logging.getLogger(__name__)
END = b"data: [DONE]\n\n"


@dataclass
class Reply:
    """To one request, which came at `began`, a monotonic time."""

    service: Service
    model: Model
    answer: Answer
    format: Format
    request_id: str
    began: float
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(self.answer.asking.choices)]

    async def whole(self) -> bytes:
        """When all of it is there. Raises Problem."""
        async with aclosing(self.answer.deltas()) as deltas:
            traces: list[list[Any]] = [[] for _ in self.choices]
            async for index, delta in deltas:
                self._take(index, delta)
                traces[index] += self._describe_rounds(delta)
        told = [
            {**self.format.describe_choice(index, choice), **self._trace(trace)}
            for index, (choice, trace) in enumerate(zip(self.choices, traces, strict=True))
        ]
        return msgspec.json.encode({**self._frame(self.format.whole_object, told), "usage": self._usage()})

    async def events(self) -> AsyncGenerator[bytes]:
        """What goes wrong on the way is the last event but [DONE]."""
        try:
            for index in range(len(self.choices)):
                if opening := self.format.opening(index):
                    yield self._chunk([opening])
            async with aclosing(self.answer.deltas()) as deltas:
                async for index, delta in deltas:
                    self._take(index, delta)
                    if self._says_something(delta):
                        trace = self._trace(self._describe_rounds(delta))
                        yield self._chunk([{**self.format.describe_chunk(index, delta), **trace}])
            if self.include_usage:
                yield self._chunk([], self._usage())
        except Exception as error:
            yield _event(report_error(error, self.request_id).body)
        yield END

    def _take(self, index: int, delta: Delta) -> None:
        """Raises Problem for one that did not end as it should."""
        self.choices[index].deltas.append(delta)
        if delta.finish_reason == "cancelled":
            limit = self.service.limits.request_seconds
            raise Problem(504, f"this took longer than {limit:g} s, as long as a request may", "timeout")
        if delta.finish_reason == "error":
            if self.service.draining:
                raise shutting_down()
            logger.error("%s ended in an error: %s", self.request_id, delta.error)
            raise inside(self.request_id, "engine_failed")

    def _says_something(self, delta: Delta) -> bool:
        """A part of a character, or what may begin a stop text, is not shown yet."""
        return bool(delta.text or delta.finish_reason or delta.logprobs or self.answer.asking.params.trace)

    def _describe_rounds(self, delta: Delta) -> Sequence[Any]:
        return self.format.speller.describe_rounds(delta) if self.answer.asking.params.trace else []

    def _trace(self, rounds: Sequence[Any]) -> Fields:
        if not self.answer.asking.params.trace:
            return {}
        return {"dflash": {"rounds": rounds, "seconds": time.monotonic() - self.began}}

    def _usage(self) -> Fields:
        return describe_usage(self.answer.asking.prompt_tokens, self.choices)

    def _chunk(self, choices: Sequence[Fields], usage: Fields | None = None) -> bytes:
        told = {"usage": usage} if self.include_usage else {}
        return _event(msgspec.json.encode({**self._frame(self.format.chunk_object, choices), **told}))

    def _frame(self, kind: str, choices: Sequence[Fields]) -> Fields:
        return {
            "id": f"{self.format.prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
            "choices": choices,
        }


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
