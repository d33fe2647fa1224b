"""Replicas on Ray Serve: which one is asked, and what becomes of requests when one dies."""

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
from dflash_aot.server.api_keys import Keys
from dflash_aot.server.limits import Limits
from dflash_aot.server.served_model import Serving
from tests.ray_processes import PATIENCE, wait_for_running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
REPLICA = "ServeReplica"
ASKS = 20
RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback, see compile/pipeline/ray_cluster.py
    # A proxy that takes longer than 5 s on a machine that is busy is killed, and whoever waits for it hears of that.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PATIENCE),
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(PATIENCE),
}
ASKED = {"model": "embedded", "prompt": "def f(x):", "max_tokens": 16, "temperature": 0}


@dataclass(frozen=True)
class Served:
    """Two replicas behind one proxy; `ask_handle` gives the statistics of the one that Ray chooses."""

    port: int
    ask_handle: Callable[[], dict[str, Any]]
    ask_controller: Callable[[], Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def find_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def replicas(bundle) -> Iterator[Served]:
    os.environ.update(RAY)
    import ray  # noqa: PLC0415  it takes a second
    from ray import serve  # noqa: PLC0415

    from dflash_aot.server.ray_replica import Options, build  # noqa: PLC0415

    port, before = find_port(), signal.getsignal(signal.SIGTERM)
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    handle = serve.run(build(Options(bundle=str(bundle("served")), replicas=2, without_keys=True)))
    yield Served(port, lambda: handle.stats.remote().result(timeout_s=PATIENCE), serve.status)
    serve.shutdown()
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


@contextmanager
def half_asked(port: int) -> Iterator[Callable[[], tuple[int, dict[str, Any]]]]:
    """A request that keeps its replica waiting, until the rest of it is sent: for the answer."""
    body = json.dumps(ASKED).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body[:10])

        def finish() -> tuple[int, dict[str, Any]]:
            connection.send(body[10:])
            response = connection.getresponse()
            return response.status, json.load(response)

        yield finish


def count_chosen(served: Served) -> Counter[str]:
    """How often each replica was, of `ASKS` that a handle asked one after the other."""
    chosen: Counter[str] = Counter()
    for _ in range(ASKS):
        chosen[served.ask_handle()["replica"]] += 1
        served.ask_controller()  # meanwhile Ray's router learns that the one before is done
    return chosen


def test_answers_are_those_of_one_server_whole_and_in_events(replicas, engine):
    expected = engine.generate(ASKED["prompt"], SamplingParams(max_tokens=ASKED["max_tokens"])).text
    whole = httpx.post(f"{replicas.url}/v1/completions", json=ASKED, timeout=PATIENCE).json()
    with httpx.stream(
        "POST", f"{replicas.url}/v1/completions", json={**ASKED, "stream": True}, timeout=PATIENCE
    ) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in events.iter_lines() if line]
    parts = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and len(parts) > 2
    assert "".join(parts) == whole["choices"][0]["text"] == expected


def test_the_shorter_queue_is_chosen(replicas):
    """With one request more in one of them nearly all go to the other: chance alone makes that of two in 10,000."""
    wait_until(lambda: len(count_chosen(replicas)) == 2)
    with half_asked(replicas.port) as finish:
        wait_until(lambda: max(count_chosen(replicas).values()) >= ASKS - 2)
        assert finish()[0] == 200


def test_a_client_that_leaves_frees_its_slots(replicas):
    asked = {**ASKED, "stream": True, "n": 4, "max_tokens": 200, "temperature": 1, "seed": 1}
    with httpx.stream("POST", f"{replicas.url}/v1/completions", json=asked, timeout=PATIENCE) as events:
        assert next(events.iter_lines())
    ended = 'finished_reason="abort",model_name="embedded"} 4.0'  # of one of the two, and either may be asked
    wait_until(lambda: ended in httpx.get(f"{replicas.url}/metrics", timeout=PATIENCE).text)


def test_who_asks_by_another_name_needs_a_key(replicas):
    refused = httpx.get(f"{replicas.url}/v1/models", headers={"host": "elsewhere"})
    assert refused.status_code == 403


def test_one_replica_dies_and_the_other_answers_until_a_new_one_comes(replicas):
    answers, stop = [], threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            try:
                answers.append(httpx.post(f"{replicas.url}/v1/completions", json=ASKED, timeout=PATIENCE).status_code)
            except httpx.HTTPError as error:
                answers.append(repr(error))

    before = wait_for_running(REPLICA, count=2)
    client = threading.Thread(target=keep_asking)
    client.start()
    try:
        wait_until(lambda: len(answers) > 2)
        os.kill(before[0], signal.SIGKILL)
        known = len(answers)
        wait_until(lambda: len(answers) > known + 5)
        wait_until(lambda: set(wait_for_running(REPLICA, count=2)) - set(before))
        wait_until(lambda: len(count_chosen(replicas)) == 2)
    finally:
        stop.set()
        client.join()
    assert sum(answer != 200 for answer in answers) <= 1, answers  # the one that it had
    assert all(replicas.ask_handle()["compile_events"] == 0 for _ in range(10))


def wait_until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_replica_is_healthy_as_long_as_its_engine_serves(bundle):
    from dflash_aot.server.ray_replica import Replica  # noqa: PLC0415  it imports Ray

    async def live() -> None:
        replica = Replica(Serving(str(bundle("served")), preload=False), Limits(), Keys())
        await replica.check_health()
        replica.__del__()
        replica._service.draining = False
        with pytest.raises(EngineFailed, match="the engine has failed: the engine was closed"):
            await replica.check_health()

    asyncio.run(live())


def test_ray_is_told_what_a_replica_takes():
    from dflash_aot.server.ray_replica import Options, describe_deployment  # noqa: PLC0415  it imports Ray

    options = Options(bundle="bundle", replicas=3, actor={"resources": {"TPU": 4}}, max_waiting=5)
    deployment = describe_deployment(options, slots=4)
    assert (deployment.num_replicas, deployment.max_ongoing_requests) == (3, 9)
    assert deployment.ray_actor_options["resources"] == {"TPU": 4}


def test_options_that_cannot_be_meant_are_refused(bundle, tmp_path):
    from dflash_aot.server.ray_replica import Options, build  # noqa: PLC0415  it imports Ray

    with pytest.raises(ValidationError, match="replica\n.*not permitted"):
        Options(bundle="bundle", replica=3)
    with pytest.raises(MissingBundle, match="does not exist"):
        build(Options(bundle=str(tmp_path), without_keys=True))
    with pytest.raises(BadInput, match="cannot be read"):
        build(Options(bundle=str(bundle("served")), api_keys=tmp_path / "none"))
    with pytest.raises(BadInput, match="whoever reaches Ray's proxy could ask: give api_keys"):
        build(Options(bundle=str(bundle("served"))))


def test_the_example_answers_what_it_has_begun_before_it_ends(bundle):
    port = find_port()
    command = [sys.executable, str(EXAMPLE), str(bundle("served")), f"--port={port}"]
    environment = {**os.environ, **RAY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        try:
            assert "serving at" in next(line for line in process.stdout if "serving" in line)
            with half_asked(port) as finish:
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: is_closed(port))
                status, answer = finish()
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def is_closed(port: int) -> bool:
    """To new requests."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code != 200
    except httpx.HTTPError:
        return True
