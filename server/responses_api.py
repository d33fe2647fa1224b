"""/v1/responses of OpenAI's interface, for text and structured output: a chat by other names, over the same path.

Nothing is stored, so `previous_response_id` is refused; tools are offered by /v1/chat/completions only.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, ValidationError

from dflash_aot.cache.errors import DflashError
from dflash_aot.runtime.requests.request import Delta
from dflash_aot.server.api_errors import (
    NOT_ANSWERED,
    ApiError,
    from_validation_errors,
    to_api_error,
)
from dflash_aot.server.request_schema import (
    IGNORED,
    MAX_ENTRIES,
    MAX_METADATA,
    ChatRequest,
    FunctionName,
    JsonObjectFormat,
    ModelName,
    Nothing,
    Off,
    StrictModel,
    TextFormat,
    Variables,
    declare,
    explain,
    limit_entries,
)
from dflash_aot.server.response_formats import JsonFields, read_parts
from dflash_aot.server.responses import ResponseBuilder
from dflash_aot.server.tool_parsers import AnswerParser, Part, Thinking


class InputPart(StrictModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class InputMessage(StrictModel):
    """A message of the conversation; earlier answers may be given as they came."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        str | Annotated[list[InputPart], Field(max_length=MAX_ENTRIES, fail_fast=True)],
        explain('Input should be a text, or a list of parts {"type": "input_text", "text": ...}'),
    ]
    id: str | None = Field(None, description=IGNORED)
    status: str | None = Field(None, description=IGNORED)
    phase: str | None = Field(None, description=IGNORED)


