"""The HTTP application: routes of the OpenAI-compatible API, tokenization, health, metrics, and error handlers."""

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from dflash_aot.cache.errors import BadInput, DflashError, EngineFailed
from dflash_aot.runtime.bounded_worker import Leaving
from dflash_aot.server import response_schema
from dflash_aot.server.api_errors import (
    ApiError,
    from_validation_errors,
    invalid_json,
    shutting_down,
    timed_out,
    to_api_error,
)
from dflash_aot.server.limits import KeyLimits
from dflash_aot.server.middleware import RequestMiddleware, add_demo_page
from dflash_aot.server.request_parsing import (
    Body,
    ParsedRequest,
    check_length,
    check_model_name,
    count_choices,
    encode_text,
    name_output_form,
    parse_and_compile,
    parse_chat,
    parse_completion,
    render_messages,
)
from dflash_aot.server.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StrictModel,
    TokenizeRequest,
)
from dflash_aot.server.response_formats import ChatFormat, CompletionFormat, ResponseFormat
from dflash_aot.server.response_schema import ERROR_RESPONSES, TokenizedText, TokenText, Version
from dflash_aot.server.responses import (
    ChoicesBuilder,
    ClientDisconnected,
    EventStream,
    Generation,
    ResponseBuilder,
    cancel_on_disconnect,
    start_generation,
)
from dflash_aot.server.responses_api import (
    ResponsesBuilder,
    ResponsesRequest,
    list_asked,
    rename_fields,
    to_chat,
)
from dflash_aot.server.served_model import ServedModel, ServerState
from dflash_aot.server.token_formatting import TokenFormatter

