"""Tool calls: the parser of an answer's text, and the grammar of calls that must come."""

import contextlib
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.runtime.requests.request import Delta
from dflash_aot.runtime.structured_output.grammar import GrammarCompiler
from dflash_aot.runtime.text.tokenizer import Tokenizer
from dflash_aot.server.chat_families import (
    GEMMA,
    HARMONY,
    HERMES,
    IN_CHANNELS,
    LLAMA,
    QWEN,
    QWEN_XML,
    SURROGATE,
    Channels,
    OfferedTools,
    find_channels,
    find_tool_family,
)
from dflash_aot.server.response_formats import ChatFormat
from dflash_aot.server.token_formatting import TokenFormatter
from dflash_aot.server.tool_grammars import find_types, write_call_grammar, write_channel_grammar
from dflash_aot.server.tool_parsers import Thinking, ToolCallParser, format_parts, gather_parts, make_parser
from tests.runtime.tokenizer_kinds import byte_level

PARIS = {"city": "Paris", "note": 'a "quoted" } brace and \\\\'}
PARIS_TEXT = json.dumps(PARIS)
TYPED = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"]},
        "tags": {"$ref": "#/$defs/tags"},
        "size": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "wet": {"type": "boolean"},
        "unit": {"enum": ["C", 5]},
    },
    "$defs": {"tags": {"type": "array", "items": {}}},
}
FUNCTIONS = {"f": TYPED, "g": {}}


def write_hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def write_llama(name, arguments):
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


def write_xml(name, **arguments):
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def read_all(parser, pieces):
    """(thinking, text, [(name, arguments)]) of an answer that comes in pieces."""
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    message = gather_parts(parts)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message.get("reasoning_content", ""), message["content"] or "", calls


def parse(family, *texts, parallel=True):
    return read_all(ToolCallParser(OfferedTools(family, FUNCTIONS, parallel)), texts)[1:]


