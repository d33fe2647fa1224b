"""The examples that embed an engine, each run as a subprocess with the embedded pair."""

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from dflash_aot.runtime import Engine, SamplingParams

EXAMPLES = Path(__file__).parents[1] / "examples"
TIMEOUT = 120  # seconds, for a busy machine
LONG = 200  # tokens: still in flight when a test cancels the request


@pytest.fixture(scope="module")
def served(bundle: Callable[[str], Path]) -> Path:
    return bundle("served")


@pytest.fixture(scope="module")
def expected(served: Path) -> Callable[[str, int], str]:
    """A prompt and a number of tokens → the text that the engine generates."""
    with Engine.open(served) as engine:
        texts = {prompt: engine.generate(prompt, SamplingParams(max_tokens=LONG)) for prompt in ("import os", "class")}
        tokenizer = engine.tokenizer

    def find(prompt: str, tokens: int) -> str:
        return tokenizer.decode(texts[prompt].token_ids[:tokens])

    return find


@contextmanager
def start(example: str, bundle: Path, *flags: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(EXAMPLES / example), f"--bundle={bundle}", *flags]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=stdout, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_script_generates_and_streams(served, expected):
    with start("embed_script.py", served) as process:
        out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    assert f"one: {expected('import os', 24)!r}, length" in out
    assert f"all: 'import os' → {expected('import os', 12)!r}" in out
    assert out.count("all: ") == 3 and "stream: " in out and "0 compilations" in out


# -- a worker


def make_job(number: int, prompt: str = "import os", **more: object) -> str:
    return json.dumps({"id": number, "prompt": prompt, **more}) + "\n"


def test_worker_writes_a_result_for_every_line(served, expected):
    jobs = [make_job(number, prompt, max_tokens=12) for number, prompt in enumerate(["import os", "class"] * 3)]
    bad = ["no job\n", make_job(7, max_tokens=1000), make_job(9, deadline=1e-6)]
    with start("embed_worker.py", served, "--concurrency=3") as process:
        out, err = process.communicate("".join(jobs + bad), timeout=TIMEOUT)
    assert process.returncode == 0, err
    results = [json.loads(line) for line in out.splitlines()]
    by_id = {result["id"]: result for result in results}
    assert len(results) == len(by_id) == 9
    for number, prompt in enumerate(["import os", "class"] * 3):
        assert by_id[number] == {"id": number, "text": expected(prompt, 12), "finish_reason": "length"}
    assert "JSON is malformed" in by_id[None]["error"]
    assert "dflash-precompile" in by_id[7]["error"] and by_id[9]["finish_reason"] == "cancelled"


# -- a service


@pytest.fixture(scope="module")
def service(served: Path) -> Iterator[httpx.Client]:
    """A client of the service, whose queue holds one request. The service gets SIGTERM at the end, and must drain."""
    flags = ("--port=0", "--max_waiting=1")
    with start("embed_fastapi.py", served, *flags, stdout=subprocess.DEVNULL) as process:  # the access log
        assert process.stderr
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r"running on (\S+)", line)))
        with httpx.Client(base_url=url, timeout=TIMEOUT) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=TIMEOUT)
    assert "Application shutdown complete" in rest and "Traceback" not in rest


def test_service_returns_whole_and_streamed_texts(service, expected):
    asked = {"prompt": "import os", "max_tokens": 24}
    whole = service.post("/complete", json=asked)
    assert whole.json() == {"text": expected("import os", 24), "finish_reason": "length"}
    for wrong, status in (({"prompt": ""}, 422), ({"max_tokens": 1000}, 400)):
        assert service.post("/complete", json={**asked, **wrong}).status_code == status
    deltas = [json.loads(line) for line in service.post("/stream", json=asked).iter_lines()]
    assert "".join(one["text"] for one in deltas) == expected("import os", 24)
    assert len(deltas) > 2 and [one["finish_reason"] for one in deltas[-2:]] == [None, "length"]


def test_leader_worker_set_has_what_its_schema_requires_and_one_command_for_all_chips():
    group, service = yaml.safe_load_all((EXAMPLES / "leader_worker_set.yaml").read_text())
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart" and group["metadata"]["name"]
    leader, worker = (template[f"{role}Template"]["spec"] for role in ("leader", "worker"))
    [ours], [theirs] = leader["containers"], worker["containers"]
    assert all(ours[key] == theirs[key] for key in ("name", "image", "command", "env", "resources"))
    assert leader["nodeSelector"] == worker["nodeSelector"]
    sides = leader["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert template["size"] * int(ours["resources"]["limits"]["google.com/tpu"]) == math.prod(map(int, sides))
    assert service["metadata"]["name"] != group["metadata"]["name"], "LeaderWorkerSet makes a service of this name"
    assert service["spec"]["selector"] == template["leaderTemplate"]["metadata"]["labels"]
