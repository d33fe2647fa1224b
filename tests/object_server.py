"""An S3 server on loopback behind a proxy that records requests and injects faults."""

import http.client
import itertools
import logging
import socket
import struct
import sys
import threading
import xml.etree.ElementTree as xml
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
# Signatures are not checked; anonymous readers are refused.
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, Signature=0"}
SETTINGS = {
    "AWS_ACCESS_KEY_ID": "an id",
    "AWS_SECRET_ACCESS_KEY": "a secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # retries of the AWS library would be recorded as requests
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "NO_PROXY": "127.0.0.1",
}


@dataclass(frozen=True)
class ObjectResponse:
    """A response of the server. sent: the connection breaks after this many bytes of the body; None: all are sent."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    sent: int | None = None


Fault = Callable[[Callable[[], ObjectResponse]], ObjectResponse]  # gets a function that forwards the request


class ObjectServer:
    """The S3 server and the proxy. A fault is used for one matching request."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer  # noqa: PLC0415  takes half a second

        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        self._backend = self._moto.get_host_and_port()
        self._lock = threading.Lock()
        self._faults: list[tuple[str, str, Fault]] = []
        self.asked: list[tuple[str, str]] = []
        self.closing = threading.Event()
        self._proxy = _Proxy(("127.0.0.1", 0), self._make_handler())
        self._thread = threading.Thread(target=self._proxy.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._proxy.server_port}"

    def close(self) -> None:
        self.closing.set()
        self._proxy.shutdown()
        self._proxy.server_close()
        self._moto.stop()

    def forget(self) -> None:
        """Clears faults and recorded requests."""
        with self._lock:
            self._faults.clear()
            self.asked.clear()

    def fail(self, method: str, part: str, *faults: Fault) -> None:
        """Injects faults, in order, into the next requests with this method whose path contains `part`."""
        with self._lock:
            self._faults += [(method, part, fault) for fault in faults]

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> ObjectResponse:
        """Sends a request to the S3 server itself, past the proxy."""
        connection = http.client.HTTPConnection(*self._backend, timeout=60)
        try:
            connection.request(method, path, body, headers or SIGNED)
            response = connection.getresponse()
            return ObjectResponse(response.status, response.read(), tuple(response.getheaders()))
        finally:
            connection.close()

    def _take_fault(self, method: str, path: str) -> Fault:
        with self._lock:
            self.asked.append((method, path))
            for number, (wanted, part, fault) in enumerate(self._faults):
                if wanted == method and part in path:
                    del self._faults[number]
                    return fault
        return lambda forward: forward()

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # otherwise headers without a body are delayed by 40 ms

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = server._take_fault(self.command, self.path)
                response = fault(lambda: server.ask(self.command, self.path, body, dict(self.headers)))
                self.send_response(response.status)
                kept = [(name, value) for name, value in response.headers if name.lower() not in DROPPED_HEADERS]
                length = (
                    dict(response.headers).get("Content-Length", "0") if self.command == "HEAD" else len(response.body)
                )
                for name, value in (*kept, ("Content-Length", str(length))):
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(response.body[: response.sent])
                if response.sent is not None:
                    self._reset()

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

            def _reset(self) -> None:
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class _Proxy(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that close the connection early."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


DROPPED_HEADERS = {"content-length", "transfer-encoding", "connection", "date", "server"}


class Bucket:
    """A bucket of one test. Its methods go past the proxy."""

    _numbers = itertools.count()

    def __init__(self, server: ObjectServer):
        self.name, self.server = f"bucket-{next(self._numbers)}", server
        self.url = f"s3://{self.name}"
        assert server.ask("PUT", f"/{self.name}").status == 200

    def put(self, name: str, content: bytes) -> None:
        assert self.server.ask("PUT", f"/{self.name}/{name}", content).status == 200

    def get(self, name: str) -> bytes:
        response = self.server.ask("GET", f"/{self.name}/{name}")
        assert response.status == 200
        return response.body

    def remove(self, name: str) -> None:
        self.server.ask("DELETE", f"/{self.name}/{name}")

    def names(self) -> list[str]:
        listing = xml.fromstring(self.server.ask("GET", f"/{self.name}?list-type=2").body)
        return sorted(one.text or "" for one in listing.iter(f"{NAMESPACE}Key"))

    def asked(self, method: str, part: str = "") -> list[str]:
        """Names of objects that were requested through the proxy, in order."""
        beginning = f"/{self.name}/"
        paths = [path.partition("?")[0] for asked, path in self.server.asked if asked == method]
        return [path.removeprefix(beginning) for path in paths if path.startswith(beginning) and part in path]


def refuse(status: int, code: str, message: str = "") -> Fault:
    """Returns an S3 error without forwarding the request."""
    words = message or f"told to say {code}"
    body = f"<Error><Code>{code}</Code><Message>{words}</Message></Error>".encode()
    return lambda _: ObjectResponse(status, body, (("Content-Type", "application/xml"),))


def cut(forward: Callable[[], ObjectResponse]) -> ObjectResponse:
    """Resets the connection in the middle of the body."""
    response = forward()
    return ObjectResponse(response.status, response.body, response.headers, sent=len(response.body) // 2)


def change(function: Callable[[bytes], bytes]) -> Fault:
    """Changes the body, and sends the headers that fit it."""

    def fault(forward: Callable[[], ObjectResponse]) -> ObjectResponse:
        response = forward()
        return ObjectResponse(response.status, function(response.body), response.headers)

    return fault


def afterwards(action: Callable[[], object]) -> Fault:
    """Calls `action` after the server has responded, and passes the response on."""

    def fault(forward: Callable[[], ObjectResponse]) -> ObjectResponse:
        response = forward()
        action()
        return response

    return fault


def silence(server: ObjectServer) -> Fault:
    """Does not respond until the server is closed."""

    def fault(_: Callable[[], ObjectResponse]) -> ObjectResponse:
        server.closing.wait()
        return ObjectResponse(500, b"")

    return fault
