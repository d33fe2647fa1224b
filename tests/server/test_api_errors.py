"""API errors: which exceptions of the application become a response."""

import asyncio
import json

import pytest
from starlette.types import Message, Receive, Scope, Send

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.server.api_errors import to_api_error
from dflash_aot.server.limits import KeyLimits, ServerLimits
from dflash_aot.server.middleware import RequestMiddleware
from dflash_aot.server.served_model import ServerState, ServingConfig


class Panic(BaseException):
    """Like the exceptions that Rust extensions raise."""


def ask(error: BaseException, draining: bool = False) -> list[Message]:
    """The response, as ASGI messages, to an `error` of the application. Raises errors that are not answered."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    state = ServerState(ServingConfig("none"), draining=draining)
    middleware = RequestMiddleware(app, state, KeyLimits(ServerLimits()))
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}

    async def call() -> None:
        await middleware(scope, receive, send)

    asyncio.run(call())
    return sent


def test_exception_that_ends_nothing_is_answered_in_openai_form():
    for error in (Panic("over limit"), BaseExceptionGroup("several", [Panic()]), MemoryError()):
        start, body = ask(error)
        assert start["status"] == 500
        assert json.loads(body["body"])["error"]["code"] == "internal_error"


@pytest.mark.parametrize("draining", [False, True])
def test_connections_are_closed_while_the_server_drains(draining):
    """Else a client that asks on over one would hold the server up."""
    start, _ = ask(MemoryError(), draining)
    assert ((b"connection", b"close") in start["headers"]) == draining


def test_exception_that_ends_the_process_is_not_answered():
    for error in (KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            ask(error)


def test_message_about_a_file_of_the_server_is_not_sent():
    error = to_api_error(BadCheckpoint("/models/tokenizer.json fails at a text"), "1")
    assert error.status == 500 and "/models" not in error.message
    error = to_api_error(BadInput("top_k is -1"), "1")
    assert (error.status, error.message) == (400, "top_k is -1")
