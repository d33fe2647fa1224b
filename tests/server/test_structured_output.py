"""Structured output over HTTP: the fields of OpenAI and of vLLM."""

import json

import openai
import pytest

from dflash_aot.runtime.text.tokenizer import Tokenizer
from dflash_aot.server import served_model
from dflash_aot.server.chat_families import GEMMA, HARMONY, QWEN
from dflash_aot.server.tool_grammars import write_markers
from tests.server.conftest import Server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "visit", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "Where to?"}]


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, **fields):
    model = client.models.list().data[0].id
    return client.chat.completions.create(**{"model": model, "messages": MESSAGES, "max_tokens": 80, **fields})


def test_json_schema_is_followed_by_every_choice(client):
    response = chat(client, response_format=STRICT, n=3, seed=2, temperature=1.0)
    for choice in response.choices:
        visit = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and visit.keys() == {"city", "count"} and 1 <= visit["count"] <= 99
    (choice,) = chat(client, response_format={"type": "json_object"}, temperature=0).choices
    assert isinstance(json.loads(choice.message.content), dict)


def test_vllms_structured_outputs_apply_to_completions_too(client):
    model = client.models.list().data[0].id
    asked = {"structured_outputs": {"choice": ["left", "right"]}}
    response = client.completions.create(model=model, prompt="Turn", extra_body=asked)
    assert response.choices[0].text in ("left", "right")


NOTHING = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
BAD_FORMATS = [
    ({"response_format": NOTHING}, "- response_format is refused"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "regex is refused"),
    ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "structured_outputs"),
    ({"response_format": STRICT, "extra_body": {"structured_outputs": {"regex": "a"}}}, "give one"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "schema"),
]


def test_bad_formats_are_refused_with_the_reason(client):
    for fields, words in BAD_FORMATS:
        with pytest.raises(openai.BadRequestError, match=words):
            chat(client, **fields)


def test_bundle_without_structured_output_refuses_it(start_server, chatting_target):
    server = start_server(f"--target={chatting_target}", name="tied").wait_until_ready()
    with server.client() as http:
        response = http.post("/v1/chat/completions", json={"messages": MESSAGES, "response_format": STRICT})
        tool = {"tools": [STOP], "tool_choice": "required"}
        forced = http.post("/v1/chat/completions", json={"messages": MESSAGES, **tool})
        least = {"prompt": [5, 6], "max_tokens": 4, "min_tokens": 2}
        stopped = http.post("/v1/completions", json={**least, "ignore_eos": True, "stop_token_ids": [5]})
        free = http.post("/v1/completions", json={**least, "stop_token_ids": []})
    for refused, field in ((response, "response_format"), (forced, "tool_choice")):
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "not_built", field)
    assert stopped.status_code == 400 and stopped.json()["error"]["param"] == "min_tokens"
    assert free.status_code == 200 and free.json()["usage"]["completion_tokens"] == 4


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
UNIQUE = {"type": "function", "function": {"name": "f", "parameters": {"type": "array", "uniqueItems": True}}}
STOP = {"type": "function", "function": {"name": "stop_all"}}


def test_call_is_forced_where_the_template_knows_no_tools(client):
    response = chat(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, temperature=0)
    (call,) = response.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert response.choices[0].message.content is None


BAD_TOOLS = [
    ({"tools": [WEATHER]}, "knows no tools"),
    ({"tool_choice": "required"}, "tool_choice without tools"),
    ({"tools": [WEATHER, WEATHER], "tool_choice": "required"}, "a name twice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "no function 'f'"),
    ({"tools": [UNIQUE], "tool_choice": "required"}, "- tools is refused: .*uniqueItems"),
    (
        {"tools": [UNIQUE], "tool_choice": "required", "response_format": {"type": "text"}},
        "- tools is refused: .*uniqueItems",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"}, "name"),
    ({"tools": [WEATHER], "tool_choice": "required", "response_format": STRICT}, "has its own form"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}, {"role": "tool"}]}, "content"),
]


def test_bad_tools_are_refused_with_the_reason(client):
    for fields, words in BAD_TOOLS:
        with pytest.raises(openai.BadRequestError, match=words):
            chat(client, **fields)


# -- each family of templates, with the markers as tokens

