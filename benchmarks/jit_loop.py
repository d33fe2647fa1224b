"""The loop that one writes first: one program after the other, and one blocking wait per round.

    draft → verify → kv_write → jax.device_get(verdict) → the next round

What it has in common with the engine: programs, weights, shapes of the grid, and that all is compiled before the clock
starts. What it lacks: the next round is enqueued when the last one's verdict has been read; a prompt is prefilled
whole, all chunks and its first token waited for, while no round runs; the batch is as many rows as there are callers,
from the first to the last; K and the length that rounds attend to are the same from the first to the last. What it is
spared: no queue, no threads, no cancelling, no stop tokens, no text; a caller's next prompt is there at once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import jax
import numpy as np

from dflash_aot.benchmarks.traffic import Answer, Prompt, Served, Work
from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.devices import make_mesh
from dflash_aot.cache.grid import Chunk, Grid
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.programs.lowering import jit_program
from dflash_aot.compile.programs.programs import Programs
from dflash_aot.runtime.executables.compile_guard import CompileGuard
from dflash_aot.runtime.executables.executable import DeviceState, Executable
from dflash_aot.runtime.executables.loaded_bundle import bundle_devices, warm_up_executable
from dflash_aot.runtime.weights.checkpoint_pair import locate_checkpoint_pair
from dflash_aot.runtime.weights.weight_loader import load_weights

Name = tuple[str, tuple[int, ...]]
# Told of each step: a round's programs and their results, when enqueued; "read" and "prefill" when tokens are here.
After = Callable[[str, Sequence[jax.Array]], None]


class Source(Protocol):
    """Programs that are ready to be called, and the state that they work on."""

    @property
    def grid(self) -> Grid: ...

    @property
    def state(self) -> DeviceState: ...

    def find(self, program: str, *sizes: int) -> Executable:
        """One program at one bucket. Raises KeyError where there is none."""


class Jitted:
    """Every program of a grid as a jitted function, on one copy of the weights. Compiled at its first use."""

    def __init__(self, manifest: Manifest, target: str | Path | None = None, draft: str | Path | None = None):
        self._manifest, self._devices = manifest, bundle_devices(manifest)
        self.grid, self.state = manifest.grid, DeviceState(manifest.state, self._devices)
        self._programs = Programs(
            manifest.target.facts, manifest.draft.facts, manifest.dtype, sampling=manifest.sampling
        )
        self._weights = load_weights(manifest.weights, locate_checkpoint_pair(manifest, target, draft), self._devices)
        self._signatures = {_name(one): one for one in self._programs.list_signatures(manifest.grid)}
        self._ready: dict[Name, Executable] = {}

    def find(self, program: str, *sizes: int) -> Executable:
        """Called once."""
        if (name := (program, sizes)) not in self._ready:
            signature = self._signatures[name]
            known = self._manifest.arrays_by_name()
            jitted = jit_program(signature, self._programs.function(signature), known, make_mesh(self._devices))
            executable = Executable(signature, cast(jax.stages.Compiled, jitted))  # called alike
            executable.bind(self._weights)
            warm_up_executable(executable, self.state)
            self._ready[name] = executable
        return self._ready[name]


def _name(signature: Signature) -> Name:
    return signature.program, tuple(signature.bucket.values())


@dataclass
class Row:
    """One caller: its list, what it has got, and the request that its slot works on."""

    prompts: list[Prompt]
    answers: list[Answer] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    sent: float = 0.0
    active: bool = False

    def take(self, tokens: Sequence[int]) -> None:
        """The caller has them now."""
        self.token_ids += tokens
        self.arrivals += [time.perf_counter() - self.sent] * len(tokens)

    def end(self, tokens: int) -> None:
        """The answer is complete; the next prompt is sent."""
        self.answers.append(Answer(self.token_ids[:tokens], self.arrivals[:tokens], self.accepted))
        self.sent += self.arrivals[-1]
        self.token_ids, self.arrivals, self.accepted, self.active = [], [], [], False


class JitLoop:
    """Serves one list of prompts per row, `tokens` new ones for each; all prompts of at most `longest` tokens."""

    def __init__(
        self, source: Source, rows: int, k: int, longest: int, tokens: int, after: After = lambda step, results: None
    ):
        """Makes what it needs ready. Raises GridMiss where the grid has no such bucket, KeyError as `Source.find`."""
        bucket = source.grid.fit(rows, longest + tokens + k, k)
        assert (bucket.batch, bucket.k) == (rows, k), "the loop pads nothing"
        self._source, self._state, self._bucket, self._tokens = source, source.state, bucket, tokens
        self._after = after
        self._draft = source.find("draft", rows, bucket.length, k) if k else None
        self._verify = source.find("verify", rows, bucket.length, k)
        self._write = source.find("kv_write", rows, k + 1) if k else None
        self._slots = self._state.to_device(np.arange(rows, dtype=np.int32))
        for chunk in source.grid.chunks():
            self._find_chunk(chunk)
        self._rounds = self._row_rounds = 0

    def serve(self, lists: Sequence[Sequence[Prompt]]) -> Served:
        """All lists to their ends. Tracing anything meanwhile raises."""
        rows, watch = [Row(list(prompts)) for prompts in lists], CompileGuard()
        self._rounds = self._row_rounds = 0
        with watch.forbid_tracing():
            began, worked = time.perf_counter(), time.thread_time()
            for row in rows:
                row.sent = began
            while self._refill(rows):
                self._run_round(rows)
            seconds, worked = time.perf_counter() - began, time.thread_time() - worked
            self._state.wait()  # the last kv_write is nobody's answer, but whoever measures next shall not meet it
        return Served([row.answers for row in rows], seconds, self._count_work(worked, watch.events))

    def _count_work(self, worked: float, compile_events: int) -> Work:
        computed = self._rounds * self._bucket.batch
        return Work(
            rounds=self._rounds,
            rounds_by_k={self._bucket.k: self._rounds},
            rows=computed,
            row_rounds=self._row_rounds,
            padded_rows=computed - self._row_rounds,
            host_seconds=worked,
            compile_events=compile_events,
        )

    def _refill(self, rows: Sequence[Row]) -> bool:
        """Free rows take their callers' next prompts. False once there is nothing left to do."""
        for slot, row in enumerate(rows):
            while not row.active and len(row.answers) < len(row.prompts):
                self._prefill(slot, row)
        return any(row.active for row in rows)

    def _prefill(self, slot: int, row: Row) -> None:
        prompt, start = row.prompts[len(row.answers)], 0
        place, grid = self._state.to_device, self._source.grid
        while start < len(prompt):
            chunk = grid.fit_chunk(start, len(prompt) - start)
            part = prompt[start : start + chunk.prefill]
            tokens = np.zeros((1, chunk.prefill), np.int32)
            tokens[0, : len(part)] = part
            slots, starts, counts = (place(np.array([number], np.int32)) for number in (slot, start, len(part)))
            prefill, write = self._find_chunk(chunk)
            features, first = prefill(self._state, place(tokens), slots, starts, counts)
            if write:
                write(self._state, features, slots, starts)
            start += len(part)
        row.take([int(jax.device_get(first)[0])])
        row.active = True
        self._end_if_done(row)
        self._after("prefill", ())

    def _find_chunk(self, chunk: Chunk) -> tuple[Executable, Executable | None]:
        find = self._source.find
        write = find("kv_write", 1, chunk.prefill) if self._bucket.k else None
        return find("prefill", chunk.prefill, chunk.length), write

    def _run_round(self, rows: Sequence[Row]) -> None:
        state, k = self._state, self._bucket.k
        active = state.to_device(np.array([row.active for row in rows]))
        block: Sequence[jax.Array] = ()
        if self._draft:
            block = self._draft(state)
            self._after("draft", block)
        features, starts, verdict = self._verify(state, *block, active)
        self._after("verify", (features, starts, verdict))
        if self._write:
            self._after("kv_write", self._write(state, features, self._slots, starts))
        self._rounds += 1
        for row, (accepted, *tokens) in zip(rows, jax.device_get(verdict).tolist(), strict=True):
            if row.active:
                self._row_rounds += 1
                row.accepted.append(accepted)
                row.take(tokens[k : k + accepted + 1])
                self._end_if_done(row)
        self._after("read", ())

    def _end_if_done(self, row: Row) -> None:
        if len(row.token_ids) >= self._tokens:
            row.end(self._tokens)
