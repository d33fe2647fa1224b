"""Chat template: the look-up, rendered conversations, and templates that never end."""

import json
import os
import shutil
import subprocess
import sys
from weakref import WeakSet

import pytest
import tokenizers
from tokenizers import models

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.runtime import Engine
from dflash_aot.runtime.bounded_worker import CHAT_GUARD, CallLimits
from dflash_aot.runtime.text.chat_template import read_chat_template, render_chat

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 < 5?"}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking is false %}<think></think>{% endif %}"
)
RENDERED = "<s><system>Be brief.\n<user>2 + 2 < 5?\n<assistant><think></think>"


@pytest.fixture
def checkpoint(tmp_path):
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(checkpoint, **facts):
    facts = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": "<s>", **facts}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for message in messages %}", "Unexpected end of template|unexpected 'end of template'"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_failing_template_is_named_with_its_error(checkpoint, template, words):
    (checkpoint / "chat_template.jinja").write_text(template)
    with pytest.raises(BadCheckpoint, match=rf"chat_template\.jinja failed: .*({words})"):
        render_chat(checkpoint, MESSAGES)


def test_messages_that_the_template_refuses_raise_bad_input(checkpoint):
    with pytest.raises(BadInput, match="at least one message"):
        render_chat(checkpoint, [])
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadInput, match="the chat template refuses these messages: roles must alternate") as caught:
        render_chat(checkpoint, MESSAGES)
    assert type(caught.value) is BadInput


def test_variables_of_the_template_can_be_set(checkpoint):
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE + "{{ style }}")
    assert render_chat(checkpoint, MESSAGES, {"style": "!"}).endswith("<assistant><think></think>!")
    assert render_chat(checkpoint, MESSAGES, {"enable_thinking": True}).endswith("<assistant>")
    assert render_chat(checkpoint, MESSAGES, {"enable_thinking": False}).endswith("<assistant><think></think>")


def test_words_that_are_no_variables_for_the_caller_raise(checkpoint):
    (checkpoint / "chat_template.jinja").write_text(
        "{# style chat_template tokenize tools #}style{{ messages.style }}"
        "{{ 'style' }}{% set own = 1 %}{{ own }}{{ strftime_now('%Y') }}"
        "{% for each in messages %}{{ each }}{% break %}{% endfor %}{% generation %}{{ range(3) }}{% endgeneration %}"
    )
    render_chat(checkpoint, MESSAGES)
    reserved = ("messages", "chat_template", "add_generation_prompt", "tokenize", "tools")
    for name in ("style", "own", "each", "range", "strftime_now", *reserved):
        with pytest.raises(BadInput, match=f"reads no variable '{name}'"):
            render_chat(checkpoint, MESSAGES, {name: "x"})


def test_thinking_can_be_off_without_a_variable_in_the_template(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("hi")
    assert render_chat(checkpoint, MESSAGES, {"enable_thinking": False}) == "hi"
    with pytest.raises(BadInput, match="reads no variable 'enable_thinking'"):
        render_chat(checkpoint, MESSAGES, {"enable_thinking": True})


def test_template_that_fails_on_a_given_variable_raises_bad_input(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ 'a' * times }}")
    assert render_chat(checkpoint, MESSAGES, {"times": 2}) == "aa"
    with pytest.raises(BadInput, match="failed with times as they were given") as caught:
        render_chat(checkpoint, MESSAGES, {"times": "2"})
    assert type(caught.value) is BadInput


def test_template_is_found_in_either_file(checkpoint):
    assert read_chat_template(checkpoint) is None
    configure(checkpoint)
    assert read_chat_template(checkpoint) is None
    configure(checkpoint, chat_template=TEMPLATE)
    assert read_chat_template(checkpoint) == TEMPLATE
    (checkpoint / "tokenizer_config.json").write_text("{")
    assert read_chat_template(checkpoint) is None
    (checkpoint / "chat_template.jinja").write_text("its own file")
    assert read_chat_template(checkpoint) == "its own file"


def test_default_template_of_several_is_used(checkpoint):
    listed = [{"name": "tools", "template": "not this one"}, {"name": "default", "template": TEMPLATE}]
    for named in (listed, {"tools": "not this one", "default": TEMPLATE}):
        configure(checkpoint, chat_template=named)
        assert read_chat_template(checkpoint) == TEMPLATE
    assert render_chat(checkpoint, MESSAGES) == RENDERED


