"""The paths of the server, and what each answers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from dflash_aot.cache.errors import DflashError, EngineFailed
from dflash_aot.server import response_schema
from dflash_aot.server.api_errors import Problem, describe_flaws, report_error, shutting_down
from dflash_aot.server.demo_page import router as page
from dflash_aot.server.generation import start_answer
from dflash_aot.server.key_limits import Callers
from dflash_aot.server.middleware import Guard
from dflash_aot.server.request_parsing import Asking, check_name, count_choices, read_chat, read_completion
from dflash_aot.server.request_schema import ChatRequest, CompletionRequest
from dflash_aot.server.response_formats import ChatFormat, CompletionFormat, Format
from dflash_aot.server.responses import Reply
from dflash_aot.server.served_model import Model
from dflash_aot.server.server_state import Service
from dflash_aot.server.streaming import ClientGone, EventStream, finish_unless_gone
from dflash_aot.server.token_formatting import Speller

Body = TypeVar("Body", CompletionRequest, ChatRequest)
GONE = 499  # nginx's number for it; nobody reads it
REFUSALS = {
    400: "what was asked cannot be done as it was asked",
    401: "no API key, or none of this server's",
    403: "addressed to another host",
    404: "no such model",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "the body is no JSON by its content type",
    429: "this API key has too much under way",
    500: "a fault of the server's",
    503: "starting, shutting down, or too many requests are waiting",
    504: "it took longer than a request may",
}
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "model": response_schema.Error} for status, words in REFUSALS.items()
}
EVENTS: dict[str, dict[str, Any]] = {"text/event-stream": {}}  # a schema would be of each event, says OpenAPI since 3.2


def create_app(service: Service, hosts: frozenset[str] | None = None) -> ASGIApp:
    """The whole server as an ASGI application; `hosts`: see Guard."""
    app = FastAPI(
        title="dflash-aot", docs_url=None, redoc_url=None, openapi_url="/openapi.json", redirect_slashes=False
    )
    app.include_router(page)
    _add_answers(app, service)
    _add_state(app, service)
    _add_refusals(app, service)
    return Guard(app, service, hosts)


def _add_answers(app: FastAPI, service: Service) -> None:
    callers = Callers(service.limits.per_caller)

    @app.post(
        "/v1/completions",
        responses={**DOCUMENTED, 200: {"model": response_schema.Completion, "content": EVENTS}},
        response_model=None,
    )
    async def complete(body: CompletionRequest, request: Request) -> Response:
        def make_format(speller: Speller) -> Format:
            return CompletionFormat(speller, body.logprobs is not None)

        return await _answer(service, callers, request, body, read_completion, make_format)

    @app.post(
        "/v1/chat/completions",
        responses={**DOCUMENTED, 200: {"model": response_schema.ChatCompletion, "content": EVENTS}},
        response_model=None,
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        def make_format(speller: Speller) -> Format:
            return ChatFormat(speller, bool(body.logprobs))

        return await _answer(service, callers, request, body, read_chat, make_format)


async def _answer(
    service: Service,
    callers: Callers,
    request: Request,
    body: Body,
    read: Callable[[Model, Body], Asking],
    make_format: Callable[[Speller], Format],
) -> Response:
    """In events or whole. Raises what is wrong with the request."""
    if body.stream_options and not body.stream:
        raise Problem(400, "stream_options without stream", "invalid_value", "stream_options")
    model, caller = service.model, request.state.caller
    admission = callers.admit(caller, count_choices(body))
    asking = partial(callers.read, caller, partial(read, model, body))
    starting = start_answer(model.engine, admission, asking, service.limits.request_seconds)
    try:
        answer = await finish_unless_gone(request.receive, starting)
    except ClientGone:
        return Response(status_code=GONE)
    reply = Reply(
        service=service,
        model=model,
        answer=answer,
        format=make_format(model.speller),
        request_id=request.state.request_id,
        began=request.state.began,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    if body.stream:
        return EventStream(reply.events(), answer.close)
    with answer:
        try:
            return Response(await finish_unless_gone(request.receive, reply.whole()), media_type="application/json")
        except ClientGone:
            return Response(status_code=GONE)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses={**DOCUMENTED, 200: {"model": response_schema.Models}}, response_model=None)
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_describe_model(service)]})

    @app.get(
        "/v1/models/{model:path}", responses={**DOCUMENTED, 200: {"model": response_schema.Model}}, response_model=None
    )
    async def show_model(model: str) -> Response:
        check_name(service.model, model)
        return JSONResponse(_describe_model(service))

    @app.get(
        "/health",
        responses={200: {"model": response_schema.Health}, 503: {"model": response_schema.Health}},
        response_model=None,
    )
    @app.head("/health", include_in_schema=False)
    async def tell_health() -> Response:
        status = service.status
        phase = {"phase": service.phase} if status == "loading" else {}
        return JSONResponse({"status": status, **phase}, 200 if status == "ready" else 503)

    @app.get("/metrics", include_in_schema=False)
    async def tell_metrics() -> Response:
        return Response(generate_latest(service.model.registry), media_type=CONTENT_TYPE_LATEST)


def _describe_model(service: Service) -> Mapping[str, Any]:
    model = service.model
    return {
        "id": model.name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "dflash-aot",
        "max_model_len": model.capacity,
        "dflash": model.describe(),
    }


def _add_refusals(app: FastAPI, service: Service) -> None:
    """In OpenAI's form, all of them."""

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_: Request, error: RequestValidationError) -> Response:
        return _respond(describe_flaws(error.errors()))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # FastAPI's, of what cannot be parsed
            return _respond(Problem(400, "the body is no JSON", "invalid_json"))
        words = {404: f"there is nothing at {request.url.path}", 405: f"{request.url.path} takes no {request.method}"}
        response = _respond(Problem(error.status_code, words.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Problem)
    @app.exception_handler(DflashError)
    @app.exception_handler(Exception)
    async def refuse(request: Request, error: Exception) -> Response:
        if service.draining and isinstance(error, EngineFailed):  # the engine was closed meanwhile
            return _respond(shutting_down())
        return _respond(report_error(error, request.state.request_id))


def _respond(problem: Problem) -> Response:
    return Response(problem.body, problem.status, dict(problem.headers))
