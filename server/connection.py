"""Connections that do not wait for ever: uvicorn's own protocol, with limits that it has no setting for.

Subclassing is what uvicorn's `http` setting is for, and the only way to the transport. What is used of the class,
beside asyncio's own callbacks: `transport`, `cycle` (the request that is answered), `connections`,
`on_response_complete` and `send_400_response`.
"""

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_aot.server.api_errors import Problem
from dflash_aot.server.limits import Limits

# Seconds of silence, seconds between probes, and probes, until a peer that vanished without a word is given up.
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


NO_HTTP = Problem(400, "this is no HTTP/1.1 that is understood here, or its head is too large", "invalid_http")


def limit_connections(limits: Limits) -> type[H11Protocol]:
    """uvicorn's protocol under these limits: it makes one for each connection, and takes no arguments of ours."""

    class LimitedConnection(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _write: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            _notice_vanished_peers(transport, limits.write_seconds)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_answering():
                _stop(self._head)

        def on_response_complete(self) -> None:
            self._await_head()
            super().on_response_complete()  # which may go on with the next request

        def send_400_response(self, msg: str) -> None:
            if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
                self.transport.write(_write_answer(NO_HTTP))
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            _stop(self._write)

        def connection_lost(self, exc: Exception | None) -> None:
            _stop(self._head)
            _stop(self._write)
            super().connection_lost(exc)

        def _await_head(self) -> None:
            """However it trickles in."""
            _stop(self._head)
            self._head = self.loop.call_later(limits.head_seconds, self._give_up)

        def _give_up(self) -> None:
            if not self._is_answering():
                self.transport.abort()

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

    return LimitedConnection


def _write_answer(problem: Problem) -> bytes:
    """The last one of a connection, of which nothing is known."""
    fields = {**problem.headers, "content-length": str(len(problem.body)), "connection": "close"}
    lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
    return f"HTTP/1.1 {problem.status} Bad Request\r\n{''.join(lines)}\r\n".encode() + problem.body


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _notice_vanished_peers(transport: asyncio.Transport, write_seconds: float) -> None:
    """By the kernel: of what is sent and not taken after so long, and of silence."""
    connection: Any = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**KEEPALIVE, "TCP_USER_TIMEOUT": int(write_seconds * 1000)}.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
