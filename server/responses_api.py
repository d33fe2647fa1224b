"""/v1/responses of OpenAI's interface, for text and structured output: a chat by other names, over the same path.

Nothing is stored, so `previous_response_id` is refused; tools are offered by /v1/chat/completions only.
"""

import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, ValidationError

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
from dflash_aot.server.response_formats import JsonFields
from dflash_aot.server.responses import ResponseBuilder


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
        None, description=IGNORED
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description=IGNORED)


class ResponsesStreamOptions(StrictModel):
    include_obfuscation: Off | None = None


class ResponsesRequest(StrictModel):
    model: ModelName = None
    input: Annotated[
        Annotated[str, Field(min_length=1)]
        | Annotated[
            list[InputMessage], Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)
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
    reasoning: Reasoning | None = Field(None, description=IGNORED)
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
        messages += [
            {"role": message.role, "content": _to_chat_content(message.content)}
            for message in asked
        ]
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
        }
    )


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


@dataclass(kw_only=True)
class ResponsesBuilder(ResponseBuilder):
    """Builds the response to a request of /v1/responses. asked: see `list_asked`."""

    asked: JsonFields
    sent: int = 0  # events

    async def build(self) -> bytes:
        async with aclosing(self.generation.deltas()) as deltas:
            async for index, delta in deltas:
                self._add(index, delta)
        return msgspec.json.encode(self._format_response())

    async def events(self) -> AsyncGenerator[bytes]:
        """Named events: for each piece of text, and before and after them. An error becomes the last event."""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        try:
            for name in ("created", "in_progress"):
                yield self._make_event(name, response=self._format_response())
            yield self._make_event(
                "output_item.added", output_index=0, item={**self._format_message(), "content": []}
            )
            yield self._make_event("content_part.added", **place, part=_format_text(""))
            async with aclosing(self.generation.deltas()) as deltas:
                async for index, delta in deltas:
                    self._add(index, delta)
                    if delta.text:
                        yield self._make_event(
                            "output_text.delta", **place, delta=delta.text, logprobs=[]
                        )
            text = self.choices[0].text
            yield self._make_event("output_text.done", **place, text=text, logprobs=[])
            yield self._make_event("content_part.done", **place, part=_format_text(text))
            yield self._make_event("output_item.done", output_index=0, item=self._format_message())
            yield self._make_event(self._status, response=self._format_response())
        except NOT_ANSWERED:
            raise
        except BaseException as error:
            yield format_error_event(to_api_error(error, self.request_id), self.sent)

    @property
    def _item_id(self) -> str:
        return f"msg_{self.request_id}"

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

    def _format_message(self) -> JsonFields:
        content = [_format_text(self.choices[0].text)]
        return {
            "id": self._item_id, "type": "message", "role": "assistant", "status": self._status, "content": content
        }  # fmt: skip

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
            "output": [] if status == "in_progress" else [self._format_message()],
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
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "speculative": usage["speculative"],
        }


def format_error_event(error: ApiError, number: int) -> bytes:
    """OpenAI's event, with an additional field `error`, for which its client looks. number: of events sent before."""
    nested = msgspec.json.decode(error.body)["error"]
    flat = {"code": error.code, "message": nested["message"], "param": nested["param"]}
    event = {"type": "error", "sequence_number": number, **flat, "error": nested}
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _format_text(text: str) -> JsonFields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
