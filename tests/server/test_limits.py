"""Limits: choices per key, sizes of bodies and prompts, size of the queue, time of a request."""

import asyncio
import json
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import pytest

from dflash_aot.server.api_errors import ApiError
from dflash_aot.server.limits import (
    NO_LIMIT,
    PARSING_THREADS,
    UNFINISHED_BODIES,
    WITHOUT_KEY,
    KeyLimits,
    ServerLimits,
    default_choices,
    make_keys,
)
from dflash_aot.server.responses import start_generation
from tests.runtime.stepper import LONG
from tests.server.conftest import KEY, Server
from tests.server.raw_client import ENDLESS, RawClient, head, read_error, wait_until_busy, wait_until_idle

BODY_BYTES, PROMPT_TOKENS = 4096, 8
OTHER = "sk-the-key-of-another-client"
SMALL = {"prompt": [17], "max_tokens": 1, "temperature": 0}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def strict_server(bundle: Callable[[str], Path]) -> Iterator[Server]:
    sizes = (f"--max_body_bytes={BODY_BYTES}", f"--max_prompt_tokens={PROMPT_TOKENS}")
    server = Server.start(
        bundle("served"), *sizes, "--max_per_key=8", "--max_waiting=8", "--request_seconds=2", "--preload"
    ).wait_until_ready()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


@pytest.fixture(scope="module")
def two_key_server(bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two keys of at most 16 choices each, 4 slots, and a queue for 18 choices."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(OTHER)
    flags = (f"--api_keys={file}", "--max_per_key=16", "--max_waiting=18")
    server = Server.start(bundle("served"), *flags, key=KEY).wait_until_ready()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


def pad(size: int) -> bytes:
    """A valid body of this size."""
    body = json.dumps(SMALL).encode()
    return body + b" " * (size - len(body))


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


# -- per-key limits


def test_key_limits_count_choices_per_key_until_they_end():
    limits = KeyLimits(ServerLimits(choices_per_key=3))
    with limits.admit(1, 2), limits.admit(2, 3):
        with pytest.raises(ApiError, match="2 choices of this API key are in progress"):
            limits.admit(1, 2).__enter__()
        with limits.admit(1, 1):
            pass
    with limits.admit(1, 3):
        pass
    with limits.admit(WITHOUT_KEY, 3), pytest.raises(ApiError, match=r"3 choices of all clients .*--max_per_key"):
        limits.admit(WITHOUT_KEY, 1).__enter__()
    with pytest.raises(ApiError) as caught:
        limits.admit(1, 4).__enter__()
    assert (caught.value.status, caught.value.retry) == (400, False)  # waiting would not help


def test_only_several_keys_are_limited_by_default():
    limits = [default_choices(make_keys(keys, "a test")) for keys in ([], ["a"], ["a", "b"])]
    assert limits == [NO_LIMIT, NO_LIMIT, 64]


def test_keys_share_no_prefixes(two_key_server):
    """How many tokens were cached, and how fast an answer is, would tell one key what another has asked."""
    body = {**SMALL, "prompt": [*range(17, 17 + 150)]}

    def count_cached(key: str) -> int:
        with two_key_server.client(key) as client:
            return client.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached = [count_cached(key) for key in (KEY, KEY, OTHER, OTHER)]
    assert cached[0] == cached[2] == 0 and cached[1] == cached[3] > 0


def test_parsing_for_one_key_does_not_delay_other_keys():
    """The first key has more slow requests than there are threads; a request of the second key is parsed meanwhile."""
    release = threading.Event()

    async def parse_all() -> list[str]:
        limits = KeyLimits(ServerLimits(choices_per_key=10))
        wait = partial(release.wait, 60)
        slow = [asyncio.create_task(limits.run_in_turn(1, wait)) for _ in range(PARSING_THREADS + 2)]
        fast = await limits.run_in_turn(2, lambda: "parsed")
        assert not any(task.done() for task in slow)
        release.set()
        return [fast, *map(str, await asyncio.gather(*slow))]

    assert asyncio.run(parse_all()) == ["parsed", *["True"] * (PARSING_THREADS + 2)]


def test_cancelled_request_keeps_the_turn_of_its_key():
    release, began = threading.Event(), threading.Event()

    def parse_slowly() -> bool:
        began.set()
        return release.wait(60)

    async def parse_after_cancel() -> list[str]:
        limits = KeyLimits(ServerLimits())
        slow = asyncio.create_task(limits.run_in_turn(1, parse_slowly))
        await asyncio.to_thread(began.wait)
        slow.cancel()
        await asyncio.wait([slow])
        following = asyncio.create_task(limits.run_in_turn(1, lambda: "parsed"))
        other = await limits.run_in_turn(2, lambda: "of another key")
        assert not following.done()
        release.set()
        return [other, await following]

    assert asyncio.run(parse_after_cancel()) == ["of another key", "parsed"]


# -- bodies


def test_unfinished_bodies_of_a_key_are_limited_together(two_key_server):
    """Each connection sends a body without its last byte; together they may hold 16 bodies of the largest size."""
    body = pad(1 << 20)
    authorized = {"authorization": f"Bearer {KEY}", "content_length": str(len(body))}
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(two_key_server)) for _ in range(UNFINISHED_BODIES + 1)]
        for client in clients:
            client.send(head("POST", COMPLETIONS, **authorized) + body[:-1])
        refused, _, _ = select.select([client.socket for client in clients], [], [], LONG)
        (over,) = [client for client in clients if client.socket in refused]
        response = over.read_response()
        assert (response.status, json.loads(response.body)["error"]["code"]) == (429, "too_many_requests")
        assert over.read_until_closed() == b""
        with two_key_server.client(OTHER) as other:
            assert other.post(COMPLETIONS, json=SMALL).status_code == 200
        for client in clients:
            if client is not over:
                client.send(body[-1:])
                assert client.read_response().status == 200
    with two_key_server.client(KEY) as client:
        assert client.post(COMPLETIONS, json=SMALL).status_code == 200


