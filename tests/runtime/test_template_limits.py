"""Chat templates that never end, or that fill the memory: the limits of a rendering, and what they cost others."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.runtime.text import chat_template
from dflash_aot.runtime.text.chat_template import render_chat
from dflash_aot.runtime.text.template_process import TemplateLimits, TemplateProcess, TemplateRequest

MESSAGES = [{"role": "user", "content": "x" * 1000}]
LIMITS = TemplateLimits(seconds=0.2, memory=1 << 26, characters=10_000)
TIME, MEMORY, OUTPUT = "more than 0.2 s of processor time", "more than 64 MiB of memory", "the limit is 10000"
DOUBLING = "{% for i in range(70) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
TWICE = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
HANG = """
from dflash_aot.runtime.text.template_process import *
process = TemplateProcess()
chat = '{{"messages": [{{"role": "user"}}], "variables": {{}}, "given": []}}'
process.ask(TemplateRequest({directory!r}, "a", chat))
print(process._process.pid, flush=True)
endless = "{{% for a in range(99999) %}}{{% for b in range(99999) %}}{{% endfor %}}{{% endfor %}}"
process.ask(TemplateRequest({directory!r}, endless, chat, TemplateLimits(seconds=0.3)))
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
        ("{% for a in text * 99 %}{% for b in text * 99 %}{% endfor %}{% endfor %}", TIME),
        (TWICE, TIME),
        ("{{ (text | length) ** (10 ** 7) }}", TIME),  # one operation in C: the kernel ends the process
        ("{{ text * 10 ** 9 }}", MEMORY),
        ("{{ '%1000000000d' % (text | length) }}", MEMORY),
        ("{{ '{:1000000000}'.format(text) }}", MEMORY),
        ("{{ text.center(1000000000) }}", MEMORY),
        ("{{ ([text * 100] * 10 ** 5) | join(',') }}", MEMORY),
        ("{% set ns = namespace(x=text) %}" + DOUBLING, MEMORY),
        ("{{ text * 11 }}", OUTPUT),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_endless_template_is_refused_and_others_are_rendered(checkpoint, template, limit):
    path = checkpoint / "chat_template.jinja"
    path.write_text(
        "{% set text = messages[0].content %}{% if text == 'fine' %}fine{% else %}" + template + "{% endif %}"
    )
    with pytest.raises(BadCheckpoint, match=f"the chat template of {path} failed: .*{limit}"):
        render_chat(checkpoint, MESSAGES, limits=LIMITS)
    assert render_chat(checkpoint, [{"role": "user", "content": "fine"}]) == "fine"


def test_interrupted_rendering_keeps_the_process(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ 'a' * times }}")
    assert render_chat(checkpoint, MESSAGES, {"times": 2}) == "aa"
    pid = chat_template._PROCESS._process.pid
    with pytest.raises(BadInput, match=f"failed with times as they were given: .*{MEMORY}"):
        render_chat(checkpoint, MESSAGES, {"times": 10**10}, LIMITS)
    assert render_chat(checkpoint, MESSAGES, {"times": 3}) == "aaa"
    assert chat_template._PROCESS._process.pid == pid


def test_process_that_was_killed_is_started_again(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ times }}")
    assert render_chat(checkpoint, MESSAGES, {"times": 2}) == "2"
    os.kill(chat_template._PROCESS._process.pid, signal.SIGKILL)
    with pytest.raises(BadInput, match="failed with times as they were given: the process was ended by SIGKILL"):
        render_chat(checkpoint, MESSAGES, {"times": 2})
    assert render_chat(checkpoint, MESSAGES, {"times": 2}) == "2"


def test_process_that_does_not_answer_is_ended(checkpoint, monkeypatch):
    process = TemplateProcess()
    request = TemplateRequest(str(checkpoint), "a", '{"messages": [{}], "variables": {}, "given": []}')
    assert process.ask(request).failure is None
    os.kill(process._process.pid, signal.SIGSTOP)
    monkeypatch.setattr("dflash_aot.runtime.text.template_process.ANSWER_SECONDS", 0.2)
    assert process.ask(request).failure == "no answer within 0.2 s"
    assert process._process is None


def test_rendering_leaves_the_gil_to_others(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{% for a in range(99999) %}{{ a }}{% endfor %}")
    thread = threading.Thread(target=render_chat, args=(checkpoint, MESSAGES))
    thread.start()
    switches = 0
    while thread.is_alive():
        switches += 1
        time.sleep(0)
    assert switches > 100


def test_endless_rendering_ends_without_its_parent(checkpoint):
    command = [sys.executable, "-c", HANG.format(directory=str(checkpoint))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.05)
