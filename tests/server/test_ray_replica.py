"""Ray Serve replicas: responses, routing, failures, options, and the example script."""

import asyncio
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from dflash_aot.cache.errors import BadInput, EngineFailed, MissingBundle
from dflash_aot.runtime import SamplingParams
from dflash_aot.server.api_keys import ApiKeys
from dflash_aot.server.limits import ServerLimits
from dflash_aot.server.served_model import ServingConfig
from tests.ray_processes import TIMEOUT, wait_for_running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
REPLICA = "ServeReplica"
CALLS = 20
RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback, see compile/pipeline/ray_pool.py
    # By default a proxy that takes longer than 5 s, as on a busy machine, is killed.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(TIMEOUT),
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(TIMEOUT),
}
BODY = {"model": "embedded", "prompt": "def f(x):", "max_tokens": 16, "temperature": 0}


@dataclass(frozen=True)
class ReplicaPair:
    """Two replicas behind one proxy; `call_handle` returns the counters of the replica that Ray chooses."""

    port: int
    call_handle: Callable[[], dict[str, Any]]
    call_controller: Callable[[], Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def find_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def replicas(bundle) -> Iterator[ReplicaPair]:
    os.environ.update(RAY)
    import ray  # noqa: PLC0415  its import takes a second
    from ray import serve  # noqa: PLC0415

    from dflash_aot.server.ray_replica import Options, build  # noqa: PLC0415

    port, before = find_port(), signal.getsignal(signal.SIGTERM)
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    handle = serve.run(build(Options(bundle=str(bundle("served")), replicas=2, without_keys=True)))
    yield ReplicaPair(port, lambda: handle.stats.remote().result(timeout_s=TIMEOUT), serve.status)
    serve.shutdown()
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


@contextmanager
def send_half(port: int) -> Iterator[Callable[[], tuple[int, dict[str, Any]]]]:
    """Sends half of a request, which occupies its replica; yields a function that sends the rest for the response."""
    body = json.dumps(BODY).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body[:10])

        def finish() -> tuple[int, dict[str, Any]]:
            connection.send(body[10:])
            response = connection.getresponse()
            return response.status, json.load(response)

        yield finish


def count_chosen(served: ReplicaPair) -> Counter[str]:
    """How often each replica was chosen, in `CALLS` calls of the handle one after another."""
    chosen: Counter[str] = Counter()
    for _ in range(CALLS):
        chosen[served.call_handle()["replica"]] += 1
        served.call_controller()  # meanwhile Ray's router learns that the call before has ended
    return chosen


def test_responses_equal_the_engines_whole_and_streamed(replicas, engine):
    expected = engine.generate(BODY["prompt"], SamplingParams(max_tokens=BODY["max_tokens"])).text
    whole = httpx.post(f"{replicas.url}/v1/completions", json=BODY, timeout=TIMEOUT).json()
    with httpx.stream(
        "POST", f"{replicas.url}/v1/completions", json={**BODY, "stream": True}, timeout=TIMEOUT
    ) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in events.iter_lines() if line]
    parts = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and len(parts) > 2
    assert "".join(parts) == whole["choices"][0]["text"] == expected


def test_replica_with_the_shorter_queue_is_chosen(replicas):
    """With one more request at one replica, nearly all calls go to the other; by chance this has probability 0.0002."""
    wait_until(lambda: len(count_chosen(replicas)) == 2)
    with send_half(replicas.port) as finish:
        wait_until(lambda: max(count_chosen(replicas).values()) >= CALLS - 2)
        assert finish()[0] == 200


def test_disconnect_frees_slots_of_a_replica(replicas):
    body = {**BODY, "stream": True, "n": 4, "max_tokens": 200, "temperature": 1, "seed": 1}
    with httpx.stream("POST", f"{replicas.url}/v1/completions", json=body, timeout=TIMEOUT) as events:
        assert next(events.iter_lines())
    ended = 'finished_reason="abort",model_name="embedded"} 4.0'  # of one replica; /metrics may come from either
    wait_until(lambda: ended in httpx.get(f"{replicas.url}/metrics", timeout=TIMEOUT).text)


def test_other_hosts_are_refused_without_keys(replicas):
    refused = httpx.get(f"{replicas.url}/v1/models", headers={"host": "elsewhere"})
    assert refused.status_code == 403


