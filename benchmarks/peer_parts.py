"""A bundle's programs one by one, each waited for, as a peer: python -m dflash_aot.benchmarks.peer_parts"""

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax

from dflash_aot.benchmarks.jit_loop import JitLoop
from dflash_aot.benchmarks.orders import PartsOrder
from dflash_aot.benchmarks.peer import Handlers, run_peer
from dflash_aot.benchmarks.traffic import Dissect, Parts
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.grid import Grid
from dflash_aot.runtime.engine_parts import load_engine_parts
from dflash_aot.runtime.executables.executable import DeviceState, Executable
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle


class Loaded:
    """A bundle's programs, as a plain loop calls them."""

    def __init__(self, bundle: LoadedBundle, state: DeviceState):
        self._bundle, self.state = bundle, state

    @property
    def grid(self) -> Grid:
        return self._bundle.manifest.grid

    def find(self, program: str, *sizes: int) -> Executable:
        """Raises KeyError where there is none."""
        return self._bundle.executables[program, sizes]


class StepTimes:
    """Seconds of each step, by its name. The first one begins now."""

    def __init__(self, state: DeviceState):
        self._state = state
        self.seconds: dict[str, list[float]] = {}
        self._last = time.perf_counter()

    def note(self, step: str, results: Sequence[jax.Array]) -> None:
        """It ends when the device has done it: its results are there, and what it left of the state."""
        jax.block_until_ready(results)
        self._state.wait()
        now = time.perf_counter()
        self.seconds.setdefault(step, []).append(now - self._last)
        self._last = now


def dissect(source: Loaded, question: Dissect) -> Parts:
    """One prompt at one K."""
    times = StepTimes(source.state)
    try:
        loop = JitLoop(source, 1, question.k, len(question.prompt_ids), question.max_tokens, times.note)
    except KeyError:
        return Parts(None, {})
    ((answer,),) = loop.serve([[question.prompt_ids]]).answers
    return Parts(answer, times.seconds)


@contextmanager
def open_way(order: PartsOrder) -> Iterator[Handlers]:
    """Raises as `Engine.open` does."""
    select_jax_platforms(read_manifest(Path(order.bundle)).environment.platform)
    opened = load_engine_parts(Path(order.bundle), order.target, order.draft, "auto", preload=True)
    yield {Dissect: functools.partial(dissect, Loaded(opened.bundle, opened.state))}


if __name__ == "__main__":
    run_peer(PartsOrder, open_way)
