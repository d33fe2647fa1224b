"""One timed start of a contender in a process of its own, from nothing to the answer of a request.

Next to nothing is imported before the first phase ends.
"""

import sys
from pathlib import Path
from time import monotonic_ns as read_clock  # nanoseconds, the same for all processes of a machine
from typing import Literal

import msgspec

from dflash_aot.cache.errors import DflashError
from dflash_aot.cache.json_process import JsonPipe

# The engine on a bundle; the plain loop with JAX's persistent cache of compiled programs; without.
BUNDLE = "bundle"
CACHED = "jax.jit, cache warm"
COLD = "jax.jit, cold"
# What is ready at the first token: the whole grid, or what this request needs.
Scope = Literal["grid", "request"]


class StartSpec(msgspec.Struct, frozen=True):
    """What to start, and the request: a greedy answer of `tokens` tokens."""

    bundle: str
    way: str  # BUNDLE, CACHED or COLD
    scope: Scope
    prompt_ids: list[int]
    tokens: int
    cache: str = ""  # JAX's directory of compiled programs, "" for none
    started: int = 0  # `read_clock` just before the process was started


class TimedStart(msgspec.Struct, frozen=True):
    """Seconds since the process was started, and the answer. Fields of samples."""

    phases: dict[str, float]  # until the first token; they add up to `seconds`
    seconds: float  # until the first token
    last_seconds: float  # until the last token
    token_ids: list[int]
    ready: int  # executables that were called or loaded


class PhaseTimer:
    """Seconds by phase; each phase starts where the last one ended."""

    def __init__(self, started: int):
        """started: `read_clock` in the parent, just before it started this process."""
        self.seconds: dict[str, float] = {}
        self._started = started

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return (read_clock() - self._started) / 1e9

    def end(self, phase: str) -> None:
        """Ends a phase."""
        self.seconds[phase] = self.total - sum(self.seconds.values())


def main() -> None:
    """Reads a StartSpec and writes a TimedStart. A DflashError ends the process with its message."""
    pipe = JsonPipe()
    spec = pipe.receive(StartSpec)
    if spec is None:
        return
    timer = PhaseTimer(spec.started)
    timer.end("process")
    try:
        pipe.send(start_bundle(spec, timer) if spec.way == BUNDLE else start_jit(spec, timer))
    except DflashError as error:
        sys.exit(str(error))


def start_bundle(spec: StartSpec, timer: PhaseTimer) -> TimedStart:
    """Starts the engine. Raises what `Engine.open` raises."""
    # Imports are a phase of the start.
    from dflash_aot.cache.bundle.manifest import read_manifest  # noqa: PLC0415
    from dflash_aot.cache.devices import select_jax_platforms  # noqa: PLC0415
    from dflash_aot.runtime import Engine, SamplingParams  # noqa: PLC0415

    timer.end("imports")
    select_jax_platforms(read_manifest(Path(spec.bundle)).environment.platform)
    with Engine.open(spec.bundle, preload=spec.scope == "grid") as engine:
        timer.seconds |= engine.startup
        timer.end("rest of opening")
        params = SamplingParams(max_tokens=spec.tokens, stop_token_ids=())
        deltas = iter(engine.stream(spec.prompt_ids, params))
        tokens = [*next(deltas).token_ids]
        timer.end("first token")
        first = timer.total
        tokens += [token for delta in deltas for token in delta.token_ids]
        return TimedStart(timer.seconds, first, timer.total, tokens, engine.stats().loaded)


def start_jit(spec: StartSpec, timer: PhaseTimer) -> TimedStart:
    """Starts the plain loop without a bundle's executables: programs are traced and compiled when they are called."""
    import jax  # noqa: PLC0415

    from dflash_aot.benchmarks.jit_loop import JitLoop, JittedPrograms  # noqa: PLC0415
    from dflash_aot.cache.bundle.manifest import read_manifest  # noqa: PLC0415
    from dflash_aot.cache.devices import select_jax_platforms  # noqa: PLC0415

    timer.end("imports")
    # Whatever the environment says.
    jax.config.update("jax_enable_compilation_cache", bool(spec.cache))
    if spec.cache:
        jax.config.update("jax_compilation_cache_dir", spec.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    manifest = read_manifest(Path(spec.bundle))
    select_jax_platforms(manifest.environment.platform)
    programs = JittedPrograms(manifest, lazy=True, on_phase_end=timer.end)
    if spec.scope == "grid":
        programs.compile_all()
    loop = JitLoop(programs, 1, manifest.grid.k[-1], len(spec.prompt_ids), spec.tokens)
    timer.end("executables")
    ready = timer.total
    (answer,) = loop.serve([spec.prompt_ids]).answers
    first, *_, last = answer.arrivals
    phases = timer.seconds | {"first token": first}
    return TimedStart(phases, ready + first, ready + last, answer.token_ids, len(programs.found))


if __name__ == "__main__":
    main()
