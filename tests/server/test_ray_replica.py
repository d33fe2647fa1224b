"""Ray Serve replicas: responses, routing, failures, options, and the example script."""

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from dflash_aot.cache.errors import BadInput, EngineFailed, MissingBundle
from dflash_aot.runtime import SamplingParams
from dflash_aot.server.limits import ApiKeys, ServerLimits
from dflash_aot.server.served_model import ServingConfig
from tests.ray_processes import TIMEOUT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback, see compile/pipeline/ray_pool.py
    # By default a proxy that takes longer than 5 s, as on a busy machine, is killed.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(TIMEOUT),
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(TIMEOUT),
}
BODY = {"model": "embedded", "prompt": "def f(x):", "max_tokens": 16, "temperature": 0}


@dataclass(frozen=True)
class Example:
    """The example script."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=TIMEOUT)


@contextmanager
def start_example(bundle: Path, *arguments: str) -> Iterator[Example]:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), str(bundle), f"--port={port}", "--cpus=0.5", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | RAY
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout and any("serving at" in line for line in process.stdout)
            threading.Thread(target=process.stdout.read, daemon=True).start()  # so that the pipe is never full
            yield Example(process, port)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def example(bundle) -> Iterator[Example]:
    with start_example(bundle("served")) as example:
        yield example


def test_responses_equal_the_engines_whole_and_streamed(example, engine):
    expected = engine.generate(BODY["prompt"], SamplingParams(max_tokens=BODY["max_tokens"])).text
    body = {**BODY, "stream": True}
    with httpx.stream("POST", f"{example.url}/v1/completions", json=body, timeout=TIMEOUT) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in events.iter_lines() if line]
    parts = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and len(parts) > 2
    assert "".join(parts) == example.complete().json()["choices"][0]["text"] == expected
    assert httpx.get(f"{example.url}/v1/models", headers={"host": "elsewhere"}).status_code == 403  # without keys


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
