"""Middleware: checks host, API key and body of every request, adds headers, writes the access log. The demo page."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_aot.server.api_errors import NOT_ANSWERED, ApiError, to_api_error
from dflash_aot.server.limits import KeyLimits, ServerLimits
from dflash_aot.server.served_model import ServerState

# -- the demo page at `/`, which shows a completion round by round by the server's public API

ASSETS = Path(__file__).parent / "assets"
FILES = {  # file name and media type by path
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
POLICY = {  # the page may load only its own files, and the icon that its HTML contains
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
PAGE_HEADERS = {
    "Content-Security-Policy": "; ".join(
        f"{directive} {source}" for directive, source in POLICY.items()
    ),
    "Cache-Control": "no-cache",  # browsers show a new version of the package at the next visit
}


def add_demo_page(app: FastAPI) -> None:
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, (ASSETS / name).read_bytes(), media_type)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def read() -> Response:
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)


# -- the middleware

access = logging.getLogger("dflash_aot.server.access")
OPEN_PATHS = frozenset({*FILES, "/health", "/openapi.json"})  # need no key
HEADERS: Mapping[str, str] = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
JSON = "application/json"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
DISCARDED_BODIES = 8  # a body is read up to this many times its limit: clients read a refusal only after they have sent


class RequestMiddleware:
    """Checks each request before the application sees it, completes each response, and logs both.

    hosts: the values of the Host header that are accepted; None: any. A server without keys accepts its own addresses
    only: a page of another site in a browser could reach it by a name that resolves to this machine (DNS rebinding).
    """

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        key_limits: KeyLimits,
        hosts: frozenset[str] | None = None,
    ):
        self.app = app
        self._state = state
        self._key_limits = key_limits
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex[:24]
        began = time.monotonic()
        headers = Headers(scope=scope)
        sender = _ResponseSender(send, request_id, self._state, has_unread_body=_has_body(headers))
        scope.setdefault("state", {}).update(request_id=request_id, began=began)
        try:
            await self._check_and_call(scope, headers, receive, sender)
        except NOT_ANSWERED:
            raise
        except BaseException as error:
            if sender.status is None:  # otherwise a response has begun, or the connection is closed
                await sender.refuse(to_api_error(error, request_id))
        finally:
            key = scope["state"].get("key")
            seconds = time.monotonic() - began
            path = quote(scope["path"])  # a path may contain line breaks
            access.info(
                "%s %s %s key %s %s %.3f s",
                request_id,
                scope["method"],
                path,
                key,
                sender.status,
                seconds,
            )

    async def _check_and_call(
        self, scope: Scope, headers: Headers, receive: Receive, sender: "_ResponseSender"
    ) -> None:
        self._check_host(headers)
        if scope["path"] not in OPEN_PATHS:
            scope["state"]["key"] = self._identify_key(headers)
        body = b""
        if scope["method"] == "POST":  # bodies of other methods are ignored
            if scope["path"] in OPEN_PATHS:
                raise ApiError(405, f"{scope['path']} does not accept POST")
            _check_content_type(headers)
            with self._key_limits.receive_body(scope["state"]["key"]) as hold:
                body = await _read_body(headers, receive, self._state.limits, hold)
            sender.has_unread_body = False
        await self.app(scope, _replay(body, receive), sender)

    def _check_host(self, headers: Headers) -> None:
        host = _strip_port(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            raise ApiError(
                403, "without API keys this server answers to its own address only", "wrong_host"
            )

    def _identify_key(self, headers: Headers) -> int:
        given = headers.get("authorization")
        key = self._state.keys.identify(given)
        if key is None:
            fault = "the API key is unknown" if given else "an API key is needed"
            raise ApiError(401, f"{fault}: Authorization: Bearer KEY", "invalid_api_key")
        return key


class _ResponseSender:
    """An ASGI `send` that adds headers and remembers the status.

    Attributes:
        has_unread_body: whether the request has a body that was not read completely. Its
            connection is closed after the response, because the rest of the body would have to be
            parsed to find the next request.
        status: the status that was sent; None until a response begins.

    While the server drains, every connection is closed after its response: further requests on it
    would delay the end.
    """

    def __init__(self, send: Send, request_id: str, state: ServerState, *, has_unread_body: bool):
        self._send = send
        self._request_id = request_id
        self._state = state
        self.has_unread_body = has_unread_body
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in {**HEADERS, "x-request-id": self._request_id}.items():
                headers.setdefault(name, value)
            if self.has_unread_body or self._state.draining:
                headers["connection"] = "close"
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Sends an error response."""
        headers = {**error.headers, "content-length": str(len(error.body))}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": error.status, "headers": raw})
        await self({"type": "http.response.body", "body": error.body})


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _check_content_type(headers: Headers) -> None:
    """Raises ApiError for other types than JSON: HTML forms of other sites, which browsers send without preflight."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, f"content-type: {JSON} is needed", "unsupported_media_type")


def _strip_port(host: str) -> str:
    """A Host header without port and brackets."""
    name = (
        host.rpartition(":")[0]
        if host.rpartition(":")[2].isdigit() and not host.endswith("]")
        else host
    )
    return name.strip("[]").lower()


# -- bodies: read completely before anything else, so that a slow sender occupies only its connection


async def _read_body(
    headers: Headers, receive: Receive, limits: ServerLimits, hold: Callable[[int], None]
) -> bytes:
    """The whole body. hold: see `KeyLimits.receive_body`.

    Raises ApiError for a body that is too large, too slow, or incomplete, and what `hold` raises.
    """
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > DISCARDED_BODIES * limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in _receive_parts(receive):
                size += len(part)
                if size <= limits.body_bytes:
                    hold(len(part))
                    body += part
                if size > DISCARDED_BODIES * limits.body_bytes:
                    break
    except TimeoutError as error:
        raise ApiError(
            408, f"the body did not arrive within {limits.body_seconds:g} s", "body_timeout"
        ) from error
    if size > limits.body_bytes:
        raise _too_large(limits)
    return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that returns the body first."""
    is_replayed = False

    async def receive_next() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_next


async def _receive_parts(receive: Receive) -> AsyncIterator[bytes]:
    """Raises ApiError if the client disconnects before the end."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body is incomplete", "incomplete_body")
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _too_large(limits: ServerLimits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes", "body_too_large")