BEGIN = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.arguments|tojson }}{% endfor %}"
TURNS = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}" + CALLS
HERMES_TEMPLATE = BEGIN + '<tool_call>\n{"name": .., "arguments": ..}\n</tool_call>' + TURNS + "\n{% endfor %}"
XML_TEMPLATE = (
    BEGIN + "<tool_call>\n<function=NAME>\n<parameter=KEY>\n</function>\n</tool_call>" + TURNS + "{% endfor %}"
)
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
)
ROME = '{"city": "Rome", "days": 3}'
XML_THINKING = XML_TEMPLATE + "{% if not tools %}<think>\n{% endif %}"
HARMONY_TURNS = "<|start|>{{ m.role }}<|channel|>{{ m.thinking }}<|message|>{{ m.content }}" + CALLS
HARMONY_TEMPLATE = BEGIN + "{% for m in messages %}" + HARMONY_TURNS + "<|end|>{% endfor %}<|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ROME
# A form begins in the answer itself, so that this is the end of an empty message, then thinking, then a call.
HARMONY_ANSWER = f"{HARMONY.end}{HARMONY.begin}hm{HARMONY.end}{HARMONY_CALL}"
GEMMA_CALL = 'call:get_weather{city:<|"|>Rome<|"|>,days:3}'
GEMMA_TEMPLATE = BEGIN + TURNS + "<|channel>thought\n<channel|>{% endfor %}"
GEMMA_ANSWER = f"{GEMMA.begin}thought\nhm{GEMMA.end}<|tool_call>{GEMMA_CALL}<tool_call|>"
MARKERS = ("<tool_call>", "</tool_call>", "é")
# Template, tokens and whether they are special, an answer with a call, its thinking, and the text of its call where
# there is no such function.
HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
XML_ANSWER = f"{XML_CALL}</function>\n</tool_call>"
FAMILIES = {
    "Hermes": (HERMES_TEMPLATE, MARKERS, True, HERMES_CALL, None, HERMES_CALL),
    "Qwen XML": (XML_THINKING, (*MARKERS, *QWEN.markers[:2]), False, XML_ANSWER, None, XML_ANSWER),
    "Harmony": (HARMONY_TEMPLATE, HARMONY.markers, True, HARMONY_ANSWER, "hm", ROME),
    "Gemma": (GEMMA_TEMPLATE, GEMMA.markers, True, GEMMA_ANSWER, "hm", GEMMA_CALL.replace('<|"|>', "")),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, bundle, make_target):
    """A client of a server with a template of the family, a form that an answer with a call follows, and the rest."""
    template, tokens, special, call, thinking, text = FAMILIES[request.param]
    target = make_target(template, tokens, special)
    ids = {content: token for token, content in Tokenizer.open(target).added_tokens.items()}
    marked = {marker: ids[marker] for marker in tokens} if thinking else {"\0": 0}
    written = {"structured_outputs": {"grammar": f"start: {write_markers(call, marked)}"}}
    server = Server.start(bundle("served"), f"--target={target}").wait_until_ready()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client, written, thinking, text
    assert server.stop() == 0, "".join(server.lines)


def read_calls(client, **fields):
    """The message of a whole answer, which a streamed answer has to equal, with the calls' index in the stream."""
    choice = chat(client, **fields).choices[0]
    calls, content, thinking, reason = [], "", "", None
    for event in chat(client, stream=True, **fields):
        delta = event.choices[0].delta
        content += delta.content or ""
        thinking += getattr(delta, "reasoning_content", "")
        reason = event.choices[0].finish_reason or reason
        for call in delta.tool_calls or []:
            calls += [call] if call.id else []
            calls[call.index].function.arguments += "" if call.id else call.function.arguments
    whole = choice.message.tool_calls or []
    assert [one.function.to_dict() for one in calls] == [one.function.to_dict() for one in whole]
    assert (content, reason) == (choice.message.content or "", choice.finish_reason)
    assert thinking == getattr(choice.message, "reasoning_content", "")
    return choice, calls


