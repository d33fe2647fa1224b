"""What is asked of a way to serve text, and what its callers hear: prompts at times, over so many connections."""

import msgspec

from dflash_aot.benchmarks.traffic import Prompt, Work


class Come(msgspec.Struct, frozen=True, tag=True):
    """Each prompt comes at its own time, `due` seconds from the beginning, none earlier than the one before it, and
    takes a connection that is free.

    Where none is, it waits for one; no more than `connections` are asked for at once. Where all are due at 0, that is
    a closed loop of so many callers. Every answer is greedy and has `max_tokens` tokens. Answered by Came.
    """

    prompts: list[Prompt]
    due: list[float]
    connections: int
    max_tokens: int


class Heard(msgspec.Struct, frozen=True):
    """What became of one prompt: 200 and a whole text, the status of a refusal, or how it was `lost`.

    arrivals: of each part of the text, in seconds since the prompt was due. late: by how much it was sent later.
    """

    status: int
    text: str = ""
    arrivals: list[float] = []
    late: float = 0.0
    lost: str = ""


class Came(msgspec.Struct, frozen=True):
    """heard: in the order of the prompts. seconds: from the beginning to the last end.

    loop_seconds: processor time of the thread whose event loop hands answers out. client_seconds: of the process that
    asks, where it is another one. work: of the engine; its rounds, its host and its compilations.
    """

    heard: list[Heard]
    seconds: float
    loop_seconds: float
    client_seconds: float | None
    work: Work


class ClientOrder(msgspec.Struct, frozen=True):
    """Which server to ask, and the process that it is."""

    url: str
    process: int