def test_template_for_tools_is_taken_where_there_are_tools(checkpoint):
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    configure(checkpoint, chat_template=named)
    assert (render_chat(checkpoint, MESSAGES), render_chat(checkpoint, MESSAGES, tools=tools)) == ("plain", "f")
    file = checkpoint / "additional_chat_templates" / "tool_use.jinja"
    file.parent.mkdir()
    file.write_text("from a file")
    assert read_chat_template(checkpoint, tools=True) == "from a file" and read_chat_template(checkpoint) == "plain"


@pytest.mark.parametrize("template", [5, ["a"], [{"name": "tools", "template": "a"}], {"default": 5}])
def test_template_of_another_form_raises(checkpoint, template):
    configure(checkpoint, chat_template=template)
    with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json: chat_template is neither a text nor a list"):
        read_chat_template(checkpoint)


def test_missing_or_broken_files_raise(tmp_path):
    def refuse(words: str) -> None:
        with pytest.raises(BadCheckpoint, match=words):
            render_chat(tmp_path, MESSAGES)

    configure(tmp_path, chat_template=TEMPLATE)
    refuse(r"there is no .*tokenizer\.json")
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path)
    refuse(r"tokenizer_config\.json has no chat template")
    (tmp_path / "tokenizer_config.json").write_text("{")
    refuse(r"tokenizer_config\.json is not JSON")
    configure(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    refuse(r"chat_template\.jinja cannot be read as a chat template")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer.json").write_text("{}")
    refuse(f"the tokenizer in {tmp_path} cannot be read: ")


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        (
            "{% for a in text * 99 %}{% for b in text * 99 %}{% endfor %}{% endfor %}",
            "more than 0.5 s of processor time",
        ),
        ("{% set ns = namespace(x=text) %}{% for i in range(70) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "64 MiB"),
        ("{{ '%1000000000d' % (text | length) }}", "more than 64 MiB of memory"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_endless_template_is_refused_and_others_are_rendered(checkpoint, template, limit):
    path = checkpoint / "chat_template.jinja"
    path.write_text(
        "{% set text = messages[0].content %}{% if text == 'fine' %}fine{% else %}" + template + "{% endif %}"
    )
    messages = [{"role": "user", "content": "x" * 1000}]
    with pytest.raises(BadCheckpoint, match=f"the chat template of {path} failed: .*{limit}"):
        render_chat(checkpoint, messages, limits=CallLimits(seconds=0.5, memory=1 << 26))
    assert render_chat(checkpoint, [{"role": "user", "content": "fine"}]) == "fine"


def test_last_engine_to_close_leaves_no_subprocess(checkpoint, bundle, monkeypatch):
    monkeypatch.setattr("dflash_aot.runtime.engine.OPEN_ENGINES", WeakSet())  # other tests' engines share the process
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    with Engine.open(bundle("tiny"), k=0):
        render_chat(checkpoint, MESSAGES)
        pid = CHAT_GUARD._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_files_may_disappear_once_they_were_read(checkpoint):
    configure(checkpoint, chat_template=TEMPLATE)
    assert render_chat(checkpoint, MESSAGES) == RENDERED
    shutil.rmtree(checkpoint)
    CHAT_GUARD.close()
    assert render_chat(checkpoint, MESSAGES) == RENDERED


def test_code_in_the_checkpoint_is_not_run(checkpoint):
    configure(checkpoint, chat_template=TEMPLATE, auto_map={"AutoTokenizer": [None, "evil.Evil"]})
    (checkpoint / "evil.py").write_text("raise SystemExit('this ran')")
    assert render_chat(checkpoint, MESSAGES) == RENDERED


def list_imports(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())


def test_transformers_is_imported_by_the_subprocess_only(checkpoint):
    configure(checkpoint, chat_template=TEMPLATE)
    here = "from pathlib import Path; from dflash_aot.runtime.text.chat_template import render_chat"
    render = f"{here}\nrender_chat(Path({str(checkpoint)!r}), {MESSAGES!r})"
    assert not list_imports(render) & {"transformers", "jinja2"}
    tokenizer = (checkpoint / "tokenizer.json").read_text()
    load = "import dflash_aot.runtime.guard as it; it.read_tokenizer('a', {'tokenizer.json': " + repr(tokenizer) + "})"
    modules = list_imports(load)
    assert "transformers" in modules and not modules & {"torch", "flax", "tensorflow", "jax"}
    assert not [name for name in modules if ".modeling_" in name]
