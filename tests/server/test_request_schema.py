"""Invalid request bodies: each gets status 400 in OpenAI's form without internal details."""

import itertools
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
LONE_SURROGATE = "\ud800"
INTERNALS = (
    *(str(Path(__file__).parents[2]), str(Path.home()), sys.prefix, ".py", "Traceback", "Error("),
    *("pydantic", "http://", "https://", "constrained", "function-", "ValidationError", "instance of", "NoneType"),
    *(model.__name__ for model in (CompletionRequest, ChatRequest, StreamOptions, TextPart, TextFormat, StrictModel)),
)


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    """Posts bytes, or an object as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"content-type": "application/json"})


def check_refusal(response: httpx.Response, code: str = "invalid_value") -> str:
    message = read_error(response, 400, code)
    assert 0 < len(message) < 1100
    assert not [word for word in INTERNALS if word in response.text], response.text
    return message


# -- invalid JSON


NOT_JSON = (
    *(b"{", b"}", b'{"prompt": "a"', b'{"prompt": "a",}', b'{"prompt": "a"} {}', b"{'prompt': 'a'}"),
    *(b'{"prompt": "a\x00b"}', b'{"prompt": "a\nb"}', b"\x00", b" ", b"prompt=a&max_tokens=1", b"<prompt>a</prompt>"),
    *(b'{"prompt": undefined}', b'{"n": 0x10}', b'{"n": 01}', b'{"prompt": "\\x41"}', b'{"prompt": "\\ud8"}'),
)
HOSTILE_JSON = (
    *(b'{"prompt": "\xff\xfe"}', b"\xff\xfe\xfd", b"[" * 100_000, b'{"a":' * 100_000),
    *(b"[" * 100_000 + b"]" * 100_000, b'{"n": ' + b"9" * 5_000 + b"}"),
)
NO_REQUESTS = (b"", b"null", b"true", b"7", b'"a"', b"[]", b"[{}]", b"{}")


@pytest.mark.parametrize("path", PATHS)
def test_body_that_is_not_a_json_object_is_refused(client, path):
    for body in NOT_JSON:
        assert check_refusal(post(client, path, body), "invalid_json") == "the body is not JSON", body
    for body in HOSTILE_JSON:
        response = post(client, path, body)
        check_refusal(response, response.json()["error"]["code"])
    for body in NO_REQUESTS:
        check_refusal(post(client, path, body))


@pytest.mark.parametrize("path", PATHS)
def test_nan_infinity_and_too_large_numbers_are_refused(client, path):
    numbers = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "1e-400")
    for number, field in itertools.product(numbers, ("temperature", "n", "seed", "logit_bias")):
        value = f'{{"17": {number}}}' if field == "logit_bias" else number
        response = post(client, path, (json.dumps(PATHS[path])[:-1] + f', "{field}": {value}}}').encode())
        if number == "1e-400" and field in ("temperature", "logit_bias"):  # equal to 0
            assert response.status_code == 200
        else:
            check_refusal(response)


# -- JSON that is not a request


@pytest.mark.parametrize("path", PATHS)
def test_unknown_field_is_refused(client, path):
    for field in ("Prompt", "max_new_tokens", "", "__class__", "a" * 100_000, "\x00", "ü", LONE_SURROGATE):
        response = post(client, path, {**PATHS[path], field: 1})
        check_refusal(response, "invalid_value" if field == LONE_SURROGATE else "unknown_parameter")


SURROGATES = (
    *(("/v1/completions", {field: LONE_SURROGATE}) for field in ("prompt", "stop", "suffix")),
    ("/v1/completions", {"prompt": ["a", f"a{LONE_SURROGATE}"]}),
    ("/v1/completions", {"logit_bias": {LONE_SURROGATE: 1}}),
    ("/v1/chat/completions", {"tool_choice": LONE_SURROGATE}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONE_SURROGATE}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", LONE_SURROGATE: LONE_SURROGATE}]}),
)
IGNORED_SURROGATES = (
    ("/v1/completions", {"user": LONE_SURROGATE}),
    ("/v1/chat/completions", {"metadata": {LONE_SURROGATE: LONE_SURROGATE}}),
)


def test_lone_surrogate_is_refused_in_used_fields_only(client):
    for (path, given), stream in itertools.product(SURROGATES, (False, True)):
        response = post(client, path, {**PATHS[path], **given, "stream": stream})
        assert response.status_code == 400, given
        check_refusal(response, response.json()["error"]["code"])
    for path, given in IGNORED_SURROGATES:
        assert post(client, path, {**PATHS[path], **given}).status_code == 200, given


BAD_MESSAGES = (
    ([], "messages: List should have at least 1 item"),
    ([{}], "messages.0.role: Field required"),
    ([{"role": "user"}], "messages.0.content: a text is needed"),
    ([{"role": "judge", "content": "a"}], "messages.0.role: Input should be 'system', 'developer', 'user',"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], "messages.0.content: "),
    ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages.0.tool_calls.0.id: Field required"),
    ([*CHAT["messages"], 7], "messages.1: Input should be an object"),
    ([{**CHAT["messages"][0], "audio": {}}], "messages.0.audio: this server accepts null only: leave it out"),
)
VARIABLES = "chat_template_kwargs: Input should be a map of names"
BAD_CHATS = (
    ({"tools": [{"type": "retrieval"}]}, "tools"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"top_logprobs": 2}, "top_logprobs without logprobs"),
    ({"max_completion_tokens": 5}, "max_tokens and max_completion_tokens differ"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "reads no variable 'enable_thinking'"),
    *(({"chat_template_kwargs": one}, VARIABLES) for one in ({"a": [1]}, {"__a": 1})),
)
BAD_VALUES = (
    ({"prompt": []}, "invalid_value", "prompt: Input should be a text, a list of token ids, or a list of up to 16"),
    ({"prompt": ["a", 17]}, "invalid_value", "prompt: Input should be a text, a list of token ids"),
    ({"prompt": [17, -1]}, "invalid_value", "prompt: Input should be a text, a list of token ids"),
    ({"prompt": [1 << 30]}, "invalid_value", "the target's tokens are 0 to 1023"),
    ({"stop_token_ids": [1 << 30]}, "invalid_value", "token"),
    ({"logit_bias": {str(1 << 30): 1}}, "invalid_value", "token"),
    ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias.a"),
    ({"logit_bias": {"9999999999": 1}}, "invalid_value", "token"),
    ({"suffix": "a"}, "invalid_value", "suffix: Input should be ''"),
    ({"k": 3}, "not_built", "k is 3: this server has 0, 7"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options without stream"),
    ({"stream_options": {"x": 1}}, "unknown_parameter", "stream_options.x is not a known field: leave it out"),
    ({"best_of": 2}, "invalid_value", "best_of"),
    ({"max_token": 1}, "unknown_parameter", "max_token is not a known field: did you mean max_tokens?"),
)


def test_unsupported_value_is_refused_with_its_path_and_reason(client):
    for messages, words in BAD_MESSAGES:
        assert check_refusal(post(client, "/v1/chat/completions", {"messages": messages})).startswith(words)
    for given, words in BAD_CHATS:
        assert words in check_refusal(post(client, "/v1/chat/completions", {**CHAT, **given}))
    for given, code, words in BAD_VALUES:
        assert words in check_refusal(post(client, "/v1/completions", {**COMPLETION, **given}), code)


def test_unknown_model_is_named_in_a_short_message(client):
    for model in ("gpt-4o", "a" * 500_000, "\x00", LONE_SURROGATE, "../../etc/passwd", ""):
        message = read_error(post(client, "/v1/completions", {**COMPLETION, "model": model}), 404, "model_not_found")
        assert message.startswith("this server has the model 'embedded', not '") and len(message) < 1100


def test_unknown_paths_and_methods_are_refused_in_openai_form(client):
    assert read_error(client.get("/v1/completions"), 405, None) == "/v1/completions does not accept GET"
    assert read_error(client.get("/v1/embeddings"), 404, None) == "/v1/embeddings does not exist"
    assert read_error(client.get("/v1/models/"), 404, "model_not_found")
    assert client.get("/v1/completions").headers["allow"] == "POST"
