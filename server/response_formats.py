"""Answers in OpenAI's two forms, whole and in chunks: from deltas to what is written as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from dflash_aot.runtime.requests.logprobs import TokenLogprob
from dflash_aot.runtime.requests.request import Delta
from dflash_aot.server.token_formatting import Speller
from dflash_aot.server.usage import Choice

Fields = Mapping[str, Any]


class Format(Protocol):
    """Of one kind of request. `opening`: of a choice, before anything is there of it."""

    speller: Speller
    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def opening(self, index: int) -> Fields | None: ...

    def describe_chunk(self, index: int, delta: Delta) -> Fields: ...

    def describe_choice(self, index: int, choice: Choice) -> Fields: ...


@dataclass
class CompletionFormat:
    """/v1/completions."""

    speller: Speller
    logprobs: bool
    offsets: dict[int, int] = field(default_factory=dict)
    prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def opening(self, index: int) -> Fields | None:
        return None

    def describe_chunk(self, index: int, delta: Delta) -> Fields:
        return self._describe(index, delta.text, delta.logprobs, delta.finish_reason)

    def describe_choice(self, index: int, choice: Choice) -> Fields:
        return self._describe(index, choice.text, choice.logprobs, choice.finish_reason)

    def _describe(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None) -> Fields:
        told = None
        if self.logprobs:
            told = self.speller.describe_completion(logprobs, self.offsets.get(index, 0))
            shown = (self.speller.show(one.token_id) for one in logprobs)
            self.offsets[index] = self.offsets.get(index, 0) + sum(map(len, shown))
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}


@dataclass
class ChatFormat:
    """/v1/chat/completions."""

    speller: Speller
    logprobs: bool
    prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def opening(self, index: int) -> Fields | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def describe_chunk(self, index: int, delta: Delta) -> Fields:
        told = self.speller.describe_chat(delta.logprobs) if self.logprobs else None
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return {"index": index, "delta": content, "logprobs": told, "finish_reason": delta.finish_reason}

    def describe_choice(self, index: int, choice: Choice) -> Fields:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self.speller.describe_chat(choice.logprobs) if self.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
