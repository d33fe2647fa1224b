"""An S3 server on loopback, with a proxy before it that counts what is asked and can be told to fail."""

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
    "AWS_MAX_ATTEMPTS": "1",  # so that what is counted is what we ask
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "NO_PROXY": "127.0.0.1",
}


@dataclass(frozen=True)
class Answer:
    """What the server says; `sent` bytes of the body arrive before the connection breaks, all if None."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    sent: int | None = None


Fault = Callable[[Callable[[], Answer]], Answer]  # is given what asks the server


class ObjectServer:
    """Both servers; `faults` are used up one for each request that they are for."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer  # noqa: PLC0415  half a second that only its tests pay

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
        """Faults, and what was asked."""
        with self._lock:
            self._faults.clear()
            self.asked.clear()

    def fail(self, method: str, part: str, *faults: Fault) -> None:
        """The next requests with this method whose path holds `part` go wrong, one after the other."""
        with self._lock:
            self._faults += [(method, part, fault) for fault in faults]

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        """The server behind the proxy."""
        connection = http.client.HTTPConnection(*self._backend, timeout=60)
        try:
            connection.request(method, path, body, headers or SIGNED)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), tuple(answer.getheaders()))
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
            disable_nagle_algorithm = True  # a header alone would wait 40 ms to be confirmed

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = server._take_fault(self.command, self.path)
                answer = fault(lambda: server.ask(self.command, self.path, body, dict(self.headers)))
                self.send_response(answer.status)
                kept = [(name, value) for name, value in answer.headers if name.lower() not in UNKEPT]
                length = dict(answer.headers).get("Content-Length", "0") if self.command == "HEAD" else len(answer.body)
                for name, value in (*kept, ("Content-Length", str(length))):
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body[: answer.sent])
                if answer.sent is not None:
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
        """Whoever has not waited for the answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


UNKEPT = {"content-length", "transfer-encoding", "connection", "date", "server"}


class Bucket:
    """One of its own for each test; what is done here goes past the proxy."""

    _numbers = itertools.count()

    def __init__(self, server: ObjectServer):
        self.name, self.server = f"bucket-{next(self._numbers)}", server
        self.url = f"s3://{self.name}"
        assert server.ask("PUT", f"/{self.name}").status == 200

    def put(self, name: str, content: bytes) -> None:
        assert self.server.ask("PUT", f"/{self.name}/{name}", content).status == 200

    def get(self, name: str) -> bytes:
        answer = self.server.ask("GET", f"/{self.name}/{name}")
        assert answer.status == 200
        return answer.body

    def remove(self, name: str) -> None:
        self.server.ask("DELETE", f"/{self.name}/{name}")

    def names(self) -> list[str]:
        listing = xml.fromstring(self.server.ask("GET", f"/{self.name}?list-type=2").body)
        return sorted(one.text or "" for one in listing.iter(f"{NAMESPACE}Key"))

    def asked(self, method: str, part: str = "") -> list[str]:
        """The names that were asked for through the proxy, in order."""
        beginning = f"/{self.name}/"
        paths = [path.partition("?")[0] for asked, path in self.server.asked if asked == method]
        return [path.removeprefix(beginning) for path in paths if path.startswith(beginning) and part in path]


def refuse(status: int, code: str) -> Fault:
    """An error of S3's, without asking the server."""
    body = f"<Error><Code>{code}</Code><Message>told to say {code}</Message></Error>".encode()
    return lambda _: Answer(status, body, (("Content-Type", "application/xml"),))


def cut(forward: Callable[[], Answer]) -> Answer:
    """The connection is reset in the middle of the body."""
    answer = forward()
    return Answer(answer.status, answer.body, answer.headers, sent=len(answer.body) // 2)


def change(function: Callable[[bytes], bytes]) -> Fault:
    """Another body, with the headers that belong to it."""

    def fault(forward: Callable[[], Answer]) -> Answer:
        answer = forward()
        return Answer(answer.status, function(answer.body), answer.headers)

    return fault


def afterwards(action: Callable[[], object]) -> Fault:
    """What the server says is as it should be; then something happens."""

    def fault(forward: Callable[[], Answer]) -> Answer:
        answer = forward()
        action()
        return answer

    return fault


def silence(server: ObjectServer) -> Fault:
    """No answer, as long as the server lives."""

    def fault(_: Callable[[], Answer]) -> Answer:
        server.closing.wait()
        return Answer(500, b"")

    return fault
