"""Connections: clients that disconnect, are slow, are too many, or send malformed HTTP do not disturb others."""

import asyncio
import json
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest
import uvicorn
from uvicorn.server import ServerState

from dflash_aot.server.connection import MAX_PIPELINED, LimitedConnection
from dflash_aot.server.limits import ServerLimits
from tests.runtime.stepper import wait_until
from tests.server.conftest import Server
from tests.server.raw_client import ENDLESS, RawClient, head, read_sample, wait_until_busy, wait_until_idle

COMPLETIONS = "/v1/completions"
SMALL = {"prompt": [17], "max_tokens": 1, "temperature": 0}
LARGE = {**ENDLESS, "logprobs": 20}  # its response is larger than all buffers between server and client
LIMITS = {"head_seconds": 1.0, "body_seconds": 1.0, "write_seconds": 0.5, "connections": 8, "choices_per_key": 1000}


@pytest.fixture(scope="module")
def limited(bundle: Callable[[str], Path]) -> Iterator[Server]:
    script = Path(__file__).with_name("run_limited_server.py")
    command = [sys.executable, str(script), bundle("served"), json.dumps(LIMITS)]
    server = Server(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    server.url = server.read_until(r"listening at (\S+)")
    yield server.wait_until_ready()
    assert server.stop() == 0
    log = "".join(server.lines)
    assert "Traceback" not in log and "ERROR" not in log, log


def encode(body: dict) -> bytes:
    return json.dumps(body).encode()


def count_finished(server: Server) -> tuple[int, int]:
    """(requests that ended because the client disconnected, requests that ended at their last token)."""
    name = "vllm:request_success_total"
    aborted, completed = (int(read_sample(server, name, finished_reason=reason)) for reason in ("abort", "length"))
    return aborted, completed


def is_usable(server: Server) -> bool:
    with server.client() as client:
        return client.post(COMPLETIONS, json=SMALL).status_code == 200 and client.get("/health").status_code == 200


# -- clients that disconnect


@pytest.mark.parametrize(("stream", "later"), [(True, b""), (False, b""), (False, head("GET", "/health"))])
def test_disconnect_frees_slots_and_queue_places(served, stream, later):
    wait_until_idle(served)
    aborted, completed = count_finished(served)
    with RawClient(served) as client:
        client.ask("POST", COMPLETIONS, encode({**ENDLESS, "stream": stream}))
        wait_until_busy(served, 4, 12)
        client.send(later)
    wait_until_idle(served)
    left, ended = count_finished(served)
    assert left - aborted + ended - completed == 16 and ended - completed < 8  # fast machines end some before


@pytest.mark.parametrize("stream", [True, False])
def test_half_closed_client_gets_its_answer(served, stream):
    with RawClient(served) as client:
        client.ask("POST", COMPLETIONS, encode({**SMALL, "stream": stream}))
        client.socket.shutdown(socket.SHUT_WR)
        answer = client.read_until_closed()
        assert answer.startswith(b"HTTP/1.1 200") and (b"[DONE]" if stream else b"usage") in answer
    wait_until_idle(served)


# -- clients that send slowly


def trickle(client: RawClient) -> bytes:
    """Sends byte after byte until the server sends or closes; returns what the server sent."""
    try:
        while not select.select([client.socket], [], [], 0.05)[0]:
            client.send(b"x")
    except (BrokenPipeError, ConnectionResetError):
        pass
    return client.read_until_closed()


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: "])
def test_head_timeout_closes_the_connection(limited, start):
    with RawClient(limited) as silent, RawClient(limited) as slow:
        silent.send(start)
        slow.send(start or b"GET /")
        assert silent.read_until_closed() == trickle(slow) == b""


def test_head_timeout_applies_to_later_requests(limited):
    with RawClient(limited) as client:
        client.ask("GET", "/v1/models")
        assert client.read_response().status == 200
        client.send(b"GET /health HTTP/1.1\r\nx-a: ")
        assert trickle(client) == b""


@pytest.mark.parametrize("framing", [{"content_length": "1000"}, {"transfer_encoding": "chunked"}])
def test_body_timeout_is_answered_408(limited, framing):
    start = head("POST", COMPLETIONS, **framing) + b"3e8\r\n" * ("transfer_encoding" in framing)
    with RawClient(limited) as silent, RawClient(limited) as slow:
        for client in (silent, slow):
            client.send(start + b'{"prompt": "a')
        responses = [silent.read_until_closed(), trickle(slow)]
    for response in responses:
        assert response.startswith(b"HTTP/1.1 408 ")
        assert (
            json.loads(response.partition(b"\r\n\r\n")[2])["error"]["message"] == "the body did not arrive within 1 s"
        )
    assert is_usable(limited)


# -- clients that read slowly


@pytest.mark.parametrize("stream", [True, False])
def test_slow_reader_holds_no_slot_and_gets_the_whole_response(served, stream):
    wait_until_idle(served)
    aborted, completed = count_finished(served)
    with RawClient(served, receive_bytes=4096) as client:
        client.ask("POST", COMPLETIONS, encode({**LARGE, "n": 3, "max_tokens": 100, "stream": stream}))
        wait_until_busy(served, 3)
        assert is_usable(served)
        wait_until_idle(served)
        assert count_finished(served) == (aborted, completed + 4)
        response = b""
        while not response.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}"):
            response += client.file.read1()
        assert response.count(b"text_offset") >= 3