def test_client_receives_the_refusal_of_a_larger_body(strict_server):
    headers = {"content-type": "application/json"}
    with strict_server.client() as client:
        assert client.post(COMPLETIONS, content=pad(BODY_BYTES), headers=headers).status_code == 200
        for size in (BODY_BYTES + 1, 64 * BODY_BYTES):
            response = client.post(COMPLETIONS, content=pad(size), headers=headers)
            assert read_error(response, 413, "body_too_large") == "the body is larger than 4096 bytes"
        assert client.post(COMPLETIONS, json=SMALL).status_code == 200


def test_huge_content_length_is_refused_before_the_body(strict_server):
    for length, status in (("10000000000", 413), ("99999999999999999999", 400)):  # the second has more than 64 bits
        with RawClient(strict_server) as client:
            client.ask("POST", COMPLETIONS, content_length=length)
            assert client.read_response().status == status
            assert client.read_until_closed() == b""


@pytest.mark.parametrize(("size", "status"), [(BODY_BYTES - 1, 200), (BODY_BYTES, 413)])
def test_chunked_body_is_limited(strict_server, size, status):
    with RawClient(strict_server) as client:
        client.send(head("POST", COMPLETIONS, transfer_encoding="chunked"))
        client.send(chunk(pad(size)) + chunk(b" ") + b"0\r\n\r\n")
        assert client.read_response().status == status


AMBIGUOUS = (
    *({"content_length": value} for value in ("-1", "+20", "20, 30", "0x20", "200\r\ncontent-length: 20")),
    {"content_length": "20\r\ntransfer-encoding: chunked"},
    {"transfer_encoding": "chunked\r\ncontent-length: 20"},
    {"transfer_encoding": "chunked\r\ntransfer-encoding: chunked"},
    *({"transfer_encoding": value} for value in ("identity", "chunked, identity", "\x0bchunked")),
)


def test_ambiguous_lengths_are_refused(strict_server):
    for lengths in AMBIGUOUS:
        with RawClient(strict_server) as client:
            client.send(head("POST", COMPLETIONS, **lengths) + pad(200))
            assert client.read_response().status == 400, lengths
            assert client.read_until_closed() == b"", f"{lengths}: what follows was answered as another request"


def test_body_with_many_errors_is_checked_quickly(served):
    """pydantic would describe each of many errors; the check ends at the first of a list or map."""
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
            assert "more)" not in message, "every error was described"


# -- tokens and choices


def test_prompt_above_the_token_limit_is_refused(strict_server):
    with strict_server.client() as client:
        fits = {**SMALL, "prompt": [17] * PROMPT_TOKENS}
        assert client.post(COMPLETIONS, json=fits).status_code == 200
        for prompt in ([17] * (PROMPT_TOKENS + 1), [[17], [17] * (PROMPT_TOKENS + 1)]):
            response = client.post(COMPLETIONS, json={**SMALL, "prompt": prompt})
            message = read_error(response, 400, "context_length_exceeded")
            assert message == ("This model's maximum context length is 256 tokens, of prompts 8, and the prompt has 9")
        chat = {"messages": [{"role": "user", "content": "many words " * 20}]}
        response = client.post("/v1/chat/completions", json=chat)
        assert "of prompts 8, and" in read_error(response, 400, "context_length_exceeded")
        assert response.json()["error"]["param"] == "messages"
        response = client.post("/detokenize", json={"tokens": [17] * (PROMPT_TOKENS + 1)})
        read_error(response, 400, "context_length_exceeded")


