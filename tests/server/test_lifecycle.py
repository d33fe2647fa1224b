"""From the first line of a server to its last: phases, readiness, draining, exit codes."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import httpx
import pytest

from tests.server.conftest import PATIENCE, Server

PROMPT = "import os"
LONG = {"prompt": PROMPT, "max_tokens": 240, "temperature": 0, "stop_token_ids": [], "k": 0}


def read_stream(server: Server, heard: threading.Event, into: list[bytes]) -> None:
    """All events of a long answer; `heard` is set at the first."""
    with server.client() as client, client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        for line in answer.iter_lines():
            into.append(line)
            heard.set()


def read_until_cut(server: Server, heard: threading.Event) -> None:
    """Answers as many as 16 callers could want, until the connection is lost."""
    asked = {**LONG, "n": 16, "stream": True}
    with (
        suppress(httpx.TransportError),
        server.client() as client,
        client.stream("POST", "/v1/completions", json=asked) as answer,
    ):
        for _ in answer.iter_lines():
            heard.set()


def test_health_tells_the_phase_until_it_is_ready(start_server):
    server = start_server("--preload")
    with server.client() as client:
        phases = []
        while (answer := client.get("/health")).status_code == 503:
            told = answer.json()
            assert told["status"] == "loading"
            phases.append(told["phase"])
            refused = client.post("/v1/completions", json={"prompt": PROMPT})
            if refused.status_code == 503:
                assert refused.json()["error"]["code"] == "loading" and refused.headers["retry-after"] == "1"
        assert phases and set(phases) <= {"start", "bundle", "weights", "canaries", "timing", "tokenizer"}
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
        assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200
    assert server.stop() == 0
    said = "".join(server.lines)
    order = [said.index(f"{phase} ...") for phase in ("bundle", "weights", "canaries", "timing", "tokenizer")]
    assert order == sorted(order)
    assert f"embedded at {server.url}/v1" in said
    assert server.url.startswith("http://127.0.0.1:")


def test_without_preload_nothing_is_called_before_it_is_ready(start_server):
    server = start_server().wait_until_ready()
    assert "canaries" not in "".join(server.lines)
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_under_way_is_answered_before_the_end(start_server, number):
    server = start_server().wait_until_ready()
    heard, lines = threading.Event(), []
    reader = threading.Thread(target=read_stream, args=(server, heard, lines))
    reader.start()
    assert heard.wait(PATIENCE)
    code = server.stop(number)
    reader.join(PATIENCE)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert lines[-2:] == ["data: [DONE]", ""]
    assert code == (0 if number == signal.SIGTERM else 130)
    assert "Traceback" not in "".join(server.lines)


def test_what_is_not_done_in_time_ends_as_an_error_in_words(start_server):
    server = start_server("--drain_seconds=0").wait_until_ready()
    heard, lines = threading.Event(), []
    reader = threading.Thread(target=read_stream, args=(server, heard, lines))
    reader.start()
    assert heard.wait(PATIENCE)
    assert server.stop() == 0
    reader.join(PATIENCE)
    *_, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert last["error"]["code"] == "draining" and "shutting down" in last["error"]["message"]
    assert lines[-2:] == ["data: [DONE]", ""]


def test_it_can_be_ended_while_it_opens(start_server):
    server = start_server()
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


def test_a_port_that_is_taken_is_named(start_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"cannot listen at 127.0.0.1, port {port}: Address already in use"):
            start_server(f"--port={port}")


def test_a_bundle_that_is_not_there_ends_it_with_its_exit_code(tmp_path):
    server = Server.start(tmp_path / "none")
    assert server.wait() == 2
    assert "there is no bundle" in "".join(server.lines) and "Traceback" not in "".join(server.lines)


def test_a_corrupt_bundle_ends_it_with_its_exit_code(bundle, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(bundle("served"), broken)
    for executable in (broken / "executables").iterdir():
        executable.write_bytes(b"no executable")
    server = Server.start(broken)
    assert server.wait() == 3
    assert "Mend it" in "".join(server.lines) and "Traceback" not in "".join(server.lines)


ENGINE_ENDS = """
import sys
from dflash_aot.cache.errors import EngineFailed
from dflash_aot.server.lifecycle import Observer, listen, serve
from dflash_aot.server.served_model import Serving
from dflash_aot.server.server_state import Service

