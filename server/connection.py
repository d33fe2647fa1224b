"""Connections: uvicorn's HTTP/1.1 protocol over httptools, with limits of time, of size, and of work per turn.

httptools parses, and refuses malformed requests. uvicorn has no settings for these limits, so this is a subclass, which
is the purpose of uvicorn's `http` setting. In addition to the callbacks of asyncio and httptools it uses, of uvicorn's
class, `transport`, `parser`, `url`, `headers`, `cycle` (the newest request), `pipeline` (requests that wait for their
turn), `connections` and `on_response_complete`.
"""

import asyncio
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dflash_aot.server.api_errors import ApiError
from dflash_aot.server.limits import ServerLimits

LEAST_BYTES = 1 << 16  # of a long response that a client reads within `write_seconds`
READ_BYTES = 8192  # that are read and parsed for one connection before others have their turn
# Bytes of a request without its body (head, chunk sizes, trailers). Each 8 bytes of body allow one more, so that chunks
# have 48 bytes on average: a small chunk costs the parser as much as a large chunk.
FRAMING_BYTES = 32 << 10
BODY_BYTES_PER_FRAMING_BYTE = 8
MAX_HEADERS = 128
MAX_PIPELINED = 16  # requests that wait for the response to an earlier request of their connection
VERSIONS = ("1.0", "1.1")
# A client that closed its sending side may read on, or may have left, which only an answer to sent bytes tells. While
# the response is awaited, an interim response is sent after this time, and again soon, which fails for a client that
# has left.
HALF_CLOSED_SECONDS = 3.0
PROBE_SECONDS = 0.2
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


def make_protocol(limits: ServerLimits) -> Any:
    """Returns what uvicorn's `http` setting takes: it creates the protocol of each connection."""
    return partial(LimitedConnection, limits)


class LimitedConnection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, limits: ServerLimits, **given: Any):
        """given: uvicorn's own arguments."""
        super().__init__(**given)
        self._limits = limits
        self._buffer = memoryview(bytearray(READ_BYTES))
        # The request whose response is awaited or being sent.
        self._answering: RequestResponseCycle | None = None
        self._refusal = b""  # the response to a malformed request; nothing more is parsed
        self._is_in_head = False
        self._framing_bytes = 0  # of the newest request, less what its body allows
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._is_probed = False

    # -- asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.abort()
        else:
            self._start_head_timer()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the next bytes. asyncio reads once per turn, and not more than its size."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._unset_keepalive_if_required()
        if self._refusal or self.transport.is_closing():
            return
        self._parse(self._buffer[:nbytes])
        self._framing_bytes += nbytes
        if self._framing_bytes > FRAMING_BYTES and not self._refusal:
            self._refuse(_malformed("its head is too large, or its chunks are too small"))
        if self._answering is not None:
            _cancel(self._head_timer)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection for the responses to complete requests: clients may close their sending side."""
        is_in_body = self.cycle is not None and self.cycle.more_body
        if self._answering is None or is_in_body:
            return False
        self._is_half_closed = True
        self._probe_timer = self.loop.call_later(HALF_CLOSED_SECONDS, self._probe)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._write_timer)
        _cancel(self._probe_timer)
        self.pipeline.clear()
        if self._answering is not None:  # uvicorn tells the newest request only
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    # -- the parser's callbacks; an ApiError that they raise refuses the request

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._framing_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # trailers are ignored
            return
        if len(self.headers) == MAX_HEADERS:
            raise _malformed(f"it has more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._check_head()
        if self.parser.should_upgrade():  # see `_ignore_upgrade`
            return
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # otherwise nobody sees that the client leaves
        else:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body) + len(body) // BODY_BYTES_PER_FRAMING_BYTE
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        self._start_head_timer()
        super().on_response_complete()  # which may begin the next request
        if self._answering is None and self._refusal and not self.transport.is_closing():
            self._send_refusal()
        elif self._answering is None and self._is_half_closed:
            self.transport.close()

    # -- steps

    def _parse(self, data: memoryview) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._refuse(
                cause if isinstance(cause, ApiError) else _malformed("its target is not a path")
            )
        except httptools.HttpParserError as error:
            self._refuse(_malformed(str(error)))

    def _check_head(self) -> None:
        """Raises ApiError for a head that httptools accepts and this server does not."""
        version = self.parser.get_http_version()
        hosts = [name for name, _ in self.headers].count(b"host")
        if version not in VERSIONS or self.parser.get_method() == b"CONNECT":
            raise _malformed("its version or method is not supported")
        if hosts > 1 or (version == "1.1" and not hosts):
            raise _malformed("exactly one Host header is needed")
        if len(self.pipeline) == MAX_PIPELINED:
            raise _malformed(f"more than {MAX_PIPELINED} requests wait for an earlier response")

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Parses the newest request again, without its Upgrade header.

        For an upgrade httptools skips the body, which clients send that offer HTTP/2 with every request.
        """
        fields = [
            b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"
        ]
        version = self.parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (
            self.parser.get_method(),
            self.url,
            version,
            b"".join(fields),
        )
        self.parser = httptools.HttpRequestParser(self)
        self._parse(memoryview(head))
        if not self._refusal:
            self._parse(rest)

    def _refuse(self, error: ApiError) -> None:
        """Sends an error after the responses to earlier requests, and closes the connection."""
        self._refusal = _encode_last_response(error)
        is_in_body = self.cycle is not None and self.cycle.more_body
        if is_in_body and self.pipeline:
            self.pipeline.popleft()  # the newest request, which is the malformed one
        elif is_in_body or self._answering is None:
            self._send_refusal()

    def _send_refusal(self) -> None:
        if self._answering is None or not self._answering.response_started:
            self.transport.write(self._refusal)
        self.transport.close()

    def _watch_reader(self, before: int | None) -> None:
        """Ends the connection if the client read next to nothing since `before` bytes waited for it."""
        waiting = self.transport.get_write_buffer_size()
        if before is not None and waiting > before - LEAST_BYTES:
            self.transport.abort()
        else:
            limit = self._limits.write_seconds
            self._write_timer = self.loop.call_later(limit, self._watch_reader, waiting)

    def _probe(self) -> None:
        """Finds out whether a half-closed client is still there; HTTP/1.0 has no interim responses."""
        cycle = self._answering
        if cycle is None or cycle.response_started or cycle.scope["http_version"] == "1.0":
            return
        self.transport.write(PROBE)
        # The first probe is answered by a reset, which the second one meets.
        again = HALF_CLOSED_SECONDS if self._is_probed else PROBE_SECONDS
        self._is_probed = not self._is_probed
        self._probe_timer = self.loop.call_later(again, self._probe)

    def _start_head_timer(self) -> None:
        """Limits the time until the head of the next request is complete."""
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self._abort_if_idle)

    def _abort_if_idle(self) -> None:
        if self._answering is None:
            self.transport.abort()


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"malformed HTTP/1.1 request: {reason}", "invalid_http")


def _encode_last_response(error: ApiError) -> bytes:
    """A whole response that closes the connection, for a request that could not be parsed."""
    fields = {**error.headers, "content-length": str(len(error.body)), "connection": "close"}
    lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
    return f"HTTP/1.1 {error.status} Bad Request\r\n{''.join(lines)}\r\n".encode() + error.body


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
