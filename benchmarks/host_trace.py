"""What a loop's thread asked of JAX, counted from a profiler's trace of it: nothing that runs is changed or trusted.

Calls of executables and copies to the device are in every trace. Reads are not, where host and device share memory: the
functions that read (`numpy.asarray`, `jax.device_get`, `jax.block_until_ready`) leave a mark while they are watched.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from dflash_aot.benchmarks.observation import Counts
from dflash_aot.cache.errors import VoidRecord

T = TypeVar("T")
# As the C++ side of JAX 0.10 names them.
CALL, TO_DEVICE, TO_HOST, AWAIT = "PjitFunction(", "DevicePutWithSharding", "ArrayImpl.copy_to_host_async", "::Await"
READ = "dflash host read"
ROUND, SEVERAL = re.compile("verify|rounds"), "rounds"  # of what a loop calls: once in a round, or once in several
BEHIND = 2  # rounds behind the last prefill, its token has been read


@dataclass(frozen=True)
class Event:
    """Of one thread; times in nanoseconds. arrays: how many a read asks for."""

    name: str
    begin: float
    end: float
    arrays: int = 0

    @property
    def program(self) -> str:
        """Of a call: `jit(verify)` where it was compiled ahead, and `verify` where not."""
        return self.name.removeprefix(CALL).rstrip(")").removeprefix("jit(")


def trace(run: Callable[[], T]) -> tuple[T, list[list[Event]]]:
    """What it returns, and what every thread did meanwhile."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 2, 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options), watch_reads():
            returned = run()
        return returned, read_threads(Path(directory))


def read_threads(directory: Path) -> list[list[Event]]:
    """Of the one trace that was written there."""
    (path,) = directory.rglob("*.xplane.pb")
    lines = (line for plane in jax.profiler.ProfileData.from_file(str(path)).planes for line in plane.lines)
    return [[_read_event(event) for event in line.events] for line in lines]


def _read_event(event: Any) -> Event:
    facts = dict(event.stats) if event.name == READ else {}
    return Event(event.name, event.start_ns, event.end_ns, facts.get("arrays", 0))


@contextmanager
def watch_reads() -> Iterator[None]:
    """For the whole process."""
    functions: list[tuple[Any, str, Callable[..., Any]]] = [
        (np, "asarray", np.asarray),
        (jax, "device_get", jax.device_get),
        (jax, "block_until_ready", _wait_in_turn),
    ]
    kept = [getattr(module, name) for module, name, _ in functions]
    for module, name, read in functions:
        setattr(module, name, _mark(read))
    try:
        yield
    finally:
        for (module, name, _), function in zip(functions, kept, strict=True):
            setattr(module, name, function)


def _wait_in_turn(values: T) -> T:
    """As `jax.block_until_ready`, which waits for several at once, and leaves no trace of it."""
    for one in jax.tree.leaves(values):
        if isinstance(one, jax.Array):
            one.block_until_ready()
    return values


def _mark(read: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with a mark in the trace where it is given arrays of a device."""

    def marked(values: Any, *rest: Any, **named: Any) -> Any:
        arrays = sum(isinstance(one, jax.Array) for one in jax.tree.leaves(values))
        if not arrays:
            return read(values, *rest, **named)
        with jax.profiler.TraceAnnotation(READ, arrays=arrays):
            return read(values, *rest, **named)

    return marked


def find_loop(threads: Iterable[Sequence[Event]]) -> list[Event]:
    """What the thread did that called most executables."""
    return list(max(threads, key=lambda events: sum(event.name.startswith(CALL) for event in events)))


def find_rounds(events: Sequence[Event], rounds: int) -> tuple[list[Event], int]:
    """What a loop did when all prefills were behind it, and in how many rounds; `rounds`: of the whole trace.

    Until it enqueued its last round; or to its end, from its first round on, where a call may be several: how many one
    was, a trace does not tell. Raises VoidRecord where calls and rounds do not match.
    """
    calls = [call for call in drop_inner(events, CALL) if ROUND.search(call.program)]
    prefilled = max((call.end for call in drop_inner(events, CALL) if call.program == "prefill"), default=0.0)
    before, steady = ([call for call in calls if (call.begin >= prefilled) == is_steady] for is_steady in (False, True))
    several = any(call.program == SEVERAL for call in steady)
    if len(calls) > rounds or len(steady) < BEHIND + 2 or any(call.program == SEVERAL for call in before):
        raise VoidRecord(f"a trace of {rounds} rounds holds {len(calls)} calls for them, {len(steady)} to count by")
    if several:
        return [event for event in events if event.begin >= steady[0].begin], rounds - len(before)
    inside = [event for event in events if steady[BEHIND].begin <= event.begin < steady[-1].begin]
    return inside, len(steady) - BEHIND - 1


def count(events: Sequence[Event]) -> Counts:
    """Of what one thread did."""
    calls, reads = drop_inner(events, CALL), drop_inner(events, READ)
    programs = [event.program for event in calls]
    awaited = [event.begin for event in events if event.name.endswith(AWAIT)]
    waits = [read for read in reads if any(read.begin <= begin <= read.end for begin in awaited)]
    unseen = [begin for begin in awaited if not any(read.begin <= begin <= read.end for read in reads)]
    return Counts(
        calls={program: programs.count(program) for program in sorted(set(programs))},
        call_seconds=sum(event.end - event.begin for event in calls) / 1e9,
        to_device=sum(event.name == TO_DEVICE for event in events),
        to_host=sum(event.name == TO_HOST for event in events),
        reads=sum(event.arrays for event in reads),
        waits=len(waits),
        wait_seconds=sum(event.end - event.begin for event in waits) / 1e9,
        unseen=len(unseen),
        seconds=(max(event.end for event in events) - min(event.begin for event in events)) / 1e9 if events else 0.0,
    )


def drop_inner(events: Iterable[Event], kind: str) -> list[Event]:
    """Those with `kind` in their name, in order, but for what lies inside of one: JAX notes some twice."""
    outer: list[Event] = []
    for event in sorted((one for one in events if kind in one.name), key=lambda one: (one.begin, -one.end)):
        if not outer or event.begin >= outer[-1].end:
            outer.append(event)
    return outer
