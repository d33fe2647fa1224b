"""What may be asked, as pydantic models: FastAPI checks bodies against them, and publishes them as OpenAPI.

Strict: "5" is no number, and a field that nobody knows is refused. Of what OpenAI's interface has and this one has not,
only the value that asks for nothing is taken.

A body is checked on the event loop, and pydantic describes every flaw it finds: of a million that takes seconds. So
lists are left at their first one, and nothing may have more than `MOST_FIELDS` fields.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from dflash_aot.cache.sampling_state import MOST_TOP_LOGPROBS
from dflash_aot.runtime.requests.sampling_params import LEAST_TOP_P, MOST, MOST_BIAS, SEEDS
from dflash_aot.server.limits import MOST_CHOICES, MOST_STOPS

MOST_FIELDS = 64
MOST_METADATA = 16  # OpenAI's
MOST_ENTRIES = 1024  # of the lists and maps that no other limit holds short


def _refuse_more(most: int) -> Callable[[Any], Any]:
    """Maps with more entries, before one is looked at; `max_length` counts those that are sound."""

    def refuse(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            told = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", told)
        return value

    return refuse


def _say(words: str) -> WrapValidator:
    """Instead of what pydantic finds, which is a flaw for each of several forms, under names of its own."""

    def check(value: Any, accept: ValidatorFunctionWrapHandler) -> Any:
        try:
            return accept(value)
        except ValidationError as error:
            raise PydanticCustomError("other_form", "{words}", {"words": words}) from error

    return WrapValidator(check)


def _refuse_zero(value: Any) -> Any:
    """Which is False to Python."""
    if value == 0 and value is not False:
        raise PydanticKnownError("bool_type")
    return value


Off = Annotated[Literal[False], BeforeValidator(_refuse_zero)]
Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Nothing = Annotated[list[None], Field(max_length=0, fail_fast=True), _say("none are taken here: leave it out")]
Penalty = Annotated[float, Field(ge=-MOST, le=MOST)]
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
TokenName = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
VariableName = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_]{0,63}$")]
Variables = Annotated[
    dict[VariableName, bool | int | float | str],
    Field(json_schema_extra={"additionalProperties": False}),
    _say("Input should be a map of names to texts, numbers, true or false"),
]
Biases = Annotated[dict[TokenName, Bias], Field(json_schema_extra={"additionalProperties": False})]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    _limited = model_validator(mode="before")(_refuse_more(MOST_FIELDS))


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Off | None = None


class Sampled(Strict):
    """What both kinds of requests have."""

    model: str | None = Field(None, description="what /v1/models lists; without it, just that")
    temperature: float | None = Field(
        None, ge=0, le=MOST, description="0 takes the likeliest; default 1, of a bundle that cannot sample 0"
    )
    top_p: float | None = Field(None, ge=LEAST_TOP_P, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES, description="choices; with a seed the i-th has seed + i")
    stop: Annotated[
        Text | Annotated[list[Text], Field(max_length=MOST_STOPS, fail_fast=True)] | None,
        _say(f"Input should be a text, or a list of up to {MOST_STOPS}, none of them empty"),
    ] = None
    seed: int | None = Field(None, ge=-SEEDS, lt=SEEDS)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[Biases | None, BeforeValidator(_refuse_more(MOST_ENTRIES))] = Field(
        None, max_length=MOST_ENTRIES
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="taken and not looked at")
    # Beyond OpenAI's.
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1 / MOST, le=MOST)
    stop_token_ids: list[Token] | None = Field(
        None, max_length=MOST_ENTRIES, fail_fast=True, description="instead of the model's own"
    )
    k: int | None = Field(None, ge=0, lt=1 << 31, description="drafted tokens to verify per round, one of the grid's")
    trace: bool | None = Field(None, description="tell of every round: what was drafted, and what became of it")


class CompletionRequest(Sampled):
    prompt: Annotated[
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)],
        _say(f"Input should be a text, a list of token ids, or a list of up to {MOST_CHOICES} of either; none empty"),
    ] = Field(description="text, token ids, or several of them")
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31, description="default 16, or what room there is")
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    # Known, and not done here.
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Off | None = None
    suffix: Literal[""] | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MOST_ENTRIES, fail_fast=True)],
        _say(f'Input should be a text, or a list of up to {MOST_ENTRIES} parts {{"type": "text", "text": ...}}'),
    ]
    name: str | None = None
    # What a client sends back with an answer of ours.
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None


class TextFormat(Strict):
    type: Literal["text"]


class ChatRequest(Sampled):
    messages: list[Message] = Field(min_length=1, max_length=MOST_ENTRIES, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31, description="default: what room there is")
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31, description="the same, by its newer name")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS, description="with logprobs only")
    prompt_cache_key: str | None = Field(None, description="taken and not looked at")
    safety_identifier: str | None = Field(None, description="taken and not looked at")
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_refuse_more(MOST_METADATA))] = Field(
        None, max_length=MOST_METADATA, description="taken and not looked at"
    )
    chat_template_kwargs: Annotated[Variables | None, BeforeValidator(_refuse_more(MOST_METADATA))] = Field(
        None, max_length=MOST_METADATA, description="for the template to read, as enable_thinking of Qwen3's"
    )
    # Known, and not done here.
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: None = None
    web_search_options: None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)
    store: Off | None = None
