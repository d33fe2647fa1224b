"""Clients that leave, that send or read too slowly, or that speak something else: nobody else notices."""

import json
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_aot.server.lifecycle import BACKLOG
from tests.runtime.stepper import wait_until
from tests.server.conftest import Server
from tests.server.raw_client import (
    ENDLESS,
    RawClient,
    count_requests,
    head,
    locate,
    read_sample,
    wait_until_busy,
    wait_until_idle,
)

COMPLETIONS = "/v1/completions"
SMALL = {"prompt": [17], "max_tokens": 1, "temperature": 0}
LARGE = {**ENDLESS, "logprobs": 20}  # more than all buffers on the way hold
LIMITS = {"head_seconds": 1.0, "body_seconds": 1.0, "write_seconds": 0.5, "connections": 8, "per_caller": 1000}


@pytest.fixture(scope="module")
def limited(bundle: Callable[[str], Path]) -> Iterator[Server]:
    """One that waits for nobody."""
    command = [sys.executable, str(Path(__file__).parent / "limited_server.py"), bundle("served"), json.dumps(LIMITS)]
    server = Server(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    server.url = server.read_until(r"listening at (\S+)")
    yield server.wait_until_ready()
    assert server.stop() == 0
    said = "".join(server.lines)
    assert "Traceback" not in said and "ERROR" not in said, said


def encode(body: dict) -> bytes:
    return json.dumps(body).encode()


def count_ends(server: Server) -> tuple[int, int]:
    """How many requests ended because their callers left, and how many at their last token."""
    ends = "vllm:request_success_total"
    left, done = (int(read_sample(server, ends, finished_reason=reason)) for reason in ("abort", "length"))
    return left, done


def is_usable(server: Server) -> bool:
    with server.client() as client:
        return client.post(COMPLETIONS, json=SMALL).status_code == 200 and client.get("/health").status_code == 200


# -- leaving


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choices", [1, 16])
def test_who_leaves_frees_its_slots_and_its_places_in_line(served, stream, choices):
    wait_until_idle(served)
    left, done = count_ends(served)
    with RawClient(served) as client:
        client.ask("POST", COMPLETIONS, encode({**ENDLESS, "n": choices, "stream": stream}))
        wait_until_busy(served, min(choices, 4), max(choices - 4, 0))
    wait_until_idle(served)
    assert count_ends(served) == (left + choices, done)


def test_who_leaves_in_mid_stream_has_heard_a_part(served):
    wait_until_idle(served)
    left, done = count_ends(served)
    with RawClient(served) as client:
        client.ask("POST", COMPLETIONS, encode({**ENDLESS, "stream": True}))
        while b"data: " not in client.file.readline():
            pass
    wait_until_idle(served)
    assert count_ends(served) == (left + 16, done)


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_at_once_leaves_nothing_behind(served, stream):
    wait_until_idle(served)
    for _ in range(20):
        with RawClient(served) as client:
            client.ask("POST", COMPLETIONS, encode({**ENDLESS, "stream": stream}))
    wait_until(lambda: is_usable(served))  # its turns are taken until it is known that nobody waits for them
    wait_until_idle(served)


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_the_line_takes_nobody_along(served, stream):
    wait_until_idle(served)
    left, done = count_ends(served)
    with RawClient(served) as first:
        first.ask("POST", COMPLETIONS, encode(ENDLESS))
        wait_until_busy(served, 4, 12)
        with RawClient(served) as second:
            second.ask("POST", COMPLETIONS, encode({**ENDLESS, "n": 8, "stream": stream}))
            wait_until(lambda: sum(count_requests(served)) == 24)
        wait_until(lambda: count_ends(served)[0] == left + 8)
    wait_until_idle(served)
    assert count_ends(served)[1] - done < 16, "the first one's was cut short too, when it left"


def test_a_reset_is_a_leave(served):
    wait_until_idle(served)
    left, done = count_ends(served)
    with RawClient(served) as client:
        client.ask("POST", COMPLETIONS, encode({**ENDLESS, "stream": True}))
        wait_until_busy(served, 4, 12)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until_idle(served)
    assert count_ends(served) == (left + 16, done)


def test_who_says_that_it_will_send_no_more_has_left(served):
    wait_until_idle(served)
    with RawClient(served) as client:
        client.ask("POST", COMPLETIONS, encode(ENDLESS))
        wait_until_busy(served, 4, 12)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.read_until_closed() == b""
    wait_until_idle(served)


# -- sending slowly


def trickle(client: RawClient) -> bytes:
    """Sends a letter, again and again, until the server says something or closes; returns what it said."""
    try:
        while not select.select([client.socket], [], [], 0.05)[0]:
            client.send(b"x")
    except (BrokenPipeError, ConnectionResetError):
        pass
    return client.read_until_closed()


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: "])
def test_a_head_that_does_not_end_is_not_waited_for(limited, start):
    with RawClient(limited) as silent, RawClient(limited) as slow:
        silent.send(start)
        slow.send(start or b"GET /")
        assert silent.read_until_closed() == trickle(slow) == b""


def test_a_second_head_is_not_waited_for_either(limited):
    with RawClient(limited) as client:
        client.ask("GET", "/v1/models")
        assert client.read_answer().status == 200
        client.send(b"GET /health HTTP/1.1\r\nx-a: ")
        assert trickle(client) == b""


@pytest.mark.parametrize("framing", [{"content_length": "1000"}, {"transfer_encoding": "chunked"}])
def test_a_body_that_does_not_come_is_told_of(limited, framing):
    start = head("POST", COMPLETIONS, **framing) + b"3e8\r\n" * ("transfer_encoding" in framing)
    with RawClient(limited) as silent, RawClient(limited) as slow:
        for client in (silent, slow):
            client.send(start + b'{"prompt": "a')
        said = [silent.read_until_closed(), trickle(slow)]
    for answer in said:
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "the body did not come within 1 s"
    assert is_usable(limited)


@pytest.mark.parametrize("leave", [lambda client: client.socket.shutdown(socket.SHUT_WR), lambda client: None])
def test_half_a_body_and_no_more_is_no_request(served, leave):
    wait_until_idle(served)
    with RawClient(served) as client:
        client.send(head("POST", COMPLETIONS, content_length="1000") + encode(SMALL))
        leave(client)
    assert is_usable(served)


# -- reading slowly


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_reads_holds_no_slot_and_waits_for_its_reader(served, stream):
    wait_until_idle(served)
    left, done = count_ends(served)
    with RawClient(served, receive_bytes=4096) as client:
        client.ask("POST", COMPLETIONS, encode({**LARGE, "n": 3, "max_tokens": 100, "stream": stream}))
        wait_until_busy(served, 3)
        assert is_usable(served)
        wait_until_idle(served)
        assert count_ends(served) == (left, done + 4)
        answer = b""
        while not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}"):
            answer += client.file.read1()
        assert answer.count(b"text_offset") >= 3


