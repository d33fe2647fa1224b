"""Server lifecycle: phases of the start, readiness, draining, exit codes."""

import json
import shutil
import signal
import socket
import threading
from contextlib import suppress
from urllib.parse import quote

import httpx
import pytest

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.server.lifecycle import LifecycleObserver, listen, serve
from dflash_aot.server.served_model import ServerState, ServingConfig
from tests.server.conftest import EMBEDDED_TARGET, PATIENCE, Server
from tests.server.raw_client import read_error

PROMPT = "import os"
LONG = {"prompt": PROMPT, "max_tokens": 240, "temperature": 0, "stop_token_ids": [], "k": 0}


def read_stream(server: Server, began: threading.Event, lines: list[str], choices: int = 1) -> None:
    """Reads all lines of a long stream; `began` is set at the first line."""
    body = {**LONG, "n": choices, "stream": True}
    with (
        suppress(httpx.TransportError),
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        for line in response.iter_lines():
            lines.append(line)
            began.set()


def start_stream(server: Server, choices: int = 1) -> tuple[threading.Thread, list[str]]:
    """The thread that reads a stream, which has begun, and the lines so far."""
    began, lines = threading.Event(), []
    reader = threading.Thread(target=read_stream, args=(server, began, lines, choices))
    reader.start()
    assert began.wait(PATIENCE)
    return reader, lines


@pytest.mark.parametrize("flags", [[], ["--drain_seconds=0"]], ids=str)
def test_open_requests_are_answered_or_refused_before_exit(start_server, flags):
    server = start_server(*flags).wait_until_ready()
    reader, lines = start_stream(server)
    assert server.stop() == 0
    reader.join(PATIENCE)
    *_, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if flags:
        assert last["error"]["code"] == "draining" and "shutting down" in last["error"]["message"]
    else:
        assert last["choices"][0]["finish_reason"] == "length"
    assert lines[-2:] == ["data: [DONE]", ""]
    assert "Traceback" not in "".join(server.lines)


def test_second_interrupt_exits_at_once(start_server):
    server = start_server("--drain_seconds=1000", "--request_seconds=1000").wait_until_ready()
    reader, lines = start_stream(server, choices=16)
    server.process.send_signal(signal.SIGINT)
    with server.client() as client:
        while True:
            try:
                client.get("/health")
            except httpx.TransportError:
                break  # it no longer listens
    assert server.stop(signal.SIGINT) == 130
    reader.join(PATIENCE)
    assert "data: [DONE]" not in lines


def test_hostile_names_stay_out_of_log_and_responses(start_server, tmp_path):
    """The name of a target's directory is the name of the model in the log, responses and metrics."""
    forged = "dflash-serve: signed by the release key"
    draft = locate_checkpoint(EMBEDDED, "draft")
    target = tmp_path / f"x\r\n{forged}\n\x1b[2K\x9b\u202e\u2028\u200b"
    shutil.copytree(EMBEDDED_TARGET, target)
    server = start_server(f"--target={target}", f"--draft={draft}", "--access_log").wait_until_ready()
    assert "first calls" not in "".join(server.lines)  # without --preload
    with server.client() as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        assert name.isprintable() and name.startswith(rf"x\r\n{forged}\n\x1b")
        texts = [client.get("/metrics").text, client.get(f"/v1/models/%0A{quote(forged)}%1b").text]
        answer = client.post("/v1/completions", json={"model": name, "prompt": "secret", "max_tokens": 1})
        assert answer.is_success
    assert server.stop() == 0
    log = "".join(server.lines)
    assert f"{answer.headers['x-request-id']} POST /v1/completions" in log and "secret" not in log
    for line in "\n".join([*texts, *(line.removesuffix("\n") for line in server.lines[1:])]).split("\n"):
        assert line.isprintable() and not line.startswith(forged)


def test_health_reports_the_phase_until_the_server_is_ready(start_server):
    server = start_server("--preload")
    with server.client() as client:
        phases = []
        while (response := client.get("/health")).status_code == 503:
            health = response.json()
            assert health["status"] == "loading"
            phases.append(health["phase"])
            refused = client.post("/v1/completions", json={"prompt": PROMPT})
            if refused.status_code == 503:
                assert refused.json()["error"]["code"] == "loading" and refused.headers["retry-after"] == "1"
        assert phases and set(phases) <= {"start", "bundle", "weights", "first_calls", "timing", "tokenizer"}
        assert response.status_code == 200 and response.json().keys() == {"status", "weights"}
        assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200
    assert server.stop() == 0
    log = "".join(server.lines)
    order = [log.index(f"{phase} ...") for phase in ("bundle", "weights", "first calls", "timing", "tokenizer")]
    assert order == sorted(order)
    assert f"embedded at {server.url}/v1" in log and f"weights {response.json()['weights']}: target /" in log
    assert server.url.startswith("http://127.0.0.1:")


def test_port_in_use_is_reported(start_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"cannot listen at 127.0.0.1, port {port}: Address already in use"):
            start_server(f"--port={port}")


def test_server_ends_with_the_reason_when_its_engine_fails(bundle):
    class ClosingObserver(LifecycleObserver):
        def on_ready(self):
            state.opened.engine.close()

    state = ServerState(ServingConfig(str(bundle("served")), preload=False))
    failed = pytest.raises(EngineFailed, match="the engine has failed: the engine was closed")
    with listen("127.0.0.1", 0) as listener, failed:
        serve(state, listener, None, observer=ClosingObserver())
    assert state.status == "failed"


def test_greedy_bundle_of_a_directory_is_served_by_its_name(start_server, speaking_target):
    greedy = start_server(f"--target={speaking_target}", name="tiny").wait_until_ready()
    with greedy.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["dflash"]["temperature"]) == ("target", 0)
        for path in ("/v1/models", "/metrics", "/health", "/openapi.json"):
            assert str(speaking_target.parent) not in client.get(path).text
        body = {"prompt": "a", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        refused = client.post("/v1/completions", json={**body, "temperature": 1}).json()["error"]
        assert (refused["code"], refused["param"]) == ("not_built", "temperature")
    warm = start_server(f"--target={speaking_target}", "--temperature=0.5", name="tiny")
    assert warm.wait() == 2 and "build with --sampling greedy,sample" in "".join(warm.lines)


def test_tokenizer_panic_is_answered_in_openai_form_under_the_given_name(start_server, make_hostile_target):
    flags = (f"--target={make_hostile_target('(a|a)*$')}", "--served_model_name=custom", "--temperature=0")
    server = start_server(*flags).wait_until_ready()
    with server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["dflash"]["temperature"]) == ("custom", 0.0)
        assert 'model_name="custom"' in client.get("/metrics").text
        for stream in (False, True):
            body = {"prompt": "a" * 60 + "b", "max_tokens": 1, "stream": stream}
            message = read_error(client.post("/v1/completions", json=body), 500, "internal_error")
            assert message.startswith("the server failed at this request. The cause is in its log, under ")
        assert client.post("/v1/completions", json={"prompt": "b", "max_tokens": 1}).status_code == 200
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)