# The fields that the refusal of a misspelt field may suggest.
BODIES: Mapping[str, type[StrictModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
}

# -- tokenization: /tokenize, /detokenize and /version, as vLLM has them


def add_tokenization_routes(app: FastAPI, state: ServerState, key_limits: KeyLimits) -> None:
    """Adds the routes. Texts of a key are tokenized one at a time, and take turns with the key's prompts."""

    @app.post(
        "/tokenize",
        responses={**ERROR_RESPONSES, 200: {"model": TokenizedText}},
        response_model=None,
    )
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        work = partial(tokenize_text, state.model, body)
        return Response(
            await key_limits.run_in_turn(request.state.key, work), media_type="application/json"
        )

    @app.post(
        "/detokenize", responses={**ERROR_RESPONSES, 200: {"model": TokenText}}, response_model=None
    )
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        work = partial(detokenize_tokens, state.model, body)
        return Response(
            await key_limits.run_in_turn(request.state.key, work), media_type="application/json"
        )

    @app.get("/version", responses={200: {"model": Version}}, response_model=None)
    async def report_version() -> Response:
        return JSONResponse({"version": importlib.metadata.version("dflash-aot")})


# Both responses are encoded in the thread that finds the tokens: they may be long, and the event loop must not wait.


def tokenize_text(model: ServedModel, body: TokenizeRequest) -> bytes:
    """A response with the tokens of a text, or of a chat as the model reads it. Raises ApiError, BadInput."""
    tokens = _find_tokens(model, body)
    wanted = tokens if body.return_token_strs else ()
    texts = [model.token_formatter.to_text(token) for token in wanted]
    fields = {
        "count": len(tokens),
        "max_model_len": model.capacity,
        "tokens": tokens,
        "token_strs": texts if body.return_token_strs else None,
    }
    return msgspec.json.encode(fields)


def _find_tokens(model: ServedModel, body: TokenizeRequest) -> list[int]:
    check_model_name(model, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "one of prompt and messages is needed", "invalid_value", "prompt")
    if body.messages is not None:
        return list(render_messages(model, body.messages, body.chat_template_kwargs or {}))
    assert body.prompt is not None
    return encode_text(model, body.prompt, body.add_special_tokens is not False)


def detokenize_tokens(model: ServedModel, body: DetokenizeRequest) -> bytes:
    """A response with the text of tokens, special tokens written out. Raises ApiError."""
    check_model_name(model, body.model)
    vocab = model.engine.manifest.target.facts.decoder.vocab
    if unknown := next((token for token in body.tokens if token >= vocab), None):
        raise ApiError(
            400,
            f"token {unknown}: the target's tokens are 0 to {vocab - 1}",
            "invalid_value",
            "tokens",
        )
    check_length(model, len(body.tokens), "tokens")
    text = model.require_tokenizer("tokens").decode_with_special(body.tokens)
    return msgspec.json.encode({"prompt": text})


# -- the application

CLIENT_DISCONNECTED = 499  # nginx's status, for the access log
# Without a schema: since OpenAPI 3.2 it would describe a single event.
EVENTS: dict[str, dict[str, Any]] = {"text/event-stream": {}}


def create_app(state: ServerState, hosts: frozenset[str] | None = None) -> RequestMiddleware:
    """The whole server as an ASGI application. hosts: see `RequestMiddleware`."""
    app = FastAPI(
        title="dflash-aot",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    key_limits = KeyLimits(state.limits)
    add_demo_page(app)
    _add_generation_routes(app, state, key_limits)
    add_tokenization_routes(app, state, key_limits)
    _add_state_routes(app, state)
    _add_error_handlers(app, state)
    return RequestMiddleware(app, state, key_limits, hosts)


def _add_generation_routes(app: FastAPI, state: ServerState, key_limits: KeyLimits) -> None:
    @app.post(
        "/v1/completions",
        responses={
            **ERROR_RESPONSES,
            200: {"model": response_schema.Completion, "content": EVENTS},
        },
        response_model=None,
    )
    async def complete(body: CompletionRequest, request: Request) -> Response:
        def make_format(tokens: TokenFormatter, parsed: ParsedRequest) -> ResponseFormat:
            return CompletionFormat(
                tokens, parsed, body.logprobs is not None, body.prompt_logprobs is not None
            )

        make_builder = partial(_make_choices_builder, body, make_format)
        return await _respond(state, key_limits, request, body, parse_completion, make_builder)

    @app.post(
        "/v1/responses",
        responses={
            **ERROR_RESPONSES,
            200: {"model": response_schema.ResponsesAnswer, "content": EVENTS},
        },
        response_model=None,
    )
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        make_builder = partial(ResponsesBuilder, asked=list_asked(body))
        chat = to_chat(body)
        try:
            return await _respond(state, key_limits, request, chat, parse_chat, make_builder)
        except (ApiError, BadInput) as error:
            raise rename_fields(to_api_error(error, request.state.request_id)) from error

    @app.post(
        "/v1/chat/completions",
        responses={
            **ERROR_RESPONSES,
            200: {"model": response_schema.ChatCompletion, "content": EVENTS},
        },
        response_model=None,
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        def make_format(tokens: TokenFormatter, parsed: ParsedRequest) -> ResponseFormat:
            return ChatFormat(
                tokens, bool(body.logprobs), parsed.make_parser, body.prompt_logprobs is not None
            )

        make_builder = partial(_make_choices_builder, body, make_format)
        return await _respond(state, key_limits, request, body, parse_chat, make_builder)


def _make_choices_builder(
    body: CompletionRequest | ChatRequest,
    make_format: Callable[[TokenFormatter, ParsedRequest], ResponseFormat],
    *,
    model: ServedModel,
    generation: Generation,
    **others: Any,
) -> ResponseBuilder:
    options = body.stream_options
    return ChoicesBuilder(
        model=model,
        generation=generation,
        format=make_format(model.token_formatter, generation.request),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        **others,
    )


async def _respond(
    state: ServerState,
    key_limits: KeyLimits,
    request: Request,
    body: Body,
    parse: Callable[[ServedModel, Body], ParsedRequest],
    make_builder: Callable[..., ResponseBuilder],
) -> Response:
    """Generates all choices of a request: as a stream of events, or one JSON object. Raises ApiError, BadInput."""
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options without stream", "invalid_value", "stream_options")
    model = state.model
    key = request.state.key
    body.cache_salt = state.keys.salt_prefix(key, body.cache_salt)
    choices = count_choices(body)
    if choices > (most := model.engine.manifest.grid.slots + state.config.max_waiting):
        message = f"{choices} choices: this server holds {most} at a time (slots and --max_waiting)"
        raise ApiError(400, message, "invalid_value", "n")
    admission = key_limits.admit(key, choices)
    leaving = Leaving()
    work = partial(parse_and_compile, parse, model, body, key, leaving)
    parsing = partial(key_limits.run_in_turn, key, work)
    deadline = request.state.began + state.limits.request_seconds
    starting = start_generation(model.engine, admission, parsing, deadline)
    try:
        generation = await cancel_on_disconnect(request.receive, starting)
    except ClientDisconnected:
        leaving.leave()
        return Response(status_code=CLIENT_DISCONNECTED)
    except TimeoutError as error:
        leaving.leave()
        raise timed_out(state.limits.request_seconds) from error
    except BadInput as error:
        if (named := name_output_form(body, error)) is None:
            raise
        raise named from error
    builder = make_builder(
        state=state,
        model=model,
        generation=generation,
        request_id=request.state.request_id,
        began=request.state.began,
    )
    if body.stream:
        return EventStream(builder.events(), generation.close)
    with generation:
        try:
            return Response(
                await cancel_on_disconnect(request.receive, builder.build()),
                media_type="application/json",
            )
        except ClientDisconnected:
            return Response(status_code=CLIENT_DISCONNECTED)


def _add_state_routes(app: FastAPI, state: ServerState) -> None:
    @app.get(
        "/v1/models",
        responses={**ERROR_RESPONSES, 200: {"model": response_schema.Models}},
        response_model=None,
    )
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_format_model(state)]})

    @app.get(
        "/v1/models/{model:path}",
        responses={**ERROR_RESPONSES, 200: {"model": response_schema.Model}},
        response_model=None,
    )
    async def show_model(model: str) -> Response:
        check_model_name(state.model, model)
        return JSONResponse(_format_model(state))

    @app.get(
        "/health",
        responses={200: {"model": response_schema.Health}, 503: {"model": response_schema.Health}},
        response_model=None,
    )
    @app.head("/health", include_in_schema=False)
    async def report_health() -> Response:
        status = state.status
        more = {"phase": state.phase} if status == "loading" else {}
        if status == "ready":
            more["weights"] = state.model.engine.weights
        return JSONResponse({"status": status, **more}, 200 if status == "ready" else 503)

    @app.get("/metrics", include_in_schema=False)
    async def report_metrics() -> Response:
        return Response(generate_latest(state.model.registry), media_type=CONTENT_TYPE_LATEST)


def _format_model(state: ServerState) -> Mapping[str, Any]:
    model = state.model
    return {
        "id": model.name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "dflash-aot",
        "max_model_len": model.capacity,
        "dflash": model.list_properties(),
    }


def _add_error_handlers(app: FastAPI, state: ServerState) -> None:
    """All errors have OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        body = BODIES.get(request.url.path)
        known = body.model_fields if body else ()
        return _make_error_response(from_validation_errors(error.errors(), known))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # FastAPI's, for a body that it cannot parse
            return _make_error_response(invalid_json())
        path = request.url.path
        messages = {404: f"{path} does not exist", 405: f"{path} does not accept {request.method}"}
        message = messages.get(error.status_code, str(error.detail))
        response = _make_error_response(ApiError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ApiError)
    @app.exception_handler(DflashError)
    @app.exception_handler(Exception)
    async def refuse(request: Request, error: Exception) -> Response:
        if state.status == "draining" and isinstance(
            error, EngineFailed
        ):  # the engine was closed meanwhile
            return _make_error_response(shutting_down())
        return _make_error_response(to_api_error(error, request.state.request_id))


def _make_error_response(error: ApiError) -> Response:
    return Response(error.body, error.status, dict(error.headers))