def test_who_does_not_read_is_not_written_to_for_ever(limited):
    wait_until_idle(limited)
    left, done = count_ends(limited)
    with RawClient(limited, receive_bytes=4096) as client:
        client.ask("POST", COMPLETIONS, encode({**LARGE, "stream": True}))
        wait_until_busy(limited, 4, 12)
        assert is_usable(limited)
        wait_until_idle(limited)
        assert count_ends(limited) > (left, done), "it was written to until the last token"
        assert not client.read_until_closed().endswith(b"0\r\n\r\n")


# -- connections


def test_there_are_no_more_connections_than_there_may_be(limited):
    wait_until_idle(limited)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(limited)) for _ in range(LIMITS["connections"])]
        for client in clients:
            client.ask("POST", COMPLETIONS, encode({**ENDLESS, "stream": True}))
            assert b" 200 " in client.file.readline()
        with RawClient(limited) as another:
            assert another.read_until_closed() == b""
    wait_until(lambda: is_let_in(limited))
    wait_until_idle(limited)


def test_who_opens_more_than_a_process_may_have_shuts_nobody_out(limited):
    """A server that meets the limit of its files goes round in circles, and says so each time."""
    wait_until_idle(limited)
    before = resource.prlimit(limited.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(limited.process.pid, resource.RLIMIT_NOFILE, (BACKLOG + 64, before[1]))
    try:
        with ExitStack() as stack:
            limited.process.send_signal(signal.SIGSTOP)  # so that they come all at once
            for _ in range(2 * BACKLOG):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(locate(limited))
            limited.process.send_signal(signal.SIGCONT)
            wait_until(lambda: is_let_in(limited))
    finally:
        resource.prlimit(limited.process.pid, resource.RLIMIT_NOFILE, before)


def is_let_in(server: Server) -> bool:
    with RawClient(server) as client:
        try:
            client.ask("GET", "/health", connection="close")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return client.read_until_closed().startswith(b"HTTP/1.1 200 ")


def test_requests_that_come_together_are_answered_one_after_the_other(served):
    with RawClient(served) as client:
        one = head("POST", COMPLETIONS, content_length=str(len(encode(SMALL)))) + encode(SMALL)
        client.send(one * 3 + head("GET", "/health") + head("GET", "/nothing"))
        assert [client.read_answer().status for _ in range(5)] == [200, 200, 200, 200, 404]


def test_who_leaves_with_another_request_sent_ahead_frees_its_slots(served):
    wait_until_idle(served)
    left, done = count_ends(served)
    with RawClient(served) as client:
        client.ask("POST", COMPLETIONS, encode({**ENDLESS, "stream": True}))
        client.ask("POST", COMPLETIONS, encode(ENDLESS))
        wait_until_busy(served, 4, 12)
    wait_until_idle(served)
    now_left, now_done = count_ends(served)
    assert now_left > left and now_done - done < 16


# -- something else


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # the beginning of TLS
        b"GET\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without the host that it must have
        b"GET / HTTP/1.1\r\nhost: localhost\r\nbad header: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n",
        b"EHLO localhost\r\n\r\n",
        bytes(range(256)) + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_once_and_closed(served, data):
    with RawClient(served) as client:
        client.send(data)
        answer = client.read_answer()
        assert answer.status == 400
        assert json.loads(answer.body)["error"] == {
            "message": "this is no HTTP/1.1 that is understood here, or its head is too large",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_http",
        }
        assert client.read_until_closed() == b""
    assert is_usable(served)


def test_a_body_in_broken_chunks_is_refused(served):
    with RawClient(served) as client:
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked") + b"5\r\n{}   \r\nzz\r\n")
        assert client.read_answer().status == 400
        assert client.read_until_closed() == b""
    assert is_usable(served)


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_is_not_made_and_the_request_is_answered(served, protocol):
    with RawClient(served) as client:
        client.ask("GET", "/health", connection="upgrade", upgrade=protocol)
        assert client.read_answer().status == 200


def test_who_waits_to_be_told_to_go_on_is_told(served):
    body = encode(SMALL)
    with RawClient(served) as client:
        client.send(head("POST", COMPLETIONS, expect="100-continue", content_length=str(len(body))))
        assert client.file.readline() == b"HTTP/1.1 100 Continue\r\n"
        while client.file.readline() != b"\r\n":
            pass
        client.send(body)
        assert client.read_answer().status == 200
