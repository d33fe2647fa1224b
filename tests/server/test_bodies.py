"""Bodies that are no requests: each is answered 400 in OpenAI's form, and nothing inside shows."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash_aot.server.request_schema import (
    ChatRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    StrictModel,
    TextFormat,
    TextPart,
)
from tests.server.conftest import Server
from tests.server.raw_client import read_error

COMPLETION = {"prompt": [17], "max_tokens": 1, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
OF_EACH_TYPE = {
    "null": None,
    "boolean": True,
    "integer": 7,
    "number": 0.5,
    "string": "text",
    "array": [{}],
    "object": {"a": {}},
}
LONE = "\ud800"
INSIDE = (
    *(str(Path(__file__).parents[2]), str(Path.home()), sys.prefix, ".py", "Traceback", "Error("),
    *("pydantic", "http://", "https://", "constrained", "function-", "ValidationError", "instance of", "NoneType"),
    *(model.__name__ for model in (CompletionRequest, ChatRequest, StreamOptions, TextPart, TextFormat, StrictModel)),
)


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    """Of any object, of what JSON only nearly has, or of bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"content-type": "application/json"})


def check_refusal(answer: httpx.Response, code: str = "invalid_value") -> str:
    message = read_error(answer, 400, code)
    assert 0 < len(message) < 1100
    assert not [word for word in INSIDE if word in answer.text], answer.text
    return message


def list_types(schema: dict[str, Any], defined: dict[str, Any]) -> set[str]:
    """All that a published schema takes."""
    if "$ref" in schema:
        return list_types(defined[schema["$ref"].rpartition("/")[2]], defined)
    if "anyOf" in schema:
        return set().union(*(list_types(one, defined) for one in schema["anyOf"]))
    types = {schema["type"]}
    return types | {"integer"} if "number" in types else types


def list_wrong_types() -> Iterator[tuple[str, str, str]]:
    """(path, field, a type it does not have) of all fields of both requests, and of a message's."""
    for path, model in (*zip(PATHS, (CompletionRequest, ChatRequest), strict=True), ("message", Message)):
        schema = model.model_json_schema()
        for field, described in schema["properties"].items():
            for name in sorted(OF_EACH_TYPE.keys() - list_types(described, schema.get("$defs", {}))):
                yield path, field, name


# -- what is no JSON


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"}",
        b'{"prompt": "a"',
        b'{"prompt": "a",}',
        b'{"prompt": "a"} {}',
        b"{'prompt': 'a'}",
        b'{"prompt": "a\x00b"}',
        b'{"prompt": "a\nb"}',
        b"\x00",
        b" ",
        b"prompt=a&max_tokens=1",
        b"<prompt>a</prompt>",
        b'{"prompt": undefined}',
        b'{"n": 0x10}',
        b'{"n": 01}',
        b'{"prompt": "\\x41"}',
        b'{"prompt": "\\ud8"}',
    ],
)
def test_what_is_no_json_is_refused(client, path, body):
    assert check_refusal(post(client, path, body), "invalid_json") == "the body is no JSON"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff\xfe"}',
        b"\xff\xfe\xfd",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"n": ' + b"9" * 5_000 + b"}",
    ],
)
def test_what_a_reader_of_json_breaks_at_is_refused(client, path, body):
    answer = post(client, path, body)
    assert answer.status_code == 400
    check_refusal(answer, answer.json()["error"]["code"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"", b"null", b"true", b"7", b'"a"', b"[]", b"[{}]", b"{}"])
def test_what_is_no_object_or_an_empty_one_is_refused(client, path, body):
    check_refusal(post(client, path, body))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "1e-400"])
@pytest.mark.parametrize("field", ["temperature", "n", "seed", "logit_bias"])
def test_numbers_that_are_none_or_too_large_are_refused(client, path, number, field):
    value = f'{{"17": {number}}}' if field == "logit_bias" else number
    body = json.dumps(PATHS[path])[:-1] + f', "{field}": {value}}}'
    answer = post(client, path, body.encode())
    if (number, field) in {("1e-400", "temperature"), ("1e-400", "logit_bias")}:  # which is 0
        assert answer.status_code == 200
    else:
        check_refusal(answer)


def test_of_two_fields_of_one_name_the_last_counts(client):
    assert post(client, "/v1/completions", b'{"prompt": 1, "max_tokens": 1, "prompt": "a"}').status_code == 200
    check_refusal(post(client, "/v1/completions", b'{"prompt": "a", "max_tokens": 1, "prompt": 1}'))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_other_encodings_are_understood(client, encoding):
    """By the first bytes, as the older standards of JSON have it."""
    answer = post(client, "/v1/completions", json.dumps({**COMPLETION, "prompt": "ü"}).encode(encoding))
    assert answer.status_code == 200


# -- what is JSON, and no request


