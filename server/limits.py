"""How much callers may take: of memory, of time, of each other's turns."""

from dataclasses import dataclass

MAX_CHOICES = 16  # of one request: prompts times n
MAX_STOPS = 16


@dataclass(frozen=True)
class Limits:
    """Times are in seconds.

    body_bytes: of one request. per_caller: choices that one API key, or all callers without one, may have under way or
    in line. request_seconds: from arrival to the last token. drain_seconds: for what is under way when the server is
    told to end. head_seconds, body_seconds, write_seconds: for a client to send the head of a request, to send its
    body, and to take what it asked for once the buffers between are full. connections: open ones.
    """

    body_bytes: int = 1 << 20
    per_caller: int = 64
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    head_seconds: float = 10.0
    body_seconds: float = 20.0
    write_seconds: float = 30.0
    connections: int = 512  # with the backlog, well below the 1,024 files that a process may open where nobody set more
