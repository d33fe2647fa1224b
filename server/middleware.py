"""What stands before the application: who asks, of which host, with how much; and what is said where it fails."""

import logging
import time
import uuid
from collections.abc import Mapping
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_aot.server.api_errors import Problem, report_error
from dflash_aot.server.demo_page import FILES
from dflash_aot.server.request_body import read_body, replay
from dflash_aot.server.server_state import Service

access = logging.getLogger("dflash_aot.server.access")
OPEN_PATHS = frozenset({*FILES, "/health", "/openapi.json"})  # nothing there is anybody's
HEADERS: Mapping[str, str] = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
JSON = "application/json"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})  # whom only this machine can mean


class Guard:
    """hosts: names that a request may be addressed to, in its Host header; None: any.

    Where nobody needs a key, a page in somebody's browser must not get in under a name of its own that leads here.
    """

    def __init__(self, app: ASGIApp, service: Service, hosts: frozenset[str] | None = None):
        self._app, self._service, self._hosts = app, service, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex[:24]
        began, sender = time.monotonic(), _Sender(send, request_id)
        scope.setdefault("state", {}).update(request_id=request_id, began=began)
        try:
            await self._pass(scope, receive, sender)
        except Exception as error:
            if sender.status is None:  # otherwise the application has answered, or the connection is closed
                await sender.refuse(report_error(error, request_id))
        finally:
            who, took = scope["state"].get("caller"), time.monotonic() - began
            path = quote(scope["path"])  # line breaks, too, may be asked for
            access.info("%s %s %s key %s %s %.3f s", request_id, scope["method"], path, who, sender.status, took)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers)
        if scope["path"] not in OPEN_PATHS:
            scope["state"]["caller"] = self._identify(headers)
        body = b""
        if scope["method"] == "POST":  # no other has a body that anybody reads
            if scope["path"] in OPEN_PATHS:
                raise Problem(405, f"{scope['path']} takes no POST")
            _check_type(headers)
            body = await read_body(headers, receive, self._service.limits)
        await self._app(scope, replay(body, receive), send)

    def _check_host(self, headers: Headers) -> None:
        host = _read_host(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            raise Problem(403, "without API keys this server answers to its own address only", "wrong_host")

    def _identify(self, headers: Headers) -> int:
        given = headers.get("authorization")
        caller = self._service.keys.identify(given)
        if caller is None:
            fault = "this is no API key of this server's" if given else "an API key is needed"
            raise Problem(401, f"{fault}: Authorization: Bearer KEY", "invalid_api_key")
        return caller


class _Sender:
    """Passes on what is answered, with headers of ours, and knows how far it got."""

    def __init__(self, send: Send, request_id: str):
        self._send, self._request_id = send, request_id
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in {**HEADERS, "x-request-id": self._request_id}.items():
                headers.setdefault(name, value)
        await self._send(message)

    async def refuse(self, problem: Problem) -> None:
        """What was not read of a body is not waited for."""
        close = {"connection": "close"} if problem.status in (401, 403, 405, 408, 413) else {}
        headers = {**problem.headers, **close, "content-length": str(len(problem.body))}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": problem.status, "headers": raw})
        await self({"type": "http.response.body", "body": problem.body})


def _check_type(headers: Headers) -> None:
    """A form of somebody else's page, which browsers send without asking, has another one."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Problem(415, f"content-type: {JSON} is needed", "unsupported_media_type")


def _read_host(host: str) -> str:
    """Without port and brackets."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    return name.strip("[]").lower()
