"""Subprocesses that exchange JSON lines: messages, ends, logs, and the end of the parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from dflash_aot.cache.json_process import JsonProcess, ProcessEnded

CHILD = """
import os, sys
import msgspec
from dflash_aot.cache.json_process import JsonPipe

class Message(msgspec.Struct):
    text: str

pipe = JsonPipe()
if sys.argv[1:] == ["exit"]:
    pipe.exit_with_input(lambda: open(os.environ["MARK"], "w").close())
print("to the log")
while message := pipe.receive(Message):
    if message.text == "end":
        sys.exit("the last words\\n")
    if message.text == "hang":
        pipe.send(Message("hangs"))
        while True:
            pass
    pipe.send(message if message.text != "number" else Message(1))
"""
PARENT = """
import sys
from tests_child import Message
from dflash_aot.cache.json_process import JsonProcess
process = JsonProcess("child", ["exit"])
process.ask(Message("hang"), Message)
print(process.pid, flush=True)
sys.stdin.readline()
"""


class Message(msgspec.Struct):
    text: str


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "tests_child.py").write_text("import msgspec\nclass Message(msgspec.Struct):\n    text: str\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return "child"


def test_messages_are_answered_in_order_and_prints_go_to_the_log(child, tmp_path):
    with JsonProcess(child, log=tmp_path / "log") as process:
        assert [process.ask(Message(text), Message).text for text in ("é\n", "b")] == ["é\n", "b"]
    assert (tmp_path / "log").read_text() == "to the log\n"


def test_ended_process_is_reported_with_code_and_last_lines(child):
    with JsonProcess(child) as process, pytest.raises(ProcessEnded) as ended:
        process.ask(Message("end"), Message)
    assert (ended.value.how, ended.value.was_killed) == ("ended with 1", False)
    assert (ended.value.last_lines(), ended.value.last_lines(9)) == (
        ["the last words"],
        ["to the log", "the last words"],
    )


def test_signal_is_named_and_skipped_log_is_left_out(child):
    with JsonProcess(child) as process:
        process.ask(Message("a"), Message)
        process.skip_log()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ProcessEnded) as ended:
            process.ask(Message("b"), Message)
    assert (ended.value.how, ended.value.was_killed, ended.value.log) == ("was ended by SIGKILL", True, "")


def test_invalid_message_raises_and_too_long_a_message_kills_the_process(child):
    with JsonProcess(child) as process:
        with pytest.raises(msgspec.DecodeError):
            process.ask(Message("number"), Message)
        assert process.ask(Message("a" * 80), Message, 100).text == "a" * 80
        with pytest.raises(ProcessEnded) as ended:
            process.ask(Message("a" * 100), Message, 100)
    assert ended.value.was_killed


@pytest.mark.parametrize("kill", [False, True])
def test_close_ends_a_busy_process(child, tmp_path, kill):
    process = JsonProcess(child, ["exit"])
    process.ask(Message("hang"), Message)
    process.close(kill)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert (tmp_path / "mark").exists() != kill


def test_process_ends_with_its_parent(child, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        time.sleep(0.01)
    assert (tmp_path / "mark").exists()
