"""The loop that one writes first: the same programs through plain `jax.jit`, and one blocking wait per round.

    draft → verify → kv_write → jax.device_get(verdict) → the next round

What it has in common with the engine: programs, weights, shapes of the grid, and that all is compiled before the clock
starts. What it lacks: the next round is enqueued when the last one's verdict has been read; a prompt is prefilled
whole, all chunks and its first token waited for, while no round runs; the batch is as many rows as there are callers,
from the first to the last; K and the length that rounds attend to are the same from the first to the last. What it is
spared: no queue, no threads, no cancelling, no stop tokens, no text; a caller's next prompt is there at once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from traffic import Answer, Prompt, Served

from dflash_aot.cache.grid import Chunk
from dflash_aot.cache.manifest import Manifest
from dflash_aot.cache.mesh import make_mesh
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.lowering import jit_program
from dflash_aot.compile.programs import Programs
from dflash_aot.runtime.bundle import bundle_devices, call_once
from dflash_aot.runtime.compile_watch import CompileWatch
from dflash_aot.runtime.executable import DeviceState, Executable
from dflash_aot.runtime.pair import locate_pair
from dflash_aot.runtime.weights import load_weights

Name = tuple[str, tuple[int, ...]]


class Jitted:
    """Every program of a grid as a jitted function, on one copy of the weights. Compiled at its first use."""

    def __init__(self, manifest: Manifest, target: str | None = None, draft: str | None = None):
        self.manifest, self.devices = manifest, bundle_devices(manifest)
        self.state = DeviceState(manifest.state, self.devices)
        self._programs = Programs(
            manifest.target.facts, manifest.draft.facts, manifest.dtype, sampling=manifest.sampling
        )
        self._weights = load_weights(manifest.weights, locate_pair(manifest, target, draft), self.devices)
        self._signatures = {_name(one): one for one in self._programs.signatures(manifest.grid)}
        self._ready: dict[Name, Executable] = {}

    def find(self, program: str, *sizes: int) -> Executable:
        """One program at one bucket, called once."""
        if (name := (program, sizes)) not in self._ready:
            signature = self._signatures[name]
            known = self.manifest.known_arrays()
            jitted = jit_program(signature, self._programs.function(signature), known, make_mesh(self.devices))
            executable = Executable(signature, jitted)
            executable.bind(self._weights)
            call_once(executable, self.state)
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
    sent: float = 0.0
    first: float = 0.0
    active: bool = False


class JitLoop:
    """Serves one list of prompts per row, `tokens` new ones for each; all prompts of at most `longest` tokens."""

    def __init__(self, jitted: Jitted, rows: int, k: int, longest: int, tokens: int):
        """Compiles what it needs. Raises GridMiss where the grid has no such bucket."""
        grid = jitted.manifest.grid
        bucket = grid.fit(rows, longest + tokens + k, k)
        assert (bucket.batch, bucket.k) == (rows, k), "the loop pads nothing"
        self._jitted, self._state, self._bucket, self._tokens = jitted, jitted.state, bucket, tokens
        self._draft = jitted.find("draft", rows, bucket.length, k) if k else None
        self._verify = jitted.find("verify", rows, bucket.length, k)
        self._write = jitted.find("kv_write", rows, k + 1) if k else None
        self._slots = self._state.place(np.arange(rows, dtype=np.int32))
        for chunk in grid.chunks():
            self._find_chunk(chunk)
        self._rounds = self._row_rounds = 0

    def serve(self, lists: Sequence[Sequence[Prompt]]) -> Served:
        """All lists to their ends. Tracing anything meanwhile raises."""
        rows, watch = [Row(list(prompts)) for prompts in lists], CompileWatch()
        self._rounds = self._row_rounds = 0
        with watch.forbid_tracing():
            began, worked = time.perf_counter(), time.thread_time()
            for row in rows:
                row.sent = began
            while self._refill(rows):
                self._run_round(rows)
            seconds, worked = time.perf_counter() - began, time.thread_time() - worked
            self._state.wait()  # the last kv_write is nobody's answer, but whoever measures next shall not meet it
        computed = self._rounds * self._bucket.batch
        return Served(
            answers=[row.answers for row in rows],
            seconds=seconds,
            rounds=self._rounds,
            rows=computed,
            row_rounds=self._row_rounds,
            padded_rows=computed - self._row_rounds,
            host_seconds=worked,
            compile_events=watch.events,
        )

    def _refill(self, rows: Sequence[Row]) -> bool:
        """Free rows take their callers' next prompts. False once there is nothing left to do."""
        for slot, row in enumerate(rows):
            while not row.active and len(row.answers) < len(row.prompts):
                self._prefill(slot, row)
        return any(row.active for row in rows)

    def _prefill(self, slot: int, row: Row) -> None:
        prompt, start = row.prompts[len(row.answers)], 0
        place, grid = self._state.place, self._jitted.manifest.grid
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
        row.active, row.token_ids = True, [int(jax.device_get(first)[0])]
        row.first = time.perf_counter()
        self._end_if_done(row)

    def _find_chunk(self, chunk: Chunk) -> tuple[Executable, Executable | None]:
        find = self._jitted.find
        write = find("kv_write", 1, chunk.prefill) if self._bucket.k else None
        return find("prefill", chunk.prefill, chunk.length), write

    def _run_round(self, rows: Sequence[Row]) -> None:
        state, k = self._state, self._bucket.k
        active = state.place(np.array([row.active for row in rows]))
        block = self._draft(state) if self._draft else ()
        features, starts, verdict = self._verify(state, *block, active)
        if self._write:
            self._write(state, features, self._slots, starts)
        self._rounds += 1
        for row, (accepted, *tokens) in zip(rows, jax.device_get(verdict).tolist(), strict=True):
            if row.active:
                self._row_rounds += 1
                row.token_ids += tokens[k : k + accepted + 1]
                self._end_if_done(row)

    def _end_if_done(self, row: Row) -> None:
        if len(row.token_ids) < self._tokens:
            return
        now = time.perf_counter()
        answer = Answer(tuple(row.token_ids[: self._tokens]), row.first - row.sent, now - row.sent)
        row.answers.append(answer)
        row.active, row.sent = False, now
