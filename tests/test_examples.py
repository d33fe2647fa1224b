"""The examples of embedding, run as a user runs them: each in a process of its own, on the embedded pair."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dflash_aot.runtime import Engine, SamplingParams

EXAMPLES = Path(__file__).parents[1] / "examples"
PATIENCE = 120  # seconds, of a machine with much else to do
LONG = 200  # tokens: still under way when somebody leaves


@pytest.fixture(scope="module")
def served(bundle: Callable[[str], Path]) -> Path:
    return bundle("served")


@pytest.fixture(scope="module")
def expected(served: Path) -> Callable[[str, int], str]:
    """A prompt and how many tokens → the engine's own text."""
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


def test_a_script_generates_in_every_way(served, expected):
    with start("embed_script.py", served) as process:
        said, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, complaints
    assert f"one: {expected('import os', 24)!r}, length" in said
    assert f"all: 'import os' → {expected('import os', 12)!r}" in said
    assert said.count("all: ") == 3 and "stream: " in said and "0 compilations" in said


# -- a worker


def spell(number: int, prompt: str = "import os", **more: object) -> str:
    return json.dumps({"id": number, "prompt": prompt, **more}) + "\n"


def test_a_worker_answers_every_line(served, expected):
    jobs = [spell(number, prompt, max_tokens=12) for number, prompt in enumerate(["import os", "class"] * 3)]
    bad = ["no job\n", spell(7, max_tokens=1000), spell(9, deadline=1e-6)]
    with start("embed_worker.py", served, "--concurrency=3") as process:
        said, complaints = process.communicate("".join(jobs + bad), timeout=PATIENCE)
    assert process.returncode == 0, complaints
    told = [json.loads(line) for line in said.splitlines()]
    answers = {one["id"]: one for one in told}
    assert len(told) == len(answers) == 9
    for number, prompt in enumerate(["import os", "class"] * 3):
        assert answers[number] == {"id": number, "text": expected(prompt, 12), "finish_reason": "length"}
    assert "JSON is malformed" in answers[None]["error"]
    assert "dflash-precompile" in answers[7]["error"] and answers[9]["finish_reason"] == "cancelled"


@pytest.mark.parametrize("drain_seconds", [PATIENCE, 0])
def test_a_worker_that_is_told_to_end_answers_what_it_has_begun(served, expected, drain_seconds):
    with start("embed_worker.py", served, f"--drain_seconds={drain_seconds}") as process:
        assert process.stdin and process.stdout
        process.stdin.write(spell(1, max_tokens=LONG) + spell(2, "class", max_tokens=1))
        process.stdin.flush()
        first = json.loads(process.stdout.readline())  # both were begun: lines are taken in their order
        process.send_signal(signal.SIGTERM)
        second = json.loads(process.stdout.readline())
        assert process.wait(PATIENCE) == 0  # though its input is open
    assert first == {"id": 2, "text": expected("class", 1), "finish_reason": "length"}
    whole = {"id": 1, "text": expected("import os", LONG), "finish_reason": "length"}
    assert second == (whole if drain_seconds else {"id": 1, "finish_reason": "cancelled"})


# -- a service


@pytest.fixture(scope="module")
def service(served: Path) -> Iterator[httpx.Client]:
    """Where one may wait. At its end it is told to end, which it does when all is answered."""
    flags = ("--port=0", "--max_waiting=1")
    with start("embed_fastapi.py", served, *flags, stdout=subprocess.DEVNULL) as process:  # a line for each request
        assert process.stderr
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r"running on (\S+)", line)))
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=PATIENCE)
    assert "Application shutdown complete" in rest and "Traceback" not in rest


def test_a_service_answers_whole_and_in_lines(service, expected):
    asked = {"prompt": "import os", "max_tokens": 24}
    whole = service.post("/complete", json=asked)
    assert whole.json() == {"text": expected("import os", 24), "finish_reason": "length"}
    deltas = [json.loads(line) for line in service.post("/stream", json=asked).iter_lines()]
    assert "".join(one["text"] for one in deltas) == expected("import os", 24)
    assert len(deltas) > 2 and [one["finish_reason"] for one in deltas[-2:]] == [None, "length"]


@pytest.mark.parametrize(("wrong", "status"), [({"prompt": ""}, 422), ({"max_tokens": 1000}, 400)])
def test_a_service_says_what_it_does_not_take(service, wrong, status):
    assert service.post("/complete", json={"prompt": "import os", **wrong}).status_code == status


@pytest.mark.parametrize("path", ["/complete", "/stream"])
def test_who_leaves_a_service_frees_the_slot(service, path):
    def health() -> dict:
        return service.get("/health").json()

    before = health()["finished"].get("cancelled", 0)
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
    body = json.dumps({"prompt": "import os", "max_tokens": LONG})
    with socket.create_connection((service.base_url.host, service.base_url.port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        while not health()["running"]:
            pass
    while health()["running"]:
        pass
    assert health()["finished"]["cancelled"] == before + 1


def test_a_service_refuses_more_than_may_wait(service, expected):
    asked = {"prompt": "class", "max_tokens": 100}
    with ThreadPoolExecutor(16) as callers:
        answers = list(callers.map(lambda _: service.post("/complete", json=asked), range(16)))
    assert {one.status_code for one in answers} == {200, 503}
    assert {one.json()["text"] for one in answers if one.status_code == 200} == {expected("class", 100)}
    assert all(one.headers["retry-after"] == "1" for one in answers if one.status_code == 503)