class ReasoningPart(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(StrictModel):
    """What the model thought before an earlier answer, as it came."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_ENTRIES, fail_fast=True)]
    summary: Nothing | None = None
    encrypted_content: None = None
    id: str | None = Field(None, description=IGNORED)
    status: str | None = Field(None, description=IGNORED)


class NamedSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    name: FunctionName
    description: str | None = Field(None, description=IGNORED)
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="accepted and ignored: every schema is followed")


class TextOptions(StrictModel):
    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=IGNORED)


class Reasoning(StrictModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="for gpt-oss; other models ignore it"
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description=IGNORED)


class ResponsesStreamOptions(StrictModel):
    include_obfuscation: Off | None = None


class ResponsesRequest(StrictModel):
    model: ModelName = None
    input: Annotated[
        Annotated[str, Field(min_length=1)]
        | Annotated[
            list[InputMessage | InputReasoning],
            Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True),
        ],
        explain(f"Input should be a text, or a list of up to {MAX_ENTRIES} messages"),
    ]
    instructions: str | None = Field(None, description="a message of the system before the others")
    max_output_tokens: int | None = declare("max_tokens", "; default: as many as there is room for")
    temperature: float | None = declare(
        "temperature", "; default 1, or 0 if the bundle cannot sample"
    )
    top_p: float | None = declare("top_p")
    text: TextOptions | None = Field(None, description="the form of the output")
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: Annotated[
        Variables | None, BeforeValidator(limit_entries(MAX_METADATA))
    ] = Field(None, max_length=MAX_METADATA, description="variables of the chat template")
    metadata: Annotated[dict[str, str] | None, BeforeValidator(limit_entries(MAX_METADATA))] = (
        Field(None, max_length=MAX_METADATA, description="returned as given")
    )
    user: str | None = Field(None, description=IGNORED)
    store: bool | None = Field(None, description="accepted and ignored: nothing is stored")
    prompt_cache_key: str | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    parallel_tool_calls: bool | None = Field(None, description=IGNORED)
    # Of OpenAI's interface, not supported: only values that change nothing are accepted.
    background: Off | None = None
    include: Nothing | None = None
    previous_response_id: None = None
    service_tier: Literal["auto", "default"] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    tools: Nothing | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    truncation: Literal["disabled"] | None = None


# Fields of chats, as their messages begin with or quote them, by other names.
RENAMED = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "structured_outputs.json": "text.format",
    "structured_outputs": "text.format",
}
NAMES = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in RENAMED))


def rename_fields(error: ApiError) -> ApiError:
    """A refusal of the chat, with the fields as /v1/responses names them."""
    param = None if error.param is None else NAMES.sub(_rename, error.param, count=1)
    if param is None and error.message.startswith("structured_outputs"):
        param = "text.format"
    message = NAMES.sub(_rename, error.message, count=1)
    return ApiError(error.status, message, error.code, param, error.retry)


def _rename(found: re.Match[str]) -> str:
    return RENAMED[found[0]]


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that gives the same answer. Raises ApiError for a chat that is too long."""
    try:
        return _to_chat(body)
    except ValidationError as error:
        raise rename_fields(from_validation_errors(error.errors())) from error


def _to_chat(body: ResponsesRequest) -> ChatRequest:
    asked = body.input
    messages: list[JsonFields] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    else:
        messages += _to_messages(asked)
    return ChatRequest.model_validate(
        {
            "model": body.model,
            "messages": messages,
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "response_format": _find_form(body),
            "stream": body.stream,
            "chat_template_kwargs": body.chat_template_kwargs,
            "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        }
    )


def _to_messages(items: Sequence[InputMessage | InputReasoning]) -> list[JsonFields]:
    """The messages of a chat: thinking belongs to the answer that follows it, or stands alone if none follows."""
    messages: list[JsonFields] = []
    thinking = ""
    for item in items:
        if isinstance(item, InputReasoning):
            thinking += "".join(part.text for part in item.content)
            continue
        message = {"role": item.role, "content": _to_chat_content(item.content)}
        if thinking and item.role == "assistant":
            message["reasoning_content"] = thinking
        elif thinking:
            messages.append(_to_thought(thinking))
        thinking = ""
        messages.append(message)
    return [*messages, _to_thought(thinking)] if thinking else messages


def _to_thought(thinking: str) -> JsonFields:
    return {"role": "assistant", "content": "", "reasoning_content": thinking}


def _find_form(body: ResponsesRequest) -> JsonFields | None:
    """The form of the output as chats name it."""
    form = body.text.format if body.text else None
    if isinstance(form, NamedSchemaFormat):
        return {
            "type": "json_schema",
            "json_schema": {"name": form.name, "schema": form.json_schema},
        }
    return None if form is None else form.model_dump()


def _to_chat_content(content: str | Sequence[InputPart]) -> str | list[JsonFields]:
    return (
        content
        if isinstance(content, str)
        else [{"type": "text", "text": part.text} for part in content]
    )


def list_asked(body: ResponsesRequest) -> JsonFields:
    """The fields of a request that its response repeats. Raises ApiError for a field that no response can hold."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    asked = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None}
        | (body.reasoning.model_dump() if body.reasoning else {}),
        "safety_identifier": body.safety_identifier,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.tool_choice or "auto",
    }
    for name, value in asked.items():
        try:
            msgspec.json.encode(value)
        except UnicodeEncodeError as error:  # half of a character, which a response cannot repeat
            raise ApiError(
                400, f"{name} has a text that is not Unicode: {error.reason}", "invalid_value", name
            ) from error
    return asked


# Fields that every response has with the values that change nothing.
FIXED_FIELDS: JsonFields = {
    "background": False,
    "frequency_penalty": 0,
    "max_tool_calls": None,
    "presence_penalty": 0,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}


@dataclass(frozen=True)
class OutputKind:
    """A kind of output items.

    Attributes:
        prefix: of their ids.
        text: the type of their texts.
    """

    prefix: str
    text: str


OUTPUT_KINDS = {
    "reasoning": OutputKind("rs", "reasoning_text"),
    "message": OutputKind("msg", "output_text"),
}


@dataclass
class OutputItem:
    """An item of the output. place: its index. kind: of OUTPUT_KINDS."""

    place: int
    kind: str
    text: str = ""


@dataclass(kw_only=True)
class ResponsesBuilder(ResponseBuilder):
    """Builds the response to a request of /v1/responses.

    Attributes:
        asked: see `list_asked`.
        sent: events.
        items: of the output so far. Only the last one may get more text.
        thinking_tokens: of the whole answer; known at its end.
        parser: of the answer; None where all of it is text.
    """

    asked: JsonFields
    sent: int = 0
    items: list[OutputItem] = field(default_factory=list)
    thinking_tokens: int = 0
    parser: AnswerParser | None = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parser = self.generation.request.make_parser()

    async def build(self) -> bytes:
        async with aclosing(self.generation.deltas()) as deltas:
            async for index, delta in deltas:
                self._add(index, delta)
                for kind, text in self._read(delta):
                    self._find_item(kind).text += text
        await self._count_thinking()
        return msgspec.json.encode(self._format_response())

    def _find_item(self, kind: str) -> OutputItem:
        """The item that a text belongs to: the last one, or a new one."""
        if not self.items or self.items[-1].kind != kind:
            self.items.append(OutputItem(len(self.items), kind))
        return self.items[-1]

    def _read(self, delta: Delta) -> Sequence[tuple[str, str]]:
        """What a delta adds to the items; of an answer without any text, an empty message."""
        parts: Sequence[Part] = [delta.text] if delta.text else []
        if self.parser:
            parts, _ = read_parts(self.parser, delta.text, delta.finish_reason)
        texts = [
            ("reasoning", part.text) if isinstance(part, Thinking) else ("message", part)
            for part in parts
            if isinstance(part, str | Thinking)  # calls: tools are refused
        ]
        return texts or ([("message", "")] if delta.finish_reason and not self.items else [])

    async def events(self) -> AsyncGenerator[bytes]:
        """Named events: for each piece of text, and before and after them. An error becomes the last event."""
        try:
            for name in ("created", "in_progress"):
                yield self._make_event(name, response=self._format_response())
            async with aclosing(self.generation.deltas()) as deltas:
                async for index, delta in deltas:
                    self._add(index, delta)
                    for kind, text in self._read(delta):
                        for event in self._add_text(kind, text):
                            yield event
            for item in self.items[-1:]:
                for event in self._end_item(item):
                    yield event
            await self._count_thinking()
            yield self._make_event(self._status, response=self._format_response())
        except NOT_ANSWERED:
            raise
        except BaseException as error:
            yield format_error_event(to_api_error(error, self.request_id), self.sent)

    def _add_text(self, kind: str, text: str) -> Iterator[bytes]:
        """Events of a text that an item gets; where the item is new, of the end of the last one, and of the item."""
        last = self.items[-1] if self.items else None
        item = self._find_item(kind)
        if item is not last:
            if last:
                yield from self._end_item(last)
            empty = {**self._format_item(item), "status": "in_progress", "content": []}
            yield self._make_event("output_item.added", output_index=item.place, item=empty)
            yield self._make_event(
                "content_part.added", **self._place_text(item), part=_format_text(item.kind, "")
            )
        item.text += text
        if text:
            yield self._make_text_event(item, "delta", delta=text)

    def _end_item(self, item: OutputItem) -> Iterator[bytes]:
        yield self._make_text_event(item, "done", text=item.text)
        yield self._make_event(
            "content_part.done", **self._place_text(item), part=_format_text(item.kind, item.text)
        )
        yield self._make_event(
            "output_item.done", output_index=item.place, item=self._format_item(item)
        )

    def _make_text_event(self, item: OutputItem, name: str, **fields: str) -> bytes:
        more: JsonFields = {"logprobs": []} if item.kind == "message" else {}
        name = f"{OUTPUT_KINDS[item.kind].text}.{name}"
        return self._make_event(name, **self._place_text(item), **fields, **more)

    def _place_text(self, item: OutputItem) -> JsonFields:
        return {"item_id": self._name_item(item), "output_index": item.place, "content_index": 0}

    def _name_item(self, item: OutputItem) -> str:
        return f"{OUTPUT_KINDS[item.kind].prefix}_{self.request_id}_{item.place}"

    @property
    def _status(self) -> str:
        reason = self.choices[0].finish_reason
        return (
            "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        )

    def _make_event(self, name: str, **fields: Any) -> bytes:
        event = {"type": f"response.{name}", "sequence_number": self.sent, **fields}
        self.sent += 1
        return f"event: response.{name}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"

    def _format_item(self, item: OutputItem) -> JsonFields:
        """An item that gets no more text."""
        own: JsonFields = {"role": "assistant"} if item.kind == "message" else {"summary": []}
        is_cut = self._status == "incomplete" and item is self.items[-1]
        return {
            "id": self._name_item(item),
            "type": item.kind,
            "status": "incomplete" if is_cut else "completed",
            **own,
            "content": [_format_text(item.kind, item.text)],
        }

    def _format_response(self) -> JsonFields:
        status = self._status
        params = self.generation.request.params
        usage = None if status == "in_progress" else self._format_tokens()
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "model": self.model.name,
            "output": [] if status == "in_progress" else [*map(self._format_item, self.items)],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": usage,
            **FIXED_FIELDS,
            **self.asked,
        }

    def _format_tokens(self) -> Mapping[str, Any]:
        usage = self._format_usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.thinking_tokens},
            "total_tokens": usage["total_tokens"],
            "speculative": usage["speculative"],
        }

    async def _count_thinking(self) -> None:
        """Counts the tokens of the thinking as the tokenizer writes it, without marker tokens; 0 if it fails."""
        thinking = "".join(item.text for item in self.items if item.kind == "reasoning")
        if thinking:
            # A tokenizer may fail at a text that no prompt has had. The answer is not lost for that.
            with suppress(DflashError):
                encode = self.model.engine.tokenizer.encode
                tokens = await asyncio.to_thread(encode, thinking, add_special_tokens=False)
                self.thinking_tokens = len(tokens)


def format_error_event(error: ApiError, number: int) -> bytes:
    """OpenAI's event, with an additional field `error`, for which its client looks. number: of events sent before."""
    nested = msgspec.json.decode(error.body)["error"]
    flat = {"code": error.code, "message": nested["message"], "param": nested["param"]}
    event = {"type": "error", "sequence_number": number, **flat, "error": nested}
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _format_text(kind: str, text: str) -> JsonFields:
    more: JsonFields = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": OUTPUT_KINDS[kind].text, "text": text, **more}
