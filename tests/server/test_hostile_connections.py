"""Hostile connections: tiny chunks, endless framing and unfinished bodies are refused, and others are served."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dflash_aot.server.connection import FRAMING_BYTES, READ_BYTES
from tests.server.conftest import KEY, Server
from tests.server.raw_client import RawClient, head, wait_until_idle

COMPLETIONS = "/v1/completions"
REQUEST = {"prompt": "import os", "max_tokens": 32, "temperature": 0, "stop_token_ids": []}
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
TINY = b"1\r\na\r\n"
CONNECTIONS = 8


@pytest.fixture(scope="module")
def attacked(bundle: Callable[[str], Path]) -> Iterator[Server]:
    """A server with a key, ready and with a clean log after all attacks."""
    server = Server.start(bundle("served"), "--preload", key=KEY).wait_until_ready()
    yield server
    wait_until_idle(server, KEY)
    assert ask(server) == 200
    assert server.stop() == 0
    log = "".join(server.lines)
    assert "Traceback" not in log and "ERROR" not in log, log


def ask(server: Server) -> int:
    with server.client(KEY) as client:
        return client.post(COMPLETIONS, json=REQUEST).status_code


@contextmanager
def flood(server: Server, start: bytes) -> Iterator[None]:
    """Sends tiny chunks over several connections, each begun anew when the server closes it."""
    stopped, sent, chunks = threading.Event(), threading.Semaphore(0), TINY * 20_000

    def send_chunks(client: RawClient) -> None:
        size = 0
        while not stopped.is_set():
            with suppress(TimeoutError):  # the server does not read for a while
                size += client.socket.send(chunks[size % len(TINY) :])
            sent.release()

    def send() -> None:
        while not stopped.is_set():
            with suppress(ConnectionError), RawClient(server) as client:
                client.socket.settimeout(0.2)
                client.send(start)
                send_chunks(client)

    senders = [threading.Thread(target=send) for _ in range(CONNECTIONS)]
    for sender in senders:
        sender.start()
    try:
        for _ in senders:
            sent.acquire()
        yield
    finally:
        stopped.set()
        for sender in senders:
            sender.join()


def test_tiny_chunks_do_not_stop_the_requests_of_others(attacked):
    for start in (
        head("GET", "/health", transfer_encoding="chunked"),
        head("POST", COMPLETIONS, transfer_encoding="chunked"),
        head("POST", COMPLETIONS, transfer_encoding="chunked", **AUTHORIZED),
    ):
        with flood(attacked, start):
            assert [ask(attacked) for _ in range(2)] == [200, 200]


def test_body_of_tiny_chunks_is_refused(attacked):
    with RawClient(attacked) as client:
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked", **AUTHORIZED))
        with suppress(ConnectionError):  # closed by the server
            client.send(TINY * 200_000 + b"0\r\n\r\n")
        response = client.read_until_closed()
    assert response.startswith(b"HTTP/1.1 400 ") and b"chunks are too small" in response


def chunk(size: int, body: bytes) -> bytes:
    """The body in chunks of this size."""
    parts = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(("size", "length"), [(1, 2_000), (64, 500_000), (READ_BYTES, 1 << 20)])
def test_chunks_of_usual_sizes_are_accepted(attacked, size, length):
    body = b'{"prompt": [17], "max_tokens": 1}'
    with RawClient(attacked) as client:
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked", **AUTHORIZED))
        client.send(chunk(size, body + b" " * (length - len(body))))
        assert client.read_response().status == 200


@pytest.mark.parametrize(
    "framing",
    [
        b"1;" + b"a" * 2 * FRAMING_BYTES,  # an extension of a chunk
        b"0\r\nx: " + b"a" * 2 * FRAMING_BYTES,  # a trailer
        b"0\r\n" + b"x: a\r\n" * FRAMING_BYTES,
    ],
    ids=["extension", "trailer", "trailers"],
)
def test_endless_framing_is_refused(attacked, framing):
    with RawClient(attacked) as client:
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked", **AUTHORIZED))
        with suppress(ConnectionError):  # closed by the server
            client.send(framing)
        assert client.read_until_closed().startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/health", {"content_length": "10"}, 200),
        ("HEAD", "/health", {"transfer_encoding": "chunked"}, 200),
        ("POST", "/health", {"content_length": "10"}, 405),
        ("POST", COMPLETIONS, {"transfer_encoding": "chunked"}, 401),
        ("POST", COMPLETIONS, {"content_length": "10", "content_type": "text/plain", **AUTHORIZED}, 415),
    ],
)
def test_answer_to_an_unfinished_body_closes_the_connection(attacked, method, path, headers, status):
    with RawClient(attacked) as client:
        client.send(head(method, path, **headers))
        response = client.read_until_closed()
    assert response.startswith(b"HTTP/1.1 %d " % status) and b"\r\nconnection: close\r\n" in response
    assert response.count(b"HTTP/1.1") == 1