@pytest.mark.parametrize(("path", "field", "kind"), [*list_wrong_types()])
def test_a_value_of_another_type_is_refused_by_the_field_s_name(client, path, field, kind):
    value = OF_EACH_TYPE[kind]
    if path == "message":
        path, param = "/v1/chat/completions", f"messages.0.{field}"
        body = {**CHAT, "messages": [{"role": "user", "content": "a", field: value}]}
    else:
        param, body = field, {**PATHS[path], field: value}
    answer = post(client, path, body)
    message = check_refusal(answer)
    told = answer.json()["error"]["param"]
    assert told == param or told.startswith(f"{param}.")
    assert message.startswith(f"{told}: ")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", ["Prompt", "max_new_tokens", "", "__class__", "a" * 100_000, "\x00", "ü", LONE])
def test_a_field_that_is_not_known_is_refused(client, path, field):
    answer = post(client, path, {**PATHS[path], field: 1})
    check_refusal(answer, "invalid_value" if field == LONE else "unknown_parameter")


@pytest.mark.parametrize(
    ("path", "given"),
    [
        *(("/v1/completions", {field: LONE}) for field in ("prompt", "stop", "suffix")),
        *(("/v1/completions", {field: ["a", f"a{LONE}"]}) for field in ("prompt", "stop")),
        ("/v1/completions", {"logit_bias": {LONE: 1}}),
        ("/v1/completions", {"prompt": "\udc00\ud800"}),
        ("/v1/chat/completions", {"tool_choice": LONE}),
        ("/v1/chat/completions", {"response_format": {"type": LONE}}),
        *(
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", **message}]})
            for message in (
                *({field: LONE} for field in ("role", "content", "refusal", LONE)),
                {"content": [{"type": "text", "text": LONE}]},
                {"content": [{"type": LONE, "text": "a"}]},
            )
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_is_refused_wherever_it_stands(client, path, given, stream):
    answer = post(client, path, {**PATHS[path], **given, "stream": stream})
    assert answer.status_code == 400
    check_refusal(answer, answer.json()["error"]["code"])


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/completions", {"user": LONE}),
        ("/v1/chat/completions", {"metadata": {LONE: LONE}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "name": LONE}]}),
    ],
)
def test_half_a_character_does_no_harm_where_nobody_looks(client, path, given):
    assert post(client, path, {**PATHS[path], **given}).status_code == 200


def test_whole_characters_of_all_kinds_are_taken(client):
    texts = [
        "\x00",
        "\x00" * 50,
        "\U0001f600",
        "\ufeff",
        "\ufffe",
        "\u202e",
        "<|endoftext|>",
        "\r\n",
        "e\u0301",
        "\x7f",
    ]
    for text in texts:
        asked = {**COMPLETION, "prompt": text, "stop": [text], "user": text}
        assert post(client, "/v1/completions", asked).status_code == 200, ascii(text)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages: List should have at least 1 item"),
        ([{}], "messages.0.role: Field required"),
        ([{"role": "user"}], "messages.0.content: Field required"),
        ([{"role": "tool", "content": "a"}], "messages.0.role: Input should be 'system', 'developer', 'user' or"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], "messages.0.content: "),
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages.0.tool_calls: none are accepted here"),
        ([*CHAT["messages"], 7], "messages.1: Input should be an object"),
    ],
)
def test_what_is_wrong_with_messages_is_said_with_their_place(client, messages, words):
    assert check_refusal(post(client, "/v1/chat/completions", {"messages": messages})).startswith(words)


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"prompt": []}, "invalid_value", "prompt: Input should be a text, a list of token ids, or a list of up to 16"),
        ({"prompt": ["a", 17]}, "invalid_value", "prompt: Input should be a text, a list of token ids"),
        ({"prompt": [17, -1]}, "invalid_value", "prompt: Input should be a text, a list of token ids"),
        ({"prompt": [1 << 30]}, "invalid_value", "token"),
        ({"stop_token_ids": [1 << 30]}, "invalid_value", "token"),
        ({"logit_bias": {str(1 << 30): 1}}, "invalid_value", "token"),
        ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias.a"),
        ({"logit_bias": {"9999999999": 1}}, "invalid_value", "token"),
        ({"echo": True}, "invalid_value", "echo: Input should be False"),
        ({"k": 3}, "not_built", "k is 3: this server has 0, 7"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options without stream"),
        ({"stream_options": {"x": 1}}, "unknown_parameter", "stream_options.x is not known here: leave it out"),
    ],
)
def test_what_cannot_be_done_is_said(client, given, code, words):
    assert words in check_refusal(post(client, "/v1/completions", {**COMPLETION, **given}), code)


def test_a_model_that_is_not_there_is_named_and_not_at_length(client):
    for model in ("gpt-4o", "a" * 500_000, "\x00", LONE, "../../etc/passwd", ""):
        message = read_error(post(client, "/v1/completions", {**COMPLETION, "model": model}), 404, "model_not_found")
        assert message.startswith("this server has the model 'embedded', not '") and len(message) < 1100


def test_other_methods_and_paths_are_refused_in_the_same_form(client):
    assert read_error(client.get("/v1/completions"), 405, None) == "/v1/completions takes no GET"
    assert read_error(client.get("/v1/embeddings"), 404, None) == "there is nothing at /v1/embeddings"
    assert read_error(client.get("/v1/models/"), 404, "model_not_found")
    assert client.get("/v1/completions").headers["allow"] == "POST"
