"""The body of a request: all of it before anything else, so that who sends slowly holds nothing but a connection."""

import asyncio
from collections.abc import AsyncIterator

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from dflash_aot.server.api_errors import Problem
from dflash_aot.server.limits import Limits

HEARD = 8  # times what a body may have: so much is listened to, for who is still sending does not hear a refusal


async def read_body(headers: Headers, receive: Receive, limits: Limits) -> bytes:
    """Raises Problem where it is too large, too slow, or ends early."""
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > HEARD * limits.body_bytes:
        raise _too_large(limits)
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in _receive_parts(receive):
                size += len(part)
                body += part if size <= limits.body_bytes else b""
                if size > HEARD * limits.body_bytes:
                    break
    except TimeoutError as error:
        raise Problem(408, f"the body did not come within {limits.body_seconds:g} s", "body_timeout") from error
    if size > limits.body_bytes:
        raise _too_large(limits)
    return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first."""
    given = False

    async def receive_next() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_next


async def _receive_parts(receive: Receive) -> AsyncIterator[bytes]:
    """Raises Problem where the client leaves before the end."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem(400, "the body ended early", "incomplete_body")
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _too_large(limits: Limits) -> Problem:
    return Problem(413, f"the body is larger than {limits.body_bytes} bytes", "body_too_large")