def test_more_choices_than_the_server_ever_holds_are_refused(strict_server):
    with strict_server.client() as client:
        response = client.post(COMPLETIONS, json={**SMALL, "n": 13})
        message = read_error(response, 400, "invalid_value")
        assert message == "13 choices: this server holds 12 at a time (slots and --max_waiting)"


def test_arguments_nested_too_deeply_are_refused(served):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 9996 + "1" + "}" * 9996}}
    with served.client() as client:
        chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}
        assert client.post("/v1/chat/completions", json=chat).status_code == 400


ABOVE_LIMITS = (
    ({"n": 17}, "n"),
    ({"prompt": [[17]] * 17}, "prompt"),
    ({"prompt": [[17]] * 2, "n": 9, "stream": True}, "n"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"logprobs": 21}, "logprobs"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias"),
)


def test_values_above_their_limit_are_refused_by_name(served):
    with served.client() as client:
        for body, param in ABOVE_LIMITS:
            response = client.post(COMPLETIONS, json={**SMALL, **body})
            read_error(response, 400, "invalid_value")
            assert response.json()["error"]["param"] == param


def test_max_tokens_above_the_grid_is_refused(served):
    with served.client() as client:
        response = client.post(COMPLETIONS, json={"prompt": [17] * 10, "max_tokens": 248})
        message = read_error(response, 400, "context_length_exceeded")
        assert message == (
            "This model's maximum context length is 256 tokens; the prompt has 10, and max_tokens is 248: only 247 fit "
            "after the prompt"
        )
        response = client.post(COMPLETIONS, json={"prompt": [17] * 257})
        assert "maximum context length is 256 tokens, and the prompt has 257" in response.text


# -- queue


def test_key_at_its_limit_does_not_limit_other_keys_and_a_full_queue_refuses_all_choices(two_key_server):
    wait_until_idle(two_key_server, KEY)
    with two_key_server.client(KEY) as client, two_key_server.client(OTHER) as other:
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
            assert response.status_code == 200
            wait_until_busy(two_key_server, 4, 12, key=KEY)
            refused = two_key_server.client(KEY).post(COMPLETIONS, json=SMALL)
            message = read_error(refused, 429, "too_many_requests")
            assert message == (
                "16 choices of this API key are in progress and 1 more are requested; the limit is 16 "
                "(--max_per_key). Wait for responses first"
            )
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            for stream in (False, True):
                refused = other.post(COMPLETIONS, json={**SMALL, "n": 7, "stream": stream})
                message = read_error(refused, 503, "overloaded")
                assert message == "too many requests are waiting (--max_waiting). Try again later"
                assert refused.headers["retry-after"] == "1"
                wait_until_busy(two_key_server, 4, 12, key=KEY)  # none of the seven choices stays in the queue
            with other.stream("POST", COMPLETIONS, json={**SMALL, "stream": True}) as accepted:
                assert accepted.status_code == 200
                wait_until_busy(two_key_server, 4, 13, key=KEY)
                response.close()
                assert [*accepted.iter_lines()][-2] == "data: [DONE]"
        wait_until_idle(two_key_server, KEY)
        for each in (client, other):
            assert each.post(COMPLETIONS, json={**SMALL, "n": 16}).status_code == 200


# -- time


def test_request_above_the_time_limit_is_answered_504(strict_server):
    with strict_server.client() as client:
        message = read_error(client.post(COMPLETIONS, json={**ENDLESS, "n": 8}), 504, "timeout")
        assert message == "the request took longer than the limit of 2 s"
        wait_until_idle(strict_server)
        assert client.post(COMPLETIONS, json=SMALL).status_code == 200


def test_stream_above_the_time_limit_ends_with_an_error(strict_server):
    body = {**ENDLESS, "n": 8, "stream": True}
    with strict_server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200
        *texts, error, done = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert texts and done == "[DONE]"
    message = "the request took longer than the limit of 2 s"
    assert json.loads(error)["error"] == {"message": message, "type": "server_error", "param": None, "code": "timeout"}
    wait_until_idle(strict_server)


def test_time_spent_parsing_counts():
    """No engine is asked: the texts take too long."""
    with pytest.raises(TimeoutError):
        asyncio.run(start_generation(None, nullcontext(), partial(asyncio.sleep, LONG), time.monotonic() + 0.05))
