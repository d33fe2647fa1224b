"""Worker with the plain `jax.jit` decoding loop that the engine is compared with: one blocking wait per round.

    draft → verify → kv_write → jax.device_get(result) → the next round

The loop has the engine's programs, weights and grid, and everything is compiled before the clock starts. The next round
is enqueued after the outcome of the last one was read; a prompt is prefilled as a whole while no round runs; the batch
has one row per caller, with one K and one length. There is no queue, thread, cancelling, stop token or text.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import jax
import numpy as np

from dflash_aot.benchmarks.messages import (
    Handlers,
    JitSpec,
    PromptIds,
    ServeClosed,
    ServedClosed,
    ServingWork,
    TimedAnswer,
    run_worker,
)
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.devices import make_mesh, select_jax_platforms
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.programs.lowering import jit_program
from dflash_aot.compile.programs.programs import Programs
from dflash_aot.runtime.executables.executable import CompileGuard, DeviceState, Executable
from dflash_aot.runtime.executables.loaded_bundle import bundle_devices, warm_up_executable
from dflash_aot.runtime.weights.checkpoint_pair import locate_checkpoint_pair
from dflash_aot.runtime.weights.weight_loader import load_weights


class JittedPrograms:
    """Every program of a grid as a jitted function, on one copy of the weights.

    A program is compiled when it is looked up, or at its first call if `lazy`.
    """

    def __init__(
        self,
        manifest: Manifest,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        lazy: bool = False,
        on_phase_end: Callable[[str], None] = lambda phase: None,
    ):
        self.lazy = lazy
        devices = bundle_devices(manifest)
        self._programs = Programs(
            manifest.target.facts,
            manifest.draft.facts,
            manifest.dtype,
            sampling=manifest.sampling,
            formats=manifest.formats,
        )
        self.samples = self._programs.pair.samples
        self._arrays = manifest.arrays_by_name()
        self._mesh = make_mesh(devices)
        self._signatures: dict[tuple[str, tuple[int, ...]], Signature] = {
            (one.program, tuple(one.bucket.values())): one
            for one in self._programs.list_signatures(manifest.grid)
        }
        on_phase_end("programs")
        self._weights = load_weights(
            manifest.weights, locate_checkpoint_pair(manifest, target, draft), devices
        )
        self.grid = manifest.grid
        self.state = DeviceState(manifest.state, devices)
        on_phase_end("weights")
        self._found: dict[tuple[str, tuple[int, ...]], Executable] = {}

    @property
    def found(self) -> int:
        """How many executables were looked up."""
        return len(self._found)

    def find(self, program: str, *sizes: int) -> Executable:
        """Raises KeyError where the grid has no such executable."""
        if (name := (program, sizes)) not in self._found:
            signature = self._signatures[name]
            jitted = jit_program(
                signature, self._programs.function(signature), self._arrays, self._mesh
            )
            # Called the same way.
            executable = Executable(signature, cast(jax.stages.Compiled, jitted))
            executable.bind(self._weights)
            if not self.lazy:
                warm_up_executable(executable, self.state)
            self._found[name] = executable
        return self._found[name]

    def compile_all(self) -> None:
        """Compiles every program of the grid and calls it once."""
        for program, sizes in self._signatures:
            executable = self.find(program, *sizes)
            if self.lazy:
                warm_up_executable(executable, self.state)
            self.state.wait()


@dataclass
class JitRow:
    """One caller: its prompts and answers, and the request in its slot."""

    prompts: list[PromptIds]
    answers: list[TimedAnswer] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    sent: float = 0.0
    active: bool = False

    def commit(self, tokens: Sequence[int]) -> None:
        """The caller has the tokens now."""
        self.token_ids += tokens
        self.arrivals += [time.perf_counter() - self.sent] * len(tokens)

    def end(self, tokens: int) -> None:
        """The answer is complete, and the next prompt is sent."""
        self.answers.append(
            TimedAnswer(self.token_ids[:tokens], self.arrivals[:tokens], self.accepted)
        )
        self.sent += self.arrivals[-1]
        self.token_ids = []
        self.arrivals = []
        self.accepted = []
        self.active = False


class JitLoop:
    """Serves one list of prompts per row, each prompt with `tokens` new tokens and at most `longest` of its own."""

    def __init__(
        self,
        programs: JittedPrograms,
        rows: int,
        k: int,
        longest: int,
        tokens: int,
        after_prefill: Callable[[], None] = lambda: None,
    ):
        """Compiles what the loop needs, unless the programs are lazy. Raises GridMiss, BadInput."""
        if programs.grid.pool_pages < rows * programs.grid.row_pages:
            raise BadInput(
                f"the jitted loop needs kv_positions={rows * programs.grid.capacity}: its rows share no pages"
            )
        self._bucket = programs.grid.fit(rows, longest + tokens + k, k)
        assert (self._bucket.batch, self._bucket.k) == (rows, k), "the loop pads nothing"
        self._programs = programs
        self._state = programs.state
        self._tokens = tokens
        self._after_prefill = after_prefill
        self._pages = self._place_tables(range(rows))
        # Drafts of programs that can sample take two flags: whether any row is drawn, or penalised.
        self._greedy = [self._state.to_device(np.array([False]))] * 2 if programs.samples else []
        self._rounds = self._row_rounds = 0
        if not programs.lazy:
            self._find_round()
            for chunk in programs.grid.chunks():
                self._find_prefill(chunk.prefill, chunk.length)

    def serve(self, lists: Sequence[Sequence[PromptIds]]) -> ServedClosed:
        """Serves all lists. Unless the programs are lazy, tracing raises."""
        rows = [JitRow(list(prompts)) for prompts in lists]
        guard = CompileGuard()
        self._rounds = self._row_rounds = 0
        with nullcontext() if self._programs.lazy else guard.forbid_tracing():
            began = time.perf_counter()
            worked = time.thread_time()
            for row in rows:
                row.sent = began
            while self._refill(rows):
                self._run_round(rows)
            seconds = time.perf_counter() - began
            worked = time.thread_time() - worked
            self._state.wait()  # for the last kv_write, which would run into the next measurement
        work = ServingWork(
            rounds=self._rounds,
            rows=self._rounds * self._bucket.batch,
            row_rounds=self._row_rounds,
            host_seconds=worked,
            compile_events=guard.events,
        )
        return ServedClosed([row.answers for row in rows], seconds, work)

    def _refill(self, rows: Sequence[JitRow]) -> bool:
        """Free rows take the next prompts of their callers. Returns False if no row is active."""
        for slot, row in enumerate(rows):
            while not row.active and len(row.answers) < len(row.prompts):
                self._prefill(slot, row)
        return any(row.active for row in rows)

    def _prefill(self, slot: int, row: JitRow) -> None:
        prompt = row.prompts[len(row.answers)]
        start = 0
        pages = self._place_tables([slot])
        place = self._state.to_device
        grid = self._programs.grid
        while start < len(prompt):
            chunk = grid.fit_chunk(start, len(prompt) - start)
            part = prompt[start : start + chunk.prefill]
            tokens = np.zeros((1, chunk.prefill), np.int32)
            tokens[0, : len(part)] = part
            slots, starts, counts = (
                place(np.array([number], np.int32)) for number in (slot, start, len(part))
            )
            prefill, write = self._find_prefill(chunk.prefill, chunk.length)
            gives_first = place(np.array([start + len(part) == len(prompt)]))
            features, first = prefill(
                self._state, pages, place(tokens), slots, starts, counts, gives_first
            )
            if write:
                write(self._state, pages, features, starts)
            start += len(part)
        row.commit([int(jax.device_get(first)[0])])
        row.active = True
        self._end_if_done(row)
        self._after_prefill()

    def _place_tables(self, slots: Iterable[int]) -> jax.Array:
        """Page tables of slots that own their pages."""
        return self._state.to_device(np.array(self._programs.grid.separate_tables(slots), np.int32))

    def _find_prefill(self, width: int, length: int) -> tuple[Executable, Executable | None]:
        find = self._programs.find
        return find("prefill", width, length), find(
            "kv_write", 1, width
        ) if self._bucket.k else None

    def _find_round(self) -> tuple[Executable | None, Executable, Executable | None]:
        find = self._programs.find
        rows, length, k = (self._bucket.batch, self._bucket.length, self._bucket.k)
        draft, write = (
            (find("draft", rows, length, k), find("kv_write", rows, k + 1)) if k else (None, None)
        )
        return draft, find("verify", rows, length, k), write

    def _run_round(self, rows: Sequence[JitRow]) -> None:
        state = self._state
        k = self._bucket.k
        draft, verify, write = self._find_round()
        active = state.to_device(np.array([row.active for row in rows]))
        block = draft(state, self._pages, *self._greedy) if draft else ()
        features, starts, outcome = verify(state, self._pages, *block, active)
        if write:
            write(state, self._pages, features, starts)
        self._rounds += 1
        for row, (accepted, *tokens) in zip(rows, jax.device_get(outcome).tolist(), strict=True):
            if row.active:
                self._row_rounds += 1
                row.accepted.append(accepted)
                row.commit(tokens[k : k + accepted + 1])
                self._end_if_done(row)

    def _end_if_done(self, row: JitRow) -> None:
        if len(row.token_ids) >= self._tokens:
            row.end(self._tokens)


@contextmanager
def open_loop(spec: JitSpec) -> Iterator[Handlers]:
    """Compiles what a question needs when the first question of its kind comes. Raises what reading a pair raises."""
    manifest = read_manifest(Path(spec.bundle))
    select_jax_platforms(manifest.environment.platform)
    programs = JittedPrograms(manifest, spec.target, spec.draft)

    @functools.cache
    def find_loop(rows: int, tokens: int) -> JitLoop:
        return JitLoop(programs, rows, spec.k, spec.longest, tokens)

    def serve(question: ServeClosed) -> ServedClosed:
        return find_loop(len(question.lists), question.max_tokens).serve(question.lists)

    yield {ServeClosed: serve}


if __name__ == "__main__":
    run_worker(JitSpec, open_loop)
