"""Bounded workers: values, failures and limits of calls, and the end of a process."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_aot.runtime.bounded_worker import BoundedWorker, CallFailed, CallLimits, Leaving

LIMITS = CallLimits(seconds=0.3, memory=1 << 26, reply_characters=1000)
FORKED = CallLimits(seconds=0.3, memory=1 << 28, reply_characters=1000, wall_seconds=3.0, stack=1 << 24)
CHILD = """
import os, signal, time
from dflash_aot.runtime.bounded_worker import serve_functions

def spin():
    while True:
        pass

def fail(text):
    raise ValueError(text)

def end():
    raise SystemExit("the last words")

serve_functions({
    "spin": spin,
    "fail": fail,
    "end": end,
    "echo": lambda **arguments: arguments,
    "power": lambda base: base ** 10**9,
    "repeat": lambda text, times: text * times,
    "sleep": lambda: time.sleep(1000),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
})
"""
PARENT = """
from dflash_aot.runtime.bounded_worker import BoundedWorker, CallLimits
worker = BoundedWorker("child")
worker.call("echo", {}, CallLimits())
print(worker._process.pid, flush=True)
worker.call("spin", {}, CallLimits(seconds=0.5))
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BoundedWorker]:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = BoundedWorker("child")
    yield worker
    worker.close()


def find_pid(worker: BoundedWorker) -> int:
    assert worker._process
    return worker._process.pid


def test_arguments_and_values_pass_unchanged(worker):
    given = {"text": "a\ud83c\n\x00", "number": 2**70, "list": [None, True, 0.5]}
    assert worker.call("echo", given, LIMITS) == given
    assert math.isnan(worker.call("echo", {"x": math.nan}, LIMITS)["x"])


KEEPING = [
    ("fail", {"text": "no \ud83c"}, r"ValueError: no \?$"),
    ("repeat", {"text": "a", "times": 10**9}, "it takes more than 64 MiB of memory"),
    ("repeat", {"text": "a", "times": 1000}, "its result has 1002 characters: the limit is 1000"),
]
ENDING = [
    ("spin", {}, "it takes more than 0.3 s of processor time"),
    ("power", {"base": 10}, "it takes more than 0.3 s of processor time"),  # one operation in C
    ("sleep", {}, "no reply within 3 s"),
    ("end", {}, "the process ended with 1: the last words"),
]


@pytest.mark.parametrize(("function", "arguments", "reason"), KEEPING + ENDING)
def test_failed_call_keeps_or_replaces_the_process(worker, function, arguments, reason):
    worker.call("echo", {}, LIMITS)
    pid, failures = find_pid(worker), worker.failures
    limits = CallLimits(seconds=0.3, wall_seconds=3.0) if function == "sleep" else LIMITS
    with pytest.raises(CallFailed, match=reason):
        worker.call(function, arguments, limits)
    assert worker.call("echo", {"a": 1}, LIMITS) == {"a": 1}
    keeps = (function, arguments, reason) in KEEPING
    assert (find_pid(worker) == pid) == keeps and worker.failures == failures + (not keeps)


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        ("spin", {}, "it takes more than 0.3 s of processor time"),
        ("sleep", {}, "no reply within 3 s"),
        ("end", {}, "its process ended with 1"),
        ("crash", {}, "it takes more than 16 MiB of stack"),
        ("repeat", {"text": "a", "times": 10**9}, "it takes more than 256 MiB of memory"),
    ],
)
def test_call_in_a_fork_keeps_the_process(worker, function, arguments, reason):
    worker.call("echo", {}, LIMITS)
    pid = find_pid(worker)
    with pytest.raises(CallFailed, match=reason):
        worker.call(function, arguments, FORKED)
    assert worker.call("echo", {"a": 1}, FORKED) == {"a": 1} and find_pid(worker) == pid


def test_call_in_a_fork_ends_when_its_caller_leaves(worker):
    worker.call("echo", {}, LIMITS)
    leaving = Leaving()
    threading.Timer(1.0, leaving.leave).start()
    for reason in ("no reply within", "its caller has left"):  # also calls to come
        with pytest.raises(CallFailed, match=reason):
            worker.call("sleep", {}, CallLimits(stack=1 << 24), leaving)
    assert worker.call("echo", {"a": 1}, FORKED) == {"a": 1}


def test_process_that_was_killed_is_started_again(worker):
    worker.call("echo", {}, LIMITS)
    os.kill(find_pid(worker), signal.SIGKILL)
    with pytest.raises(CallFailed, match="the process was ended by SIGKILL"):
        worker.call("echo", {}, LIMITS)
    assert worker.call("echo", {"a": 1}, LIMITS) == {"a": 1}


def test_reply_to_an_interrupted_caller_goes_to_nobody(worker):
    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        worker.call("echo", {}, LIMITS)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            worker.call("sleep", {}, CallLimits(wall_seconds=60.0))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert worker.call("echo", {"of": "another"}, LIMITS) == {"of": "another"}


def test_long_arguments_are_not_sent(worker, monkeypatch):
    monkeypatch.setattr("dflash_aot.runtime.bounded_worker.REQUEST_CHARACTERS", 20)
    with pytest.raises(CallFailed, match="its arguments have 21 characters: the limit is 20"):
        worker.call("echo", {"a": "b" * 12}, LIMITS)
    assert worker.call("echo", {"a": "b" * 11}, LIMITS) == {"a": "b" * 11}


def test_endless_call_ends_without_its_parent(worker):
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        parent.kill()
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.05)
