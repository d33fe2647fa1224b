"""What is asked of a loop that is watched, and what is seen."""

import msgspec

from dflash_aot.benchmarks.orders import EngineOrder, JitOrder
from dflash_aot.benchmarks.traffic import Serve, Served


class WatchedOrder(msgspec.Struct, frozen=True):
    """One of both: the engine, or the plain loop."""

    engine: EngineOrder | None = None
    jit: JitOrder | None = None


class Watch(msgspec.Struct, frozen=True, tag=True):
    """As Serve, under a trace, with one prompt per caller. Answered by Watched."""

    lists: list[list[list[int]]]
    max_tokens: int

    def serve(self) -> Serve:
        return Serve(self.lists, self.max_tokens)


class Counts(msgspec.Struct, frozen=True):
    """What one thread asked of JAX.

    calls: of executables, by program, and the seconds in them. to_device, to_host: arrays whose copy was asked for.
    reads: arrays whose value was asked for; waits: how often that blocked, since it was not there yet, and for how long
    together. unseen: waits in none of the functions that are watched. seconds: from the first to the last of all that.
    """

    calls: dict[str, int]
    call_seconds: float
    to_device: int
    to_host: int
    reads: int
    waits: int
    wait_seconds: float
    unseen: int
    seconds: float


class Watched(msgspec.Struct, frozen=True):
    """counts: of so many `rounds`, behind all prefills."""

    served: Served
    rounds: int
    counts: Counts


class FloorOrder(msgspec.Struct, frozen=True):
    """The platform as JAX calls it."""

    platform: str


class Floor(msgspec.Struct, frozen=True, tag=True):
    """The least that a host can do: call an executable of so many arguments; `width` sets how long the device works.

    Answered by seconds, one by one: work of the calling thread.
    """

    arguments: int
    width: int
    calls: int
