"""Soak of the server: random requests over HTTP, with disconnects, errors and hostile bytes."""

import json
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_aot.runtime import Engine, SamplingParams
from tests.runtime.traffic import THREADS, Tally, run_threads
from tests.server.conftest import Server
from tests.server.raw_client import RawClient, head, read_sample, wait_until_idle

PARTS = 6  # memory is compared between the third part and the last
COMPLETIONS = "/v1/completions"
PROMPTS = ("import os", "def main():", "class Queue:\n    def get(self", "x = [", "# a comment about tests\n")
KINDS = (
    {"temperature": 0},
    {"temperature": 0, "max_tokens": 3},
    {"temperature": 0, "k": 0},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_p": 0.9},
)
BAD = (
    (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}", 415),
    (head("POST", COMPLETIONS, content_length="2") + b"{}", 400),
    (b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    (b"GET /\x00 HTTP/1.1\r\n\r\n", 400),
    (head("POST", COMPLETIONS, content_length="9") + b'{"prompt"', 400),
    (head("POST", COMPLETIONS, transfer_encoding="chunked") + b"zz\r\n", 400),
)


Question = tuple[dict[str, object], str]  # the body of a request, and the text that the engine gives for it alone


class HttpTraffic:
    """Random requests to a server, each of which is answered as the engine answers it, refused or abandoned."""

    def __init__(self, server: Server, engine: Engine):
        self._server = server
        self._questions = [self._ask_engine(engine, prompt, kind) for prompt in PROMPTS for kind in KINDS]

    def _ask_engine(self, engine: Engine, prompt: str, kind: dict) -> Question:
        params = {"max_tokens": 12, **kind}
        return {"prompt": prompt, **params}, engine.generate(prompt, SamplingParams(**params)).text

    def send(self, rng: random.Random, count: int) -> Tally:
        tally = Tally()
        for kind in rng.choices((self._ask, self._stream, self._leave, self._err), weights=(4, 4, 3, 1), k=count):
            kind(rng, tally)
        return tally

    def _ask(self, rng: random.Random, tally: Tally) -> None:
        body, expected = rng.choice(self._questions)
        with RawClient(self._server) as client:
            client.ask("POST", COMPLETIONS, json.dumps(body).encode())
            response = client.read_response()
        if response.status == 503:
            tally.ends["refused"] += 1
        else:
            self._check(tally, expected, json.loads(response.body)["choices"][0]["text"])

    def _stream(self, rng: random.Random, tally: Tally) -> None:
        body, expected = rng.choice(self._questions)
        with RawClient(self._server) as client:
            client.ask("POST", COMPLETIONS, json.dumps({**body, "stream": True}).encode(), connection="close")
            answer = client.read_until_closed()
        if answer.startswith(b"HTTP/1.1 503"):
            tally.ends["refused"] += 1
            return
        events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
        self._check(tally, expected, "".join(json.loads(event)["choices"][0]["text"] for event in events))

    def _check(self, tally: Tally, expected: str, text: str) -> None:
        tally.ends["answered"] += 1
        if text != expected:
            tally.wrong.append((expected, text))

    def _leave(self, rng: random.Random, tally: Tally) -> None:
        """Disconnects in the head, in the body, before or in the answer; sometimes by a reset."""
        asked, _ = rng.choice(self._questions)
        body = json.dumps({**asked, "stream": rng.random() < 0.5}).encode()
        request = head("POST", COMPLETIONS, content_length=str(len(body))) + body
        with RawClient(self._server) as client:
            if rng.random() < 0.3:
                client.send(request[: rng.randrange(len(request))])
            else:
                client.send(request)
                client.socket.settimeout(rng.choice((0.001, 0.005, 0.02)))
                with suppress(TimeoutError):
                    client.socket.recv(rng.choice((1, 300)))
            if rng.random() < 0.3:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        tally.ends["left"] += 1

    def _err(self, rng: random.Random, tally: Tally) -> None:
        data, status = rng.choice(BAD)
        with RawClient(self._server) as client:
            client.send(data)
            client.socket.shutdown(socket.SHUT_WR)
            answer = client.read_until_closed()
        tally.ends["bad"] += 1
        if answer and not answer.startswith(f"HTTP/1.1 {status}".encode()):
            tally.wrong.append((data, answer))


def measure_usage(server: Server) -> tuple[int, int]:
    """Resident bytes and open files of the server's process."""
    process = Path(f"/proc/{server.process.pid}")
    (resident,) = (line.split()[1] for line in (process / "status").read_text().splitlines() if "VmRSS" in line)
    return 1024 * int(resident), len(os.listdir(process / "fd"))


def check_accounts(server: Server, tally: Tally) -> None:
    """Asserts that nothing is left behind, and that the server's counters fit what the clients observed."""
    wait_until_idle(server)
    ended = {
        reason: int(read_sample(server, "vllm:request_success_total", finished_reason=reason))
        for reason in ("stop", "length", "abort", "error")
    }
    whole = ended["stop"] + ended["length"]
    assert ended["error"] == 0
    assert tally.ends["answered"] <= whole <= tally.ends["answered"] + tally.ends["left"]
    assert whole + ended["abort"] <= tally.ends["answered"] + tally.ends["left"]
    assert tally.ends["refused"] <= read_sample(server, "dflash:refused_requests_total")
    for name in ("dflash:compile_events_total", "dflash:executable_failures_total"):
        assert read_sample(server, name) == 0


@pytest.mark.slow
def test_server_accounts_for_every_request(start_server, engine, soak_requests):
    server = start_server("--max_waiting=2").wait_until_ready()
    traffic, tally, used = HttpTraffic(server, engine), Tally(), []
    each = 3 * soak_requests // 10 // PARTS // THREADS
    for part in range(PARTS):
        tally += run_threads(lambda rng: traffic.send(rng, each), seed=part)
        check_accounts(server, tally)
        used.append(measure_usage(server))
    assert tally.wrong == []
    assert tally.ends.keys() == {"answered", "refused", "left", "bad"}
    (resident, files), (last_resident, last_files) = used[2], used[-1]
    assert last_files <= files + 4
    assert last_resident - resident < 32 << 20
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)
