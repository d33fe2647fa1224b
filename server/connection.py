"""Connection limits: uvicorn's HTTP/1.1 protocol with timeouts and a limit of connections.

uvicorn has no settings for these: `limit_concurrency` counts requests and not silent connections,
`timeout_keep_alive` ends with the first byte of the next request, and nothing limits the time for the first head or
for writing. A subclass is the purpose of uvicorn's `http` setting and the only access to the transport. Beside
asyncio's callbacks it uses `transport`, `cycle` (the request in progress), `connections`, `on_response_complete` and
`send_400_response` of uvicorn's class.
"""

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_aot.server.api_errors import ApiError
from dflash_aot.server.limits import ServerLimits

# Seconds of silence, seconds between probes, and number of probes until a vanished peer is disconnected.
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def make_protocol(limits: ServerLimits) -> type[H11Protocol]:
    """A protocol class with these limits: uvicorn creates an instance for each connection, without own arguments."""
    malformed = ApiError(400, "malformed HTTP/1.1 request, or its head is too large", "invalid_http")

    class LimitedConnection(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            _detect_vanished_peer(transport, limits.write_seconds)
            self._start_head_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_responding():
                _cancel(self._head_timer)

        def on_response_complete(self) -> None:
            self._start_head_timer()
            super().on_response_complete()  # which may begin the next request

        def send_400_response(self, msg: str) -> None:
            if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
                self.transport.write(_encode_last_response(malformed))
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self._write_timer)

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._head_timer)
            _cancel(self._write_timer)
            super().connection_lost(exc)

        def _start_head_timer(self) -> None:
            """Limits the time until the head of the next request is complete."""
            _cancel(self._head_timer)
            self._head_timer = self.loop.call_later(limits.head_seconds, self._abort_if_idle)

        def _abort_if_idle(self) -> None:
            if not self._is_responding():
                self.transport.abort()

        def _is_responding(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

    return LimitedConnection


def _encode_last_response(error: ApiError) -> bytes:
    """A whole response that closes the connection, for a request that could not be parsed."""
    fields = {**error.headers, "content-length": str(len(error.body)), "connection": "close"}
    lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
    return f"HTTP/1.1 {error.status} Bad Request\r\n{''.join(lines)}\r\n".encode() + error.body


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _detect_vanished_peer(transport: asyncio.Transport, write_seconds: float) -> None:
    """Lets the kernel close the connection of a peer that no longer acknowledges data or answers probes."""
    connection: Any = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**KEEPALIVE, "TCP_USER_TIMEOUT": int(write_seconds * 1000)}.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