def test_calls_of_each_family_are_forced_and_read(family):
    """Whole and streamed, by the official client; the answer's call is sent back with what streams add to it."""
    client, written, thinking, text = family
    asked = {"tools": [WEATHER, STOP], "max_tokens": 120, "temperature": 0}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        forced, calls = read_calls(client, **asked, tool_choice=choice)
        assert calls and forced.finish_reason in ("tool_calls", "length")
        if choice != "required":
            arguments = json.loads(calls[0].function.arguments)
            assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9
    automatic, calls = read_calls(client, **asked, extra_body=written)
    assert [(one.function.name, one.function.arguments) for one in calls] == [("get_weather", ROME)]
    assert (automatic.finish_reason, automatic.message.content) == ("tool_calls", None)
    assert getattr(automatic.message, "reasoning_content", None) == thinking
    answer = {"role": "assistant", "content": None, "tool_calls": [{**one.to_dict(), "index": 0} for one in calls]}
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}
    plain, thoughtful = (
        chat(client, messages=[*MESSAGES, {**answer, **thought}, result], tools=[WEATHER], max_tokens=2).usage
        for thought in ({}, {"reasoning_content": "so many thoughts"})
    )
    assert plain.prompt_tokens < thoughtful.prompt_tokens, "the template reads them"
    other = {"structured_outputs": {"grammar": written["structured_outputs"]["grammar"].replace("weather", "news")}}
    assert read_calls(client, **asked, extra_body=other)[0].message.content == text.replace("weather", "news")


@pytest.mark.parametrize("family", ["Qwen XML", "Gemma"], indirect=True)
def test_thinking_that_the_prompt_has_begun_is_an_item_of_the_response(family):
    client, _, thinking, _ = family
    asked = {"model": client.models.list().data[0].id, "temperature": 0, "max_output_tokens": 8}
    *events, last = client.responses.create(input=MESSAGES, stream=True, **asked)
    deltas = "".join(event.delta for event in events if event.type.endswith("_text.delta"))
    (item,) = client.responses.create(input=MESSAGES, **asked).output
    assert item.type == ("message" if thinking else "reasoning")
    assert deltas == item.content[0].text == last.response.output[0].content[0].text != ""
    again = client.responses.create(input=[*MESSAGES, item.model_dump(exclude_none=True), *MESSAGES], **asked)
    assert again.usage.input_tokens > last.response.usage.input_tokens
    form = {"format": {"type": "json_schema", "name": "letter", "schema": {"const": "a"}}}
    assert client.responses.create(input=MESSAGES, text=form, **asked).output_text == '"a"'


SENT_BACK = [
    {"role": "assistant", "content": "x", "reasoning_content": "thought", "reasoning": None, "refusal": ""},
    {"role": "assistant", "content": "x", "reasoning": "thought", "reasoning_details": [{}], "parsed": {"a": 1}},
    {"role": "assistant", "content": "x", "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {}},
    {"role": "assistant", "content": [{"type": "text", "text": "x", "cache_control": {}, "annotations": []}]},
    {"role": "assistant", "content": "x", "tool_calls": [], "function_call": None, "audio": None, "annotations": []},
]


def test_fields_that_servers_add_to_answers_change_no_text(served):
    with served.client() as http:
        bodies = [{"messages": [*MESSAGES, message, *MESSAGES]} for message in (*SENT_BACK, {"role": "assistant"})]
        found = [http.post("/tokenize", json=body).json()["tokens"] for body in bodies]
        refused = http.post("/tokenize", json={"messages": [{**SENT_BACK[0], "refusal": "no"}]}).json()["error"]
    assert found[0] and all(tokens == found[0] for tokens in found[:-1]) and len(found[-1]) < len(found[0])
    assert refused["param"] == "messages.0.refusal" and refused["message"].startswith("messages.0.refusal: ")


def test_template_with_channels_that_are_no_tokens_turns_chats_off(make_target):
    for marker in ("<|channel|>", "<|channel>"):
        target = make_target("{{ messages[0].content }}" + marker)
        channels, refusal = served_model._probe_chats(target, Tokenizer.open(target))
        assert channels is None and f"no token {marker}" in refusal.replace("<|start|>, ", "")


def test_template_that_fails_turns_chats_off_alone(start_server, make_target):
    failing = make_target(
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls|fromjson }}{% endfor %}", eos_token="<|im_end|>"
    )
    server = start_server(f"--target={failing}").wait_until_ready()
    with server.client() as http:
        facts = http.get("/v1/models").json()["data"][0]["dflash"]
        completed = http.post("/v1/completions", json={"prompt": "import", "max_tokens": 2})
        refused = http.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert completed.status_code == 200 and refused.status_code == 400
    assert (facts["chat"], facts["tools"]) == (False, False) and "fromjson" in facts["chat_refusal"]
    assert "fromjson" in refused.json()["error"]["message"] and str(failing) not in refused.text + str(facts)
    log = "".join(server.lines)
    assert "chats are refused: " in log
    assert "tokens that end an answer: 0 <|endoftext|> (config.json, generation_config.json), 2 <|im_end|> (" in log
