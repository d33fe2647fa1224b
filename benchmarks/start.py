"""One start of a way to serve, in a process of its own, from nothing to a request's answer.

    python -m dflash_aot.benchmarks.start ORDER     (JSON; prints a Start)

It imports next to nothing before the clock's first lap.
"""

import sys
from typing import Literal

import msgspec

from dflash_aot.benchmarks.laps import Laps
from dflash_aot.cache.errors import DflashError

# What is ready at the first token: all that the grid serves, or what this request needs.
Scope = Literal["grid", "request"]


class Order(msgspec.Struct, frozen=True):
    """What to start, and the one request to answer: greedy, `tokens` new ones behind `prompt_ids`.

    started: `read_clock` just before the process. cache: JAX's directory of compiled programs; "" for none.
    """

    way: Literal["bundle", "jit"]
    scope: Scope
    bundle: str
    target: str
    draft: str
    prompt_ids: list[int]
    tokens: int
    cache: str = ""
    started: int = 0


class Start(msgspec.Struct, frozen=True):
    """Seconds from the start of the process: `first` to the first token, which `phases` make up; `last` to the last.

    executables: how many were ready then.
    """

    phases: dict[str, float]
    first: float
    last: float
    token_ids: list[int]
    executables: int


def main() -> None:
    """An error of ours ends it with its message."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    laps = Laps(order.started)
    laps.end("process")
    try:
        print(msgspec.json.encode(_start(order, laps)).decode())
    except DflashError as error:
        sys.exit(str(error))


def _start(order: Order, laps: Laps) -> Start:
    """What a way has to import is a phase of it."""
    if order.way == "bundle":
        from dflash_aot.benchmarks.bundle_start import start_bundle  # noqa: PLC0415

        laps.end("imports")
        return start_bundle(order, laps)
    from dflash_aot.benchmarks.jit_start import start_jit  # noqa: PLC0415

    laps.end("imports")
    return start_jit(order, laps)


if __name__ == "__main__":
    main()