TWO = f"{write_hermes('f', {'a': [1, {}]})}\n{write_hermes('g', {})}"
ONE_F, ONE_G = ("f", '{"a": 1}'), ("g", "{}")
F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
UNKNOWN = '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>'
NAME_ALONE = '<tool_call>{"name": "f"}</tool_call> then'
AB, XML_G = [("g", '{"a": "b"}')], "<function=g>\n</function>\n"
UNKNOWN_XML = write_xml("h", a=1)
XML = {"city": 'a "b"\n<c> d', "days": 3, "tags": "[1, {}]", "size": "5.0", "wet": "True", "unit": "C", "x": "7"}
XML_ARGUMENTS = (
    r"""{"city": "a \"b\"\n<c> d", "days": 3, "tags": [1, {}], "size": 5.0, "wet": true, "unit": "C", "x": "7"}"""
)
OTHER_XML = {"city": "null", "days": "None", "size": "big", "tags": "none", "unit": "5", "wet": "NaN"}
OTHER_ARGUMENTS = '{"city": "null", "days": null, "size": "big", "tags": "none", "unit": 5, "wet": "NaN"}'
ANSWERS = {
    "plain": (HERMES, "no calls here", ("no calls here", [])),
    "one": (HERMES, write_hermes("f", PARIS), ("", [("f", PARIS_TEXT)])),
    "text before": (HERMES, f"Let me see.\n{write_hermes('f', {})}", ("Let me see.", [("f", "{}")])),
    "two": (HERMES, TWO, ("", [("f", '{"a": [1, {}]}'), ONE_G])),
    "two in a marker": (HERMES, f"<tool_call>\n{F}\n{G}\n</tool_call> end", (" end", [ONE_F, ONE_G])),
    "list in a marker": (HERMES, f"<tool_call>[{F}, {G}]</tool_call>\n", ("", [ONE_F, ONE_G])),
    "marker without end": (HERMES, f"<tool_call>\n{F}\n<tool_call>\n{G}", ("", [ONE_F, ONE_G])),
    "object without end": (HERMES, f"<tool_call>\n{F[:-1]}\n</tool_call>\n<tool_call>{G}", ("", [ONE_F, ONE_G])),
    "words after a call": (HERMES, f"<tool_call>{F} words</tool_call> end", (" words end", [ONE_F])),
    "arguments first": (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [ONE_F])),
    "arguments as text": (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", [ONE_F])),
    "nested": (HERMES, f'<tool_call>{{"type": "function", "function": {F}}}</tool_call>', ("", [ONE_F])),
    "more keys": (HERMES, f'<tool_call>{F[:-1]}, "id": "x}}"}}</tool_call> end', (" end", [ONE_F])),
    "another name": (HERMES, f"{UNKNOWN} then {write_hermes('g', {})}", (f"{UNKNOWN} then", [ONE_G])),
    "marker alone": (HERMES, "<tool_call>\nnothing", ("<tool_call>\nnothing", [])),
    "no arguments": (HERMES, NAME_ALONE, (NAME_ALONE, [])),
    "begins like a marker": (HERMES, "a <tool b < c", ("a <tool b < c", [])),
    "cut": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b', ("", [("f", '{"a": "b')])),
    "cut before the name": (HERMES, '<tool_call>{"arguments": {"a"', ('<tool_call>{"arguments": {"a"', [])),
    "llama": (LLAMA, write_llama("f", PARIS), ("", [("f", PARIS_TEXT)])),
    "llama text": (LLAMA, "I think {so}", ("I think {so}", [])),
    "llama object": (LLAMA, '{"answer": 5}', ('{"answer": 5}', [])),
    "llama another name": (LLAMA, write_llama("h", {}), (write_llama("h", {}), [])),
    "llama type first": (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', ("", [ONE_F])),
    "llama arguments": (LLAMA, F, ("", [ONE_F])),
    "llama name last": (LLAMA, '{"parameters": {"a": 1}, "type": "function", "name": "f"}', ("", [ONE_F])),
    "llama several": (LLAMA, f"{F}; {write_llama('g', {})}\n{G};", ("", [ONE_F, ONE_G, ONE_G])),
    "llama then no call": (LLAMA, f'{F}; {{"a": 1}}', ('; {"a": 1}', [ONE_F])),
    "xml": (QWEN_XML, f"So:\n\n{write_xml('f', **XML)}", ("So:", [("f", XML_ARGUMENTS)])),
    "xml other types": (QWEN_XML, write_xml("f", **OTHER_XML), ("", [("f", OTHER_ARGUMENTS)])),
    "xml none": (QWEN_XML, write_xml("g"), ("", [ONE_G])),
    "xml two": (QWEN_XML, f"{write_xml('g')}\n{write_xml('f', city='P')}", ("", [ONE_G, ("f", '{"city": "P"}')])),
    "xml without marker": (QWEN_XML, write_xml("g", a="b")[12:], ("", AB)),
    "xml without its end": (QWEN_XML, "<function=g>\n<parameter=a>b</parameter>\n</tool_call> end", (" end", AB)),
    "xml two in a marker": (QWEN_XML, f"<tool_call>{XML_G}{XML_G}</tool_call>", ("", [ONE_G, ONE_G])),
    "xml another name": (QWEN_XML, UNKNOWN_XML, (UNKNOWN_XML, [])),
    "xml words between": (QWEN_XML, "<function=g>so I <parameter=a>b</parameter></function>", ("so I", AB)),
    "xml marker alone": (QWEN_XML, "<tool_call>\n<function=", ("<tool_call>\n<function=", [])),
    "xml cut": (QWEN_XML, write_xml("f", city="Pa")[:54], ("", [("f", '{"city": "Pa')])),
    "json from xml models": (QWEN_XML, write_hermes("g", {}), ("", [ONE_G])),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_split_from_the_text(name):
    family, text, expected = ANSWERS[name]
    assert parse(family, text) == expected


@example(name="llama text", cuts=[1])
@given(name=st.sampled_from(sorted(ANSWERS)), cuts=st.lists(st.integers(0, 200), max_size=12) | st.just([*range(300)]))
def test_pieces_of_an_answer_change_nothing(name, cuts):
    family, text, expected = ANSWERS[name]
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse(family, *(text[begin:end] for begin, end in zip(ends, ends[1:], strict=False))) == expected


# -- answers whose parts are marked by tokens: the text, and thinking, text and calls that come of it

ANALYSIS, FINAL = HARMONY.begin, HARMONY.final
NEXT = HARMONY.end
CALL_F = " to=functions.f<|channel|>commentary json<|message|>"
HEAD_G = "<|channel|>commentary to=functions.g <|constrain|>json<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
SPELLED = "<|end|><|channel|>final<|message|><channel|><|tool_call></think>"
GEMMA_ARGUMENTS = """\
city:<|"|>a "b", {c}:1<|"|>,<|"|>a key<|"|>:[1.5,true,<|"|><|"|>,{x:{}},nil], day:Mon 9:30 ,n:None,e:}"""
GEMMA_JSON = """\
{"city": "a \\"b\\", {c}:1", "a key": [1.5, true, "", {"x": {}}, "nil"], "day": "Mon 9:30", "n": null, "e": ""}"""
GEMMA_CALLS = f"<|tool_call>call:f{{{GEMMA_ARGUMENTS}<tool_call|><|tool_call>call:g{{}}<tool_call|>"
MARKED_ANSWERS = {
    "harmony": (HARMONY, f"{ANALYSIS}Let me see.{NEXT}{FINAL}Yes!<|return|>", ("Let me see.", "Yes!", [])),
    "harmony call": (HARMONY, f'{ANALYSIS}hm{NEXT}{CALL_F}{{"a": 1}}<|call|>', ("hm", "", [ONE_F])),
    "harmony words before a call": (HARMONY, f"{PREAMBLE}I look.{NEXT}{HEAD_G}<|call|>", ("", "I look.", [ONE_G])),
    "harmony several": (HARMONY, f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c{NEXT}{FINAL}d", ("a\nb", "c\nd", [])),
    "harmony tool": (HARMONY, f"{ANALYSIS.replace('<|m', ' to=python code<|m')}1+1<|call|>", ("1+1", "", [])),
    "harmony without end": (HARMONY, f"{ANALYSIS}a{FINAL}b", ("a", "b", [])),
    "harmony without markers": (HARMONY, "so", ("", "so", [])),
    "harmony without channel": (HARMONY, f"Hi{NEXT}{FINAL}a<|constrain|>b", ("", "Hi\nab", [])),
    "gemma": (GEMMA, "<|channel>thought\nhm<channel|>Yes!", ("hm", "Yes!", [])),
    "gemma calls": (GEMMA, f"I look.{GEMMA_CALLS}", ("", "I look.", [("f", GEMMA_JSON), ONE_G])),
    "gemma call ends thinking": (GEMMA, "<|channel>a<|tool_call>call:g{}<tool_call|>", ("a", "", [ONE_G])),
    "gemma without braces": (GEMMA, '<|tool_call>call:f{a:[<|"|>b<tool_call|>c', ("", "c", [("f", '{"a": ["b"]}')])),
    "gemma other function": (GEMMA, '<|tool_call>call:h{a:<|"|>b<|"|>}<tool_call|>', ("", "call:h{a:b}", [])),
    "gemma text after a call": (GEMMA, "<|tool_call>call:g{} so", ("", " so", [ONE_G])),
    "gemma cut": (GEMMA, '<|tool_call>call:f{a:1,b:<|"|>c', ("", "", [("f", '{"a": 1, "b": "c')])),
    "qwen": (QWEN, f"<think>\nhm</think>\n\n{write_hermes('g', {})}", ("\nhm", "", [ONE_G])),
    "qwen markers in text": (QWEN, "<think><think></think>a <think></think>", ("<think>", "a <think></think>", [])),
    "qwen call ends thinking": (QWEN, f"<think>hm{write_hermes('g', {})}", ("hm", "", [ONE_G])),
}


def parse_marked(family, *pieces):
    return read_all(make_parser(family, OfferedTools(HERMES if family is QWEN else IN_CHANNELS, FUNCTIONS)), pieces)


@pytest.mark.parametrize("name", MARKED_ANSWERS)
def test_marked_parts_are_told_apart_at_every_cut(name):
    """Also letter by letter; the letters of markers are text wherever they stand."""
    family, spelled, expected = MARKED_ANSWERS[name]
    text = family.to_surrogates(spelled)
    assert parse_marked(family, text) == parse_marked(family, *text) == expected
    for cut in range(len(text)):
        assert parse_marked(family, text[:cut], text[cut:]) == expected
    final = family.to_surrogates(family.final)
    assert parse_marked(family, *final, *SPELLED) == ("", SPELLED, [])


@given(
    st.sampled_from([HARMONY, GEMMA, QWEN]), st.lists(st.sampled_from('0123456 {}[]:,"\nfcal') | st.text(max_size=3))
)
def test_no_marker_is_shown_and_pieces_change_nothing(family, pieces):
    marks = {str(at): family.to_surrogates(marker) for at, marker in enumerate(family.markers)}
    text = "".join(marks.get(piece, piece) for piece in pieces)
    whole = parse_marked(family, text)
    assert whole == parse_marked(family, *text)
    assert not any(SURROGATE.search(part) for part in (*whole[:2], *(arguments for _, arguments in whole[2])))


OPENINGS = [(QWEN, "<think>\n", "\n</think>\n\n"), (GEMMA, "<|channel>thought\n", "<channel|>")]
OPENINGS += [(HARMONY, NEXT + ANALYSIS, NEXT + FINAL), (HARMONY, NEXT + FINAL, "")]


def test_what_the_prompt_has_begun_is_read_and_closed():
    for family, prompt, closing in OPENINGS:
        added, opening = family.leave_out_thinking(prompt, begins_text=True)
        assert (added, make_parser(family, None, opening).push("a")) == (closing, ["a"])
        assert make_parser(family, None, family.find_opening(prompt)).push("a") == [Thinking("a") if closing else "a"]


DAY = {"properties": {"day": {"enum": ["Mon", 1]}, "At": {"type": "integer"}, "in": {"type": ["string", "null"]}}}
FORCED = {
    HARMONY: f'{ANALYSIS}hm{NEXT}{HEAD_G}{{"day": "Mon"}}',
    GEMMA: '<|tool_call>call:g{day:<|"|>Mon<|"|>,in:null}<tool_call|><|tool_call>call:g{At:2,day:1}<tool_call|>',
}


def test_each_call_of_a_harmony_message_is_followed_by_its_result():
    calls = [{"id": one, "function": {"name": f"f{one}"}} for one in "abc"]
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls}
    results = [{"role": "tool", "content": one, "tool_call_id": one} for one in ("c", "a", "?")]
    last = {"role": "user", "content": "so?"}
    begins, *fitted, end = HARMONY.fit_history([said, *results, last])
    assert begins == {"role": "assistant", "content": "", "thinking": "hm\nI look.", "tool_calls": calls[:1]}
    assert [one.get("tool_calls", [{"id": one["content"]}])[0]["id"] for one in fitted] == ["a", "b", "?", "c", "c"]
    assert fitted[1] == {"role": "assistant", "content": "", "tool_calls": calls[1:2]} and end == last


@pytest.mark.parametrize("family", FORCED, ids=["harmony", "gemma"])
def test_forced_call_is_in_the_form_of_its_family(family):
    backend = byte_level()
    backend.add_special_tokens(["<end>", *family.markers])
    tokenizer = Tokenizer(backend)
    channels = find_channels(family.begin, tokenizer.added_tokens)
    grammar = write_channel_grammar(channels, {"g": {"type": "object", "required": ["day"], **DAY}}, True, thinks=True)
    compiler = GrammarCompiler(tokenizer, backend.get_vocab_size(), [backend.token_to_id("<end>")])
    for day, follows in (("Mon", True), ("Tue", False)):
        matcher = compiler.compile({"grammar": grammar})
        tokens = tokenizer.encode(FORCED[family].replace("Mon", day), add_special_tokens=False)
        with contextlib.nullcontext() if follows else pytest.raises(EngineFailed):
            for token in tokens:
                matcher.accept(token)


@pytest.mark.parametrize("family", [HERMES, QWEN_XML, LLAMA])
@given(text=st.text(alphabet='<tool_call>{}"\\ \n/nameargs:,=fuctipr', max_size=80))
@example(text="<tool_call>\n<function=<function=f<function=g")
def test_nothing_of_a_text_without_calls_is_lost(family, text):
    found, calls = parse(family, text)
    if not calls:
        assert found == text


@pytest.mark.parametrize("parallel", [False, True])
def test_one_call_is_given_where_one_is_asked_for(parallel, caplog):
    expected = [("f", '{"a": [1, {}]}'), ONE_G]
    assert parse(HERMES, f"Now.\n{TWO} and more", parallel=parallel) == ("Now. and more", expected[: 1 + parallel])
    assert ("a call of an answer was left out" in caplog.text) is not parallel


@pytest.mark.parametrize(("family", "call"), [(HERMES, write_hermes("f", PARIS)), (QWEN_XML, write_xml("f", **PARIS))])
def test_chunks_add_up_to_the_message(family, call):
    """The arguments are streamed."""
    parser = ToolCallParser(OfferedTools(family, FUNCTIONS))
    parts = [part for letter in f"Yes.\n{call}" for part in parser.push(letter)] + parser.flush()
    deltas = [format_parts([part]) for part in parts]
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"]["name"] == "f" and calls[0]["id"].startswith("call_") and "id" not in calls[1]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == PARIS
    assert {call["index"] for call in calls} == {0} and len(calls) > 20


QWEN_TEMPLATE = (
    r"""{%- if tools %} <tool_call></tool_call> tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": """
    r"""<args-json-object>}\n</tool_call>{%- endif %}{{- '\n<tool_call>\n{"name": "' }}{{ x }}</tool_call>"""
)
GLM = "{% if tools %}<tool_call>{name}\n<arg_key>{key}</arg_key><arg_value>{{ v | tojson }}</arg_value></tool_call>"
FAMILIES = [
    ("{% if tools %}<tool_call>{% endif %}", HERMES),
    (QWEN_TEMPLATE, HERMES),
    ("{% if tools %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endif %}", HERMES),
    ("{% if tools %}<tool_call>\n<function=name>\n<parameter=key>\n</function>\n</tool_call>{% endif %}", QWEN_XML),
    ("{{- '<tool_call>\\n<function=' + tool.name + '>' }}{{ tools }}", QWEN_XML),
    (GLM, None),
    ('{% if tools is not none %}{"name": f, "parameters": d}{% endif %}', LLAMA),
    ("{{ messages[0].content }} <tool_call>", None),
    ("{% if tools %}[TOOL_CALLS]{% endif %}", None),
]


def test_family_is_that_of_the_chat_template():
    for template, family in FAMILIES:
        assert find_tool_family(template) is family


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


CHAIN = {f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"} for _ in range(20)]} for at in range(7)}
NOT_FORCED = [({"anyOf": [{"required": ["a"]}]}, "have anyOf"), ({"properties": {"a": {"not": {}}}}, "have not, which")]
NOT_FORCED += [({"properties": {"a": {"anyOf": [{}], "allOf": 5}}}, "a value of several schemas: write them as one")]
NOT_FORCED += [({"properties": {"a": CHAIN["a0"]}, "$defs": CHAIN}, "more than 65536 bytes")]  # 20^7 branches


def test_schema_that_cannot_be_forced_is_refused():
    marked = Channels(GEMMA, dict.fromkeys(GEMMA.markers, 1))
    for write, form in ((write_call_grammar, QWEN_XML), (write_channel_grammar, marked)):
        for schema, words in NOT_FORCED:
            with pytest.raises(BadInput, match=f"tools: .* {words}"):
                write(form, {"f": schema}, False)
        assert not re.search("any|other", write(form, {"f": {"properties": {}}}, False)), "no arguments are named"
    assert find_types(CHAIN["a0"], {"$defs": CHAIN}) == frozenset()


@pytest.mark.parametrize(("end", "reason", "told"), [(None, "stop", "tool_calls"), (40, "length", "length")])
def test_answer_with_calls_that_is_cut_off_says_length(end, reason, told):
    tools = OfferedTools(HERMES, {"f": {}})
    form = ChatFormat(TokenFormatter(), logprobs=False, make_parser=lambda: make_parser(None, tools))
    chunk = form.format_chunk(0, Delta((1,), write_hermes("f", {})[:end], reason))
    assert (chunk["delta"]["tool_calls"][0]["function"]["name"], chunk["finish_reason"]) == ("f", told)
    parser = make_parser(HARMONY, tools, HARMONY.to_surrogates(HEAD_G.replace("functions.g", "functions.f")))
    assert bool(parser.flush(is_cut=end is not None)) is (end is None), "no arguments are known"
