"""How much one may take: of memory, of tokens, of each other's turns, of time."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.conftest import KEY, Server
from tests.server.raw_client import ENDLESS, RawClient, head, read_error, wait_until_busy, wait_until_idle

BODY_BYTES, PROMPT_TOKENS = 4096, 8
OTHER = "sk-the-key-of-somebody-else"
SMALL = {"prompt": [17], "max_tokens": 1, "temperature": 0}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def strict(bundle: Callable[[str], Path]) -> Iterator[Server]:
    """One that takes little, and ends everything soon."""
    sizes = (f"--max_body_bytes={BODY_BYTES}", f"--max_prompt_tokens={PROMPT_TOKENS}")
    server = Server.start(bundle("served"), *sizes, "--max_per_key=8", "--request_seconds=0.5").wait_until_ready()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


@pytest.fixture(scope="module")
def crowded(bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with two keys, of which each may have 16 choices; there are 4 slots, and a line for 18."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(OTHER)
    flags = (f"--api_keys={file}", "--max_per_key=16", "--max_waiting=18")
    server = Server.start(bundle("served"), *flags, key=KEY).wait_until_ready()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


def pad(size: int) -> bytes:
    """A request as a body of so many bytes."""
    body = json.dumps(SMALL).encode()
    return body + b" " * (size - len(body))


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


# -- bodies


def test_a_body_may_be_as_large_as_it_may_be(strict):
    with RawClient(strict) as client:
        client.ask("POST", COMPLETIONS, pad(BODY_BYTES))
        assert client.read_answer().status == 200


@pytest.mark.parametrize("size", [BODY_BYTES + 1, 4 * BODY_BYTES, 64 * BODY_BYTES])
def test_a_larger_one_is_refused_and_whoever_sent_it_hears_so(strict, size):
    with strict.client() as client:
        answer = client.post(COMPLETIONS, content=pad(size), headers={"content-type": "application/json"})
        assert read_error(answer, 413, "body_too_large") == "the body is larger than 4096 bytes"
        assert client.post(COMPLETIONS, json=SMALL).status_code == 200


def test_a_body_that_says_it_is_huge_is_refused_before_it_comes(strict):
    for length in ("10000000000", "99999999999999999999"):
        with RawClient(strict) as client:
            client.ask("POST", COMPLETIONS, content_length=length)
            assert client.read_answer().status == 413
            assert client.read_until_closed() == b""


def test_a_body_without_a_length_is_counted(strict):
    with RawClient(strict) as client:
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked"))
        client.send(chunk(pad(BODY_BYTES)) + chunk(b" ") + b"0\r\n\r\n")
        assert client.read_answer().status == 413
    with RawClient(strict) as client:
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked"))
        client.send(chunk(pad(BODY_BYTES - 1)) + chunk(b" ") + b"0\r\n\r\n")
        assert client.read_answer().status == 200


def test_a_body_without_an_end_is_not_listened_to_for_ever(strict):
    with RawClient(strict) as client:
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked"))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while True:
                client.send(chunk(b" " * 1024))


def test_what_is_sent_beyond_the_length_is_another_request_and_no_http(strict):
    body = pad(200)
    with RawClient(strict) as client:
        client.ask("POST", COMPLETIONS, body + b"beyond\r\n\r\n", content_length="200")
        assert client.read_answer().status == 200
        answer = client.read_answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_http")
        assert client.read_until_closed() == b""


@pytest.mark.parametrize(
    "lengths",
    [
        {"content_length": "200\r\ncontent-length: 20"},
        {"content_length": "-1"},
        {"content_length": "+20"},
        {"content_length": "20, 30"},
        {"content_length": "0x20"},
        {"transfer_encoding": "chunked, identity"},
        {"transfer_encoding": "\x0bchunked"},
    ],
)
def test_lengths_that_two_servers_may_read_in_two_ways_are_refused(strict, lengths):
    with RawClient(strict) as client:
        client.send(head("POST", COMPLETIONS, **lengths) + pad(200))
        assert client.read_answer().status in (400, 501)
        assert client.read_until_closed() == b""


def test_a_head_that_is_too_large_is_refused(strict):
    with RawClient(strict) as client:
        client.ask("GET", "/health", padding="x" * (1 << 17))
        answer = client.read_answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_http")


def test_checking_a_body_of_nothing_but_flaws_holds_nobody_up(served):
    """Each of half a million is one more for pydantic to describe, and none of them is worth more than one message."""
    many, message = 150_000, {"role": "user", "content": "a"}
    bodies = [
        (COMPLETIONS, {"prompt": [1.5] * many}),
        (COMPLETIONS, {"prompt": [[]] * many}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(50_000)), "a")}),
        (COMPLETIONS, {"prompt": "a", **dict.fromkeys(map(str, range(50_000)), 1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * many}]}),
        ("/v1/chat/completions", {"messages": [{**message, **{f"a{at}": 1 for at in range(80)}}]}),
        ("/v1/chat/completions", {"messages": [message], "metadata": dict.fromkeys(map(str, range(50_000)), 1)}),
        ("/v1/chat/completions", {"messages": [message], "modalities": [1] * many}),
    ]
    with served.client() as client:
        for path, body in bodies:
            message = read_error(client.post(path, json=body), 400, "invalid_value")
            assert "more)" not in message, "every flaw was described"


# -- tokens and choices


def test_a_prompt_may_have_so_many_tokens_and_no_more(strict):
    with strict.client() as client:
        fits = {**SMALL, "prompt": [17] * PROMPT_TOKENS}
        assert client.post(COMPLETIONS, json=fits).status_code == 200
        for prompt in ([17] * (PROMPT_TOKENS + 1), [[17], [17] * (PROMPT_TOKENS + 1)]):
            answer = client.post(COMPLETIONS, json={**SMALL, "prompt": prompt})
            message = read_error(answer, 400, "context_length_exceeded")
            assert message == "the prompt has 9 tokens; this server takes up to 8"
        chat = {"messages": [{"role": "user", "content": "many words " * 20}]}
        answer = client.post("/v1/chat/completions", json=chat)
        assert "this server takes up to 8" in read_error(answer, 400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 17}, "n"),
        ({"prompt": [[17]] * 17}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": [[17]] * 9, "n": 2}, "n"),
        ({"prompt": [[17]] * 2, "n": 9, "stream": True}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias"),
    ],
)
def test_what_is_too_many_is_refused_by_name(served, body, param):
    with served.client() as client:
        answer = client.post(COMPLETIONS, json={**SMALL, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_more_tokens_than_there_is_room_for_are_refused(served):
    with served.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": [17] * 10, "max_tokens": 248})
        message = read_error(answer, 400, "context_length_exceeded")
        assert message == (
            "the prompt has 10 tokens, and max_tokens is 248: there is room for 247 behind it (256 positions)"
        )
        answer = client.post(COMPLETIONS, json={"prompt": [17] * 257})
        assert "the prompt has 257 tokens; this server takes up to 256" in answer.text


# -- turns


def test_a_key_has_so_many_choices_at_once_and_its_load_refuses_nobody_else(crowded):
    wait_until_idle(crowded, KEY)
    with crowded.client(KEY) as client, crowded.client(OTHER) as other:
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as answer:
            assert answer.status_code == 200
            wait_until_busy(crowded, 4, 12, key=KEY)
            refused = crowded.client(KEY).post(COMPLETIONS, json=SMALL)
            message = read_error(refused, 429, "too_many_requests")
            assert message == (
                "16 choices are under way for this API key, 1 more are asked for, and no more than 16 may be. Wait for "
                "answers first"
            )
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            with other.stream("POST", COMPLETIONS, json={**SMALL, "stream": True}) as let_in:
                assert let_in.status_code == 200
                wait_until_busy(crowded, 4, 13, key=KEY)
                answer.close()
                assert [*let_in.iter_lines()][-2] == "data: [DONE]"
        wait_until_idle(crowded, KEY)
        assert client.post(COMPLETIONS, json={**SMALL, "n": 16}).status_code == 200


def test_more_choices_than_anybody_may_have_are_refused_even_when_nothing_is_under_way(strict):
    wait_until_idle(strict)
    with strict.client() as client:
        assert client.post(COMPLETIONS, json={**SMALL, "n": 8}).status_code == 200
        refused = client.post(COMPLETIONS, json={**SMALL, "n": 9})
        assert "one caller may have 8" in read_error(refused, 400, "invalid_value")


def test_a_full_line_refuses_all_choices_of_a_request_or_none(crowded):
    wait_until_idle(crowded, KEY)
    with crowded.client(KEY) as client, crowded.client(OTHER) as other:
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as answer:
            assert answer.status_code == 200
            wait_until_busy(crowded, 4, 12, key=KEY)
            for stream in (False, True):
                refused = other.post(COMPLETIONS, json={**SMALL, "n": 7, "stream": stream})
                message = read_error(refused, 503, "overloaded")
                assert message == "too many requests are waiting. Try again a little later"
                assert refused.headers["retry-after"] == "1"
                wait_until_busy(crowded, 4, 12, key=KEY)  # those of the seven that had a place have left it
        wait_until_idle(crowded, KEY)
        assert other.post(COMPLETIONS, json={**SMALL, "n": 16}).status_code == 200


# -- time


def test_a_request_that_takes_too_long_ends(strict):
    with strict.client() as client:
        message = read_error(client.post(COMPLETIONS, json={**ENDLESS, "n": 8}), 504, "timeout")
        assert message == "this took longer than 0.5 s, as long as a request may"
        wait_until_idle(strict)
        assert client.post(COMPLETIONS, json=SMALL).status_code == 200


def test_a_stream_that_takes_too_long_ends_with_the_reason(strict):
    with (
        strict.client() as client,
        client.stream("POST", COMPLETIONS, json={**ENDLESS, "n": 8, "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        *texts, error, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert texts and done == "[DONE]"
    assert json.loads(error)["error"] == {
        "message": "this took longer than 0.5 s, as long as a request may",
        "type": "server_error",
        "param": None,
        "code": "timeout",
    }
    wait_until_idle(strict)