class Saboteur(Observer):
    def note_ready(self):
        service.opened.engine.close()

service = Service(Serving(sys.argv[1], preload=False))
with listen("127.0.0.1", 0) as listener:
    try:
        serve(service, listener, None, observer=Saboteur())
    except EngineFailed as error:
        print(error)
"""


def test_a_server_whose_engine_has_failed_ends_and_says_why(bundle):
    command = [sys.executable, "-c", ENGINE_ENDS, str(bundle("served"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert "the engine has failed: the engine was closed" in done.stdout, done.stderr


def test_a_bundle_that_cannot_sample_has_no_temperature_by_default(start_server, speaking_target):
    greedy = start_server(f"--target={speaking_target}", name="tiny").wait_until_ready()
    with greedy.client() as client:
        assert client.get("/v1/models").json()["data"][0]["dflash"]["temperature"] == 0
        asked = {"prompt": "a", "max_tokens": 1}
        assert client.post("/v1/completions", json=asked).status_code == 200
        refused = client.post("/v1/completions", json={**asked, "temperature": 1}).json()["error"]
        assert (refused["code"], refused["param"]) == ("not_built", "temperature")
    warm = start_server(f"--target={speaking_target}", "--temperature=0.5", name="tiny")
    assert warm.wait() == 2 and "build with --sampling greedy,sample" in "".join(warm.lines)


def test_a_second_interrupt_ends_it_at_once(start_server):
    server = start_server("--drain_seconds=1000", "--request_seconds=1000").wait_until_ready()
    heard = threading.Event()
    reader = threading.Thread(target=read_until_cut, args=(server, heard))
    reader.start()
    assert heard.wait(PATIENCE)
    server.process.send_signal(signal.SIGINT)
    with server.client() as client:
        while True:
            try:
                client.get("/health")
            except httpx.TransportError:
                break  # it listens no more
    assert server.stop(signal.SIGINT) == 130
    reader.join(PATIENCE)


def test_a_name_of_ones_own(start_server):
    server = start_server("--served_model_name=mine", "--temperature=0").wait_until_ready()
    with server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["dflash"]["temperature"]) == ("mine", 0.0)
        assert 'model_name="mine"' in client.get("/metrics").text
        same = {client.post("/v1/completions", json={"prompt": PROMPT}).json()["choices"][0]["text"] for _ in range(2)}
    assert len(same) == 1


def test_a_directory_is_known_by_its_name_alone(start_server, bundle, speaking_target):
    server = start_server(f"--target={speaking_target}", name="sampled").wait_until_ready()
    with server.client() as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "target"
        for path in ("/v1/models", "/metrics", "/health", "/openapi.json"):
            assert str(speaking_target.parent) not in client.get(path).text


def test_requests_are_logged_without_their_texts_where_that_is_asked_for(start_server):
    server = start_server("--access_log").wait_until_ready()
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "secret", "max_tokens": 1})
    server.stop()
    said = "".join(server.lines)
    assert f"{answer.headers['x-request-id']} POST /v1/completions" in said and "secret" not in said


def test_nothing_is_compiled(served):
    with httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
        for k in (0, 7):
            asked = {"prompt": PROMPT, "max_tokens": 20, "k": k, "n": 3}
            assert client.post("/v1/completions", json=asked).status_code == 200
        numbers = dict(
            line.rpartition(" ")[::2] for line in client.get("/metrics").text.splitlines() if not line.startswith("#")
        )
    (events,) = [value for name, value in numbers.items() if name.startswith("dflash:compile_events_total")]
    assert float(events) == 0