def test_killed_replica_is_replaced_while_the_other_serves(replicas):
    responses, stop = [], threading.Event()

    def keep_requesting() -> None:
        while not stop.is_set():
            try:
                responses.append(httpx.post(f"{replicas.url}/v1/completions", json=BODY, timeout=TIMEOUT).status_code)
            except httpx.HTTPError as error:
                responses.append(repr(error))

    before = wait_for_running(REPLICA, count=2)
    client = threading.Thread(target=keep_requesting)
    client.start()
    try:
        wait_until(lambda: len(responses) > 2)
        os.kill(before[0], signal.SIGKILL)
        known = len(responses)
        wait_until(lambda: len(responses) > known + 5)
        wait_until(lambda: set(wait_for_running(REPLICA, count=2)) - set(before))
        wait_until(lambda: len(count_chosen(replicas)) == 2)
    finally:
        stop.set()
        client.join()
    assert sum(response != 200 for response in responses) <= 1, responses  # the request of the killed replica
    assert all(replicas.call_handle()["compile_events"] == 0 for _ in range(10))


def wait_until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_health_check_fails_when_the_engine_has_failed(bundle):
    from dflash_aot.server.ray_replica import Replica  # noqa: PLC0415  it imports Ray

    async def check() -> None:
        replica = Replica(ServingConfig(str(bundle("served")), preload=False), ServerLimits(), ApiKeys())
        await replica.check_health()
        replica.__del__()
        replica._state.draining = False
        with pytest.raises(EngineFailed, match="the engine has failed: the engine was closed"):
            await replica.check_health()

    asyncio.run(check())


def test_deployment_limits_requests_to_slots_and_queue():
    from dflash_aot.server.ray_replica import Options, choose_limits, make_deployment  # noqa: PLC0415  it imports Ray

    options = Options(bundle="bundle", replicas=3, actor={"resources": {"TPU": 4}}, max_waiting=5)
    deployment = make_deployment(options, slots=4)
    assert (deployment.num_replicas, deployment.max_ongoing_requests) == (3, 9)
    assert deployment.ray_actor_options["resources"] == {"TPU": 4}
    assert [choose_limits(options, slots).choices_per_key for slots in (4, 64)] == [64, 69]


@pytest.mark.parametrize("k", ["[[1, 4, 7], [5, 8, 0]]", [[1, 4, 7], [5, 8, 0]]], ids=["text", "yaml"])
def test_options_take_k_by_batch_size(k):
    """As name=value of `serve run`, and under `args`."""
    from dflash_aot.server.ray_replica import Options  # noqa: PLC0415  it imports Ray

    assert Options(bundle="bundle", k=k).k == ((1, 4, 7), (5, 8, 0))
    assert (Options(bundle="bundle", k="7").k, Options(bundle="bundle", k="auto").k) == (7, "auto")


def test_invalid_options_are_refused(bundle, tmp_path):
    from dflash_aot.server.ray_replica import Options, build  # noqa: PLC0415  it imports Ray

    with pytest.raises(ValidationError, match="replica\n.*not permitted"):
        Options(bundle="bundle", replica=3)
    with pytest.raises(MissingBundle, match="does not exist"):
        build(Options(bundle=str(tmp_path), without_keys=True))
    with pytest.raises(BadInput, match="cannot be read"):
        build(Options(bundle=str(bundle("served")), api_keys=tmp_path / "none"))
    with pytest.raises(BadInput, match="open to everyone who can reach Ray's proxy: give api_keys"):
        build(Options(bundle=str(bundle("served"))))


def test_example_answers_open_requests_before_exit(bundle):
    port = find_port()
    command = [sys.executable, str(EXAMPLE), str(bundle("served")), f"--port={port}"]
    environment = {**os.environ, **RAY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        try:
            assert "serving at" in next(line for line in process.stdout if "serving" in line)
            with send_half(port) as finish:
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: is_closed(port))
                status, response = finish()
            assert (status, response["choices"][0]["finish_reason"]) == (200, "length")
            assert process.wait(TIMEOUT) == 0
        finally:
            process.kill()


def is_closed(port: int) -> bool:
    """Whether new requests are refused."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code != 200
    except httpx.HTTPError:
        return True
