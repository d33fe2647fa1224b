"""Request schema: the bodies of HTTP requests as pydantic models, checked by FastAPI and published as OpenAPI.

Sampling parameters and their bounds come from `PARAMETERS`. The models are strict: "5" is not a number, and unknown
fields are refused. Of OpenAI's fields that are not supported, only the values that change nothing are accepted.

A body is checked on the event loop, and pydantic describes every error: for a million errors that takes seconds. So
the check of a list ends at its first error, and no object may have more than `MAX_FIELDS` fields.
"""

import re
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
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from dflash_aot.runtime.requests.sampling_params import PARAMETERS, TOKEN_ID_PATTERN
from dflash_aot.server.limits import MAX_CHOICES, MAX_STOPS

MAX_FIELDS = 64
MAX_METADATA = 16  # OpenAI's limit
MAX_TOOLS = 128  # OpenAI's limit
MAX_ENTRIES = 1024  # of lists and maps without another limit
IGNORED = "accepted and ignored"


def limit_entries(most: int) -> Callable[[Any], Any]:
    """A check of the size of a map before its entries are checked; pydantic's `max_length` checks it afterwards."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            sizes = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", sizes)
        return value

    return check


def explain(message: str) -> WrapValidator:
    """One message instead of pydantic's, which has an error for each member of a union, under internal names."""

    def check(value: Any, accept: ValidatorFunctionWrapHandler) -> Any:
        try:
            return accept(value)
        except ValidationError as error:
            text = message + _name_part(error) if isinstance(value, list) else message
            raise PydanticCustomError("other_form", "{message}", {"message": text}) from error

    return WrapValidator(check)


def _name_part(error: ValidationError) -> str:
    """Which part of a list is refused: its place, and its field if the field's name is plain."""
    for one in error.errors(include_url=False, include_input=False):
        first, *path = one["loc"]
        plain = [str(part) for part in path if re.fullmatch("[a-z0-9_]{1,64}", str(part))]
        if first != "str" and len(plain) == len(path) > 1:
            return f"; not accepted: {'.'.join(plain)}"
    return ""


def _refuse_zero(value: Any) -> Any:
    """Raises for 0, which Literal[False] accepts."""
    if value == 0 and value is not False:
        raise PydanticKnownError("bool_type")
    return value


Off = Annotated[Literal[False], BeforeValidator(_refuse_zero)]
Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Nothing = Annotated[
    list[None], Field(max_length=0, fail_fast=True), explain("none are accepted here: leave it out")
]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]  # also of schemas
ModelName = Annotated[
    str | None, Field(description="a name that /v1/models lists; default: the only model")
]
Bias = Annotated[
    float, Field(ge=PARAMETERS["logit_bias"].minimum, le=PARAMETERS["logit_bias"].maximum)
]
TokenName = Annotated[str, Field(pattern=TOKEN_ID_PATTERN)]
VariableName = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_]{0,63}$")]
Variables = Annotated[
    dict[VariableName, bool | int | float | str],
    Field(json_schema_extra={"additionalProperties": False}),
    explain("Input should be a map of names to texts, numbers, true or false"),
]
Biases = Annotated[dict[TokenName, Bias], Field(json_schema_extra={"additionalProperties": False})]
Stop = Annotated[
    Text | Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] | None,
    explain(f"Input should be a text, or a list of up to {MAX_STOPS}, none of them empty"),
]


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    _limit_fields = model_validator(mode="before")(limit_entries(MAX_FIELDS))


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="with include_usage: usage so far in every chunk"
    )
    include_obfuscation: Off | None = None


def declare(name: str, hint: str = "", **more: Any) -> Any:
    """A sampling parameter as a field that may be absent; `hint` is added to its description."""
    parameter = PARAMETERS[name]
    if parameter.type is float:
        more |= {"ge": parameter.minimum, "le": parameter.maximum}
    if parameter.type is int:
        # OpenAPI's bounds are float64, which cannot hold the largest seed, but can hold the number after it.
        end = 1 << 31 if parameter.maximum is None else int(parameter.maximum) + 1
        more |= {"ge": parameter.minimum, "lt": end}
    return Field(None, description=parameter.meaning + hint, **more)


_SCALARS: dict[str, Any] = {
    name: (parameter.type | None, declare(name))
    for name, parameter in PARAMETERS.items()
    if parameter.type in (int, float, bool, str)
}
ScalarFields: Any = create_model("ScalarFields", __base__=StrictModel, **_SCALARS)


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class NamedSchema(StrictModel):
    name: FunctionName
    description: str | None = Field(None, description=IGNORED)
    json_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="default: any object"
    )
    strict: bool | None = Field(None, description="accepted and ignored: every schema is followed")


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


OutputFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class SampledRequest(ScalarFields):
    """The fields of both kinds of requests. Sampling parameters stand here where HTTP requests differ from the table:
    in their default or in their form."""

    model: ModelName = None
    temperature: float | None = declare(
        "temperature", "; default 1, or 0 if the bundle cannot sample"
    )
    n: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="number of choices; the i-th has seed + i"
    )
    stop: Stop = declare("stop")
    logit_bias: Annotated[Biases | None, BeforeValidator(limit_entries(MAX_ENTRIES))] = declare(
        "logit_bias", max_length=MAX_ENTRIES
    )
    stop_token_ids: list[Token] | None = declare(
        "stop_token_ids", max_length=MAX_ENTRIES, fail_fast=True
    )
    structured_outputs: dict[str, Any] | None = declare("structured_outputs", max_length=1)
    response_format: OutputFormat | None = Field(
        None, description="the form of the output, as in OpenAI's interface"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description=IGNORED)


class CompletionRequest(SampledRequest):
    prompt: Annotated[
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)],
        explain(
            f"Input should be a text, a list of token ids, or a list of up to {MAX_CHOICES} of either; none empty"
        ),
    ] = Field(description="a text, token ids, or a list of either")
    max_tokens: int | None = declare("max_tokens", "; default 16, or as many as there is room for")
    logprobs: int | None = declare("logprobs")
    echo: bool | None = Field(
        None, description="begin the answer with the prompt, with logprobs with its own"
    )
    # Of OpenAI's interface, not supported: only values that change nothing are accepted.
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None


# A field that other servers put into what clients send back. It changes no text, so it may hold anything.
Ignored = Annotated[Any, Field(None, description=IGNORED, exclude=True)]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    annotations: Ignored = None


Content = str | Annotated[list[TextPart], Field(max_length=MAX_ENTRIES, fail_fast=True)]


class PastFunction(StrictModel):
    name: FunctionName
    arguments: str
    parsed_arguments: Ignored = None


class PastCall(StrictModel):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: PastFunction
    index: Ignored = None
    cache_control: Ignored = None


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Content | None,
        explain(
            f'Input should be a text, or a list of up to {MAX_ENTRIES} parts {{"type": "text", "text": ...}}'
        ),
    ] = Field(None, description="may be absent from an answer")
    name: str | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(
        None, description="of the call that a message of the role tool answers"
    )
    reasoning_content: str | None = Field(None, description="for chat templates that read it")
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    # Fields of a response message, which clients send back in conversations.
    refusal: Literal[""] | None = None
    cache_control: Ignored = None
    parsed: Ignored = None
    provider_specific_fields: Ignored = None
    reasoning_details: Ignored = None
    thinking_blocks: Ignored = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None


class Function(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments; default: any object"
    )
    strict: bool | None = Field(None, description=IGNORED)


class Tool(StrictModel):
    type: Literal["function"]
    function: Function
    cache_control: Ignored = None


class ChosenFunction(StrictModel):
    name: FunctionName


class ChosenTool(StrictModel):
    type: Literal["function"]
    function: ChosenFunction


class TokenizeRequest(StrictModel):
    """A request for the tokens of a text, or of a chat as the target's template renders it."""

    model: ModelName = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="for a prompt; default true")
    return_token_strs: bool | None = Field(None, description="also return the text of each token")
    messages: list[Message] | None = Field(
        None, min_length=1, max_length=MAX_ENTRIES, fail_fast=True
    )
    add_generation_prompt: Literal[True] | None = None
    chat_template_kwargs: Annotated[
        Variables | None, BeforeValidator(limit_entries(MAX_METADATA))
    ] = Field(None, max_length=MAX_METADATA)


class DetokenizeRequest(StrictModel):
    model: ModelName = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


class Prediction(StrictModel):
    type: Literal["content"]
    content: Annotated[
        Content,
        explain("Input should be a text, or a list of text parts"),
    ]


class ChatRequest(SampledRequest):
    messages: list[Message] = Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)
    max_tokens: int | None = declare("max_tokens", "; default: as many as there is room for")
    max_completion_tokens: int | None = declare("max_tokens", "; the newer name of max_tokens")
    logprobs: bool | None = Field(None, description="report the log-probability of each token")
    top_logprobs: int | None = declare("logprobs", "; only with logprobs")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ChosenTool | None,
        explain(
            'Input should be \'none\', \'auto\', \'required\', or {"type": "function", "function": {"name": ...}}'
        ),
    ] = Field(None, description="default: auto")
    parallel_tool_calls: bool | None = Field(None, description="default: true")
    prompt_cache_key: str | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    metadata: Annotated[dict[str, str] | None, BeforeValidator(limit_entries(MAX_METADATA))] = (
        Field(None, max_length=MAX_METADATA, description=IGNORED)
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="for gpt-oss; other models ignore it"
    )
    # Hints of OpenAI's interface that change no text here: drafting needs no prediction, and nothing is stored.
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=IGNORED)
    prediction: Prediction | None = Field(None, description=IGNORED)
    store: bool | None = Field(None, description=IGNORED)
    chat_template_kwargs: Annotated[
        Variables | None, BeforeValidator(limit_entries(MAX_METADATA))
    ] = Field(
        None,
        max_length=MAX_METADATA,
        description="variables of the chat template, such as enable_thinking of Qwen3",
    )
    # Of OpenAI's interface, not supported: only values that change nothing are accepted.
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    service_tier: Literal["auto", "default"] | None = None
    web_search_options: None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)
