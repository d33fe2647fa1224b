"""A client that sends raw bytes, and readers of a server's metrics and errors, for the tests of this directory."""

import http.client
import socket
from dataclasses import dataclass
from email.message import Message
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.stepper import LONG, wait_until
from tests.server.conftest import Server

# Takes seconds: longer than the tests look.
ENDLESS = {"prompt": "import os", "max_tokens": 240, "temperature": 0, "stop_token_ids": [], "k": 0, "n": 16}


@dataclass(frozen=True)
class RawResponse:
    status: int
    headers: Message
    body: bytes


class RawClient:
    """One connection for raw bytes. receive_bytes: size of the kernel's receive buffer."""

    def __init__(self, server: Server, receive_bytes: int | None = None):
        self.socket = socket.socket()
        self.socket.settimeout(LONG)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(locate(server))
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        """Sends a whole request; a given `content_length` may be wrong."""
        self.send(head(method, path, **{"content_length": str(len(body)), **headers}) + body)

    def read_response(self) -> RawResponse:
        """The next response, which must have a content-length."""
        _, status, _ = self.file.readline().decode().split(" ", 2)
        headers = http.client.parse_headers(self.file)
        return RawResponse(int(status), headers, self.file.read(int(headers["content-length"])))

    def read_until_closed(self) -> bytes:
        """All bytes until the server closes. Times out if it keeps the connection open."""
        read = b""
        try:
            while part := self.file.read1():
                read += part
        except ConnectionResetError:
            pass
        return read


def locate(server: Server) -> tuple[str, int]:
    """The server's address for a socket."""
    address = urlsplit(server.url)
    assert address.hostname and address.port
    return address.hostname, address.port


def head(method: str, path: str, **headers: str) -> bytes:
    """The head of a request with JSON to localhost."""
    fields = {"host": "localhost", "content_type": "application/json", **headers}
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items()]
    return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()


def read_sample(server: Server, name: str, key: str | None = None, **labels: str) -> float:
    """A number of /metrics: the sum of the samples with these labels."""
    with RawClient(server) as client:
        client.ask("GET", "/metrics", **({} if key is None else {"authorization": f"Bearer {key}"}))
        response = client.read_response()
    assert response.status == 200, response.body
    families = text_string_to_metric_families(response.body.decode())
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def count_requests(server: Server, key: str | None = None) -> tuple[int, int]:
    """(running, waiting)."""
    running, waiting = (read_sample(server, f"vllm:num_requests_{state}", key) for state in ("running", "waiting"))
    return int(running), int(waiting)


def wait_until_idle(server: Server, key: str | None = None) -> None:
    wait_until(lambda: count_requests(server, key) == (0, 0))


def wait_until_busy(server: Server, running: int, waiting: int = 0, key: str | None = None) -> None:
    wait_until(lambda: count_requests(server, key) == (running, waiting))


def read_error(response: httpx.Response, status: int, code: str | None) -> str:
    """The message of an error in OpenAI's form; checks status and code."""
    assert response.status_code == status, response.text
    (name, fields), *others = response.json().items()
    assert (name, others) == ("error", [])
    assert fields.keys() == {"message", "type", "param", "code"}
    assert fields["code"] == code, fields
    return fields["message"]