def test_write_timeout_closes_the_connection(limited):
    wait_until_idle(limited)
    aborted, completed = count_finished(limited)
    with RawClient(limited, receive_bytes=4096) as client:
        client.ask("POST", COMPLETIONS, encode({**LARGE, "stream": True}))
        wait_until_busy(limited, 4, 12)
        assert is_usable(limited)
        wait_until_idle(limited)
        assert count_finished(limited) > (aborted, completed), "the whole response was written"
        assert not client.read_until_closed().endswith(b"0\r\n\r\n")


def test_reader_that_goes_on_keeps_its_connection():
    async def read_all() -> bool:
        config = uvicorn.Config(read_all)
        config.load()
        ours, theirs = socket.socketpair()
        limits = ServerLimits(write_seconds=1.0)
        connect = partial(LimitedConnection, limits, config=config, server_state=ServerState(), app_state={})
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(connect, ours)
        with theirs, closing(transport):
            transport.write(bytes(2**23))
            while transport.get_write_buffer_size():
                await asyncio.to_thread(theirs.recv, 2**20)
            await asyncio.sleep(2.5)
            return not transport.is_closing()

    assert asyncio.run(read_all())


# -- number of connections


def test_connection_limit_closes_further_connections(limited):
    wait_until_idle(limited)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(limited)) for _ in range(LIMITS["connections"])]
        for client in clients:
            client.ask("POST", COMPLETIONS, encode({**ENDLESS, "stream": True}))
            assert b" 200 " in client.file.readline()
        with RawClient(limited) as another:
            assert another.read_until_closed() == b""
    wait_until(lambda: is_accepted(limited))
    wait_until_idle(limited)


def is_accepted(server: Server) -> bool:
    with RawClient(server) as client:
        try:
            client.ask("GET", "/health", connection="close")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return client.read_until_closed().startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(served):
    with RawClient(served) as client:
        request = head("POST", COMPLETIONS, content_length=str(len(encode(SMALL)))) + encode(SMALL)
        client.send(request * 3 + head("GET", "/health") + head("GET", "/nothing"))
        assert [client.read_response().status for _ in range(5)] == [200, 200, 200, 200, 404]


# -- malformed HTTP and other protocols


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # the beginning of TLS
        b"GET\r\n\r\n",
        GET.replace(b"1.1", b"0.9") + b"\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET http://localhost HTTP/1.1\r\nhost: localhost\r\n\r\n",  # without a path
        GET + b"x: a\r\n b\r\n\r\n",  # a folded header
        GET.replace(b"\r\n", b"\n") + b"\n",  # lines that end with LF only
        GET + b"x: a\n\r\n",
        GET + b"host: localhost\r\n\r\n",
        GET + b"x: a\r\n" * 128 + b"\r\n",
        GET + b"x: " + b"a" * (1 << 17),
        b"GET /" + b"a" * (1 << 17),
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without the Host header
        b"GET / HTTP/1.1\r\nhost: localhost\r\nbad header: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n",
    ],
)
def test_malformed_http_is_answered_400_and_closed(served, data):
    with RawClient(served) as client:
        client.send(data)
        response = client.read_response()
        assert response.status == 400
        error = json.loads(response.body)["error"]
        assert error.pop("message").startswith("malformed HTTP/1.1 request: ")
        assert error == {"type": "invalid_request_error", "param": None, "code": "invalid_http"}
        assert client.read_until_closed() == b""


@pytest.mark.parametrize(
    "chunks", [b"zz\r\n", b"0x1\r\n", b"1\nx\n", b"1;a\nb\r\nx\r\n", b"0\r\ncontent-length: 3\r\n\r\n"]
)
def test_malformed_chunks_are_refused(served, chunks):
    with RawClient(served) as client:
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked") + b"5\r\n{}   \r\n" + chunks)
        assert client.read_response().status == 400
        assert client.read_until_closed() == b""


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_upgrade_is_ignored_and_the_requests_are_answered(served, protocol):
    upgrade, body = {"connection": "upgrade", "upgrade": protocol}, encode(SMALL)
    with RawClient(served) as client:
        client.ask("GET", "/health", **upgrade)
        client.ask("POST", COMPLETIONS, body, **upgrade)
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked", **upgrade) + b"%x\r\n" % len(body))
        assert [client.read_response().status for _ in range(2)] == [200, 200]
        client.send(body + b"\r\n0\r\n\r\n" + head("GET", "/nothing"))
        assert [client.read_response().status for _ in range(2)] == [200, 404]


def test_malformed_request_is_refused_after_the_responses_to_earlier_requests(served):
    for malformed in (b"zz\r\n\r\n", head("POST", COMPLETIONS, transfer_encoding="chunked") + b"zz\r\n"):
        with RawClient(served) as client:
            request = head("POST", COMPLETIONS, content_length=str(len(encode(SMALL)))) + encode(SMALL)
            client.send(request * 2 + malformed + head("GET", "/health"))
            assert [client.read_response().status for _ in range(3)] == [200, 200, 400]
            assert client.read_until_closed() == b""
    assert is_usable(served)


def test_number_of_pipelined_requests_is_limited(served):
    with RawClient(served) as client:
        client.send(head("GET", "/health") * (MAX_PIPELINED + 2))
        assert [client.read_response().status for _ in range(MAX_PIPELINED + 2)] == [200] * (MAX_PIPELINED + 1) + [400]
        assert client.read_until_closed() == b""


def test_expect_continue_is_answered(served):
    body = encode(SMALL)
    with RawClient(served) as client:
        client.send(head("POST", COMPLETIONS, expect="100-continue", content_length=str(len(body))))
        assert client.file.readline() == b"HTTP/1.1 100 Continue\r\n"
        while client.file.readline() != b"\r\n":
            pass
        client.send(body)
        assert client.read_response().status == 200
