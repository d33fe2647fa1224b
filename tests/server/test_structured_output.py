"""Structured output over HTTP: the fields of OpenAI and of vLLM."""

import json

import openai
import pytest

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


def test_streamed_document_equals_the_whole_one(client):
    whole = chat(client, response_format=STRICT, seed=7).choices[0].message.content
    events = chat(client, response_format=STRICT, seed=7, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == whole


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


def test_bundle_without_structured_output_refuses_it(start_server):
    server = start_server(name="one row").wait_until_ready()
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


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_call_has_arguments_that_follow_the_schema(client, choice):
    response = chat(client, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, temperature=0)
    (call,) = response.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (response.choices[0].finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9
    assert response.choices[0].message.content is None


def test_streamed_calls_add_up_to_the_whole_ones(client):
    asked = {"tools": [WEATHER, STOP], "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    whole = chat(client, **asked).choices[0].message.tool_calls
    events = [event for event in chat(client, stream=True, **asked) if event.choices]
    pieces = [call for event in events for call in event.choices[0].delta.tool_calls or []]
    assert events[-1].choices[0].finish_reason == "tool_calls"
    assert [piece.function.name for piece in pieces if piece.function.name] == [call.function.name for call in whole]
    assert "".join(piece.function.arguments for piece in pieces) == "".join(call.function.arguments for call in whole)


def test_conversation_with_calls_and_their_results_is_accepted(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    response = chat(client, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=3)
    assert response.choices[0].message.tool_calls is None


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
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}, {"role": "assistant"}]}, "content"),
]


def test_bad_tools_are_refused_with_the_reason(client):
    for fields, words in BAD_TOOLS:
        with pytest.raises(openai.BadRequestError, match=words):
            chat(client, **fields)
