"""Tool calls: the parser of an answer's text, and the grammar of calls that must come."""

import json
import re
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from dflash_aot.server.tool_calls import (
    HERMES,
    LLAMA,
    ToolCallParser,
    find_family,
    format_parts,
    gather_parts,
    write_call_grammar,
)

PARIS = {"city": "Paris", "note": 'a "quoted" } brace and \\\\'}


def write_hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def write_llama(name, arguments):
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


def parse(family, *texts):
    """(text, [(name, arguments)]) of an answer that comes in pieces."""
    parser = ToolCallParser(family)
    parts = [part for text in texts for part in parser.push(text)] + parser.flush()
    message = gather_parts(parts)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"] or "", calls


ANSWERS = {
    "plain": (HERMES, "no calls here", ("no calls here", [])),
    "one": (HERMES, write_hermes("f", PARIS), ("", [("f", json.dumps(PARIS))])),
    "text before": (HERMES, f"Let me see.\n{write_hermes('f', {})}", ("Let me see.", [("f", "{}")])),
    "two": (
        HERMES,
        f"{write_hermes('f', {'a': [1, {}]})}\n{write_hermes('g', {})}",
        ("", [("f", '{"a": [1, {}]}'), ("g", "{}")]),
    ),
    "one of two": (
        replace(HERMES, parallel=False),
        f"Now.\n{write_hermes('f', PARIS)}\n{write_hermes('g', {})} and more",
        ("Now.", [("f", json.dumps(PARIS))]),
    ),
    "marker alone": (HERMES, "<tool_call>\nnothing", ("<tool_call>\nnothing", [])),
    "no object": (
        HERMES,
        '<tool_call>{"name": "f"}</tool_call> then',
        ('<tool_call>{"name": "f"}</tool_call> then', []),
    ),
    "begins like a marker": (HERMES, "a <tool b < c", ("a <tool b < c", [])),
    "cut": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b', ("", [("f", '{"a": "b')])),
    "llama": (LLAMA, write_llama("f", PARIS), ("", [("f", json.dumps(PARIS))])),
    "llama text": (LLAMA, "I think {so}", ("I think {so}", [])),
    "llama object": (LLAMA, '{"answer": 5}', ('{"answer": 5}', [])),
}


def test_calls_are_split_from_the_text():
    for name in ANSWERS:
        family, text, expected = ANSWERS[name]
        assert parse(family, text) == expected


@example(name="llama text", cuts=[1])
@given(name=st.sampled_from(sorted(ANSWERS)), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_pieces_of_an_answer_change_nothing(name, cuts):
    family, text, expected = ANSWERS[name]
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse(family, *(text[begin:end] for begin, end in zip(ends, ends[1:], strict=False))) == expected


@given(st.text(alphabet='<tool_call>{}"\\ \n/nameargs:,', max_size=80))
def test_nothing_of_a_text_without_calls_is_lost(text):
    found, calls = parse(HERMES, text)
    if not calls:
        assert found == text


def test_chunks_add_up_to_the_message():
    parser = ToolCallParser(HERMES)
    parts = [part for letter in f"Yes.\n{write_hermes('f', PARIS)}" for part in parser.push(letter)] + parser.flush()
    deltas = [format_parts([part]) for part in parts]
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"]["name"] == "f" and calls[0]["id"].startswith("call_") and "id" not in calls[1]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == PARIS
    assert {call["index"] for call in calls} == {0}


FAMILIES = [
    ("{% if tools %}<tool_call>{% endif %}", HERMES),
    ('{% if tools is not none %}{"name": f, "parameters": d}{% endif %}', LLAMA),
    ("{{ messages[0].content }} <tool_call>", None),
    ("{% if tools %}[TOOL_CALLS]{% endif %}", None),
]


def test_family_is_that_of_the_chat_template():
    for template, family in FAMILIES:
        assert find_family(template) is family


SCHEMAS = [
    ({"properties": {"city": {"type": "string"}}}, True),
    ({"type": "object"}, False),
    ({"properties": {"a": {}}, "required": ["a", "b"]}, False),
    *(({"properties": {"a": {}}, "required": required}, False) for required in (5, None, [["a"]], [{}])),
    ({"properties": ["a"]}, False),
    ({"properties": {}, "additionalProperties": {"type": "string"}}, False),
    ({"properties": {}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, False),
]


def test_forced_call_has_only_arguments_of_its_schema():
    for schema, closed in SCHEMAS:
        (arguments,) = re.findall(r"^arguments_0: %json (.*)$", write_call_grammar(HERMES, {"f": schema}, False), re.M)
        assert (json.loads(arguments).get("additionalProperties") is False) is closed
