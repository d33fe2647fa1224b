"""Response schema: pydantic models for the published OpenAPI only. `response_formats` makes the responses."""

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorFields


# Further answers of each operation, by status.
ERROR_STATUSES = {
    400: "the request is invalid",
    401: "the API key is missing or unknown",
    403: "the request is addressed to another host",
    404: "there is no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the content type is not JSON",
    429: "this API key has too many choices in progress",
    500: "the server failed",
    503: "the server is starting, is shutting down, or has too many requests waiting",
    504: "the request took too long",
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning, "model": Error} for status, meaning in ERROR_STATUSES.items()
}


class PredictionDetails(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class PromptDetails(BaseModel):
    cached_tokens: int


class Speculative(BaseModel):
    rounds: int
    drafted: int
    accepted: int
    tau: float | None
    acceptance_histogram: list[int]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: PredictionDetails
    speculative: Speculative


class Token(BaseModel):
    id: int
    text: str


class Round(BaseModel):
    k: int
    accepted: int
    drafted: list[Token]
    committed: list[Token]
    prefill: bool = False


class Trace(BaseModel):
    """Only with `trace`."""

    rounds: list[Round]
    seconds: float  # since the request arrived


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(BaseModel):
    logprob: float
    decoded_token: str


# Of each token of the prompt, by token id: the token and the likeliest tokens in its place; null for the first token.
PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = None
    dflash: Trace | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[None]
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = None
    dflash: Trace | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """Where the chat template marks thinking, what the model thought."""

    id: str
    type: Literal["reasoning"]
    status: Literal["completed", "incomplete"]
    summary: list[None]
    content: list[ReasoningText]


class ResponsesAnswer(BaseModel):
    """A response of /v1/responses. Fields not listed repeat those of the request, or are the same in all responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None  # null where max_output_tokens cut it
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputMessage | OutputReasoning]
    temperature: float
    top_p: float
    usage: dict[str, Any]


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    dflash: dict[str, Any]  # see `ServedModel.list_properties`


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    status: Literal["loading", "ready", "draining", "stalled", "failed"]
    phase: str | None = None
    weights: str | None = None  # their fingerprint


class TokenizedText(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenText(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str
