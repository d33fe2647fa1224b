"""Worker that calls programs itself: in the plain `jax.jit` loop that the engine is compared with, and single passes.

    draft → verify → kv_write → jax.device_get(result) → the next round

The loop has the engine's programs, weights and grid, and everything is compiled before the clock starts. It blocks once
per round, and prefills a prompt as a whole while no round runs. The batch has one row per caller, with one K and one
length. There is no queue, thread, cancelling, stop token or text. Single passes call a bundle's executables.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from dflash_aot.benchmarks import messages
from dflash_aot.benchmarks.messages import Handlers, PromptIds, TimedAnswer, run_worker
from dflash_aot.benchmarks.record import READ_BYTES, SQUARE, measure_peaks
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.devices import make_mesh, select_jax_platforms
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.signature import DRAFT, KV_WRITE, PREFILL, VERIFY, ExecutableId, Signature
from dflash_aot.compile.programs.lowering import jit_program
from dflash_aot.compile.programs.programs import Programs
from dflash_aot.runtime.executables.executable import CompileGuard, DeviceState, Executable
from dflash_aot.runtime.executables.loaded_bundle import (
    LoadedBundle,
    bundle_devices,
    warm_up_executable,
)
from dflash_aot.runtime.weights.checkpoint_pair import locate_checkpoint_pair
from dflash_aot.runtime.weights.weight_loader import load_weights


class JittedPrograms:
    """Every program of a grid as a jitted function, compiled when it is looked up, or at its first call if `lazy`."""

    def __init__(
        self,
        manifest: Manifest,
        lazy: bool = False,
        on_phase_end: Callable[[str], None] = lambda phase: None,
    ):
        self.lazy = lazy
        devices = bundle_devices(manifest)
        facts = manifest.target.facts, manifest.draft.facts, manifest.dtype
        self._programs = Programs(*facts, sampling=manifest.sampling, formats=manifest.formats)
        self.samples = self._programs.pair.samples
        self._arrays = manifest.arrays_by_name()
        self._mesh = make_mesh(devices)
        self._signatures: dict[ExecutableId, Signature] = {
            one.executable_id: one for one in self._programs.list_signatures(manifest.grid)
        }
        on_phase_end("programs")
        directories = locate_checkpoint_pair(manifest, None, None)
        self._weights = load_weights(manifest.weights, directories, devices)
        self.grid = manifest.grid
        self.state = DeviceState(manifest.state, devices)
        on_phase_end("weights")
        self.found: dict[ExecutableId, Executable] = {}

    def find(self, name: ExecutableId) -> Executable:
        """Raises KeyError where the grid has no such executable."""
        if name not in self.found:
            signature = self._signatures[name]
            function = self._programs.function(signature)
            jitted = jit_program(signature, function, self._arrays, self._mesh)
            # Called the same way.
            executable = Executable(signature, cast(jax.stages.Compiled, jitted))
            executable.bind(self._weights)
            if not self.lazy:
                warm_up_executable(executable, self.state)
            self.found[name] = executable
        return self.found[name]

    def compile_all(self) -> None:
        """Compiles every program of the grid and calls it once."""
        for name in self._signatures:
            warm_up_executable(self.find(name), self.state)
            self.state.wait()


def place_tables(grid: Grid, state: DeviceState, slots: Iterable[int]) -> jax.Array:
    """Page tables of slots that own their pages."""
    return state.to_device(np.array(grid.separate_tables(slots), np.int32))


def place_rows(
    state: DeviceState, rows: Sequence[int], width: int, slot: int, start: int, last: bool
) -> dict[str, jax.Array]:
    """Arguments of a prefill but the page table: the tokens in `width` rows, slot, start, count, and `last`."""
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(rows)] = rows
    numbers = {"slots": slot, "starts": start, "counts": len(rows)}
    placed = {name: np.array([number], np.int32) for name, number in numbers.items()}
    placed |= {"tokens": tokens, "gives_first": np.array([last])}
    return {name: state.to_device(array) for name, array in placed.items()}


@dataclass
class JitRow:
    """One caller and its slot."""

    sent: float  # of `perf_counter`; a caller sends the next prompt when it has the last answer
    answer: TimedAnswer | None = None  # None while no request runs

    def commit(self, tokens: Sequence[int], limit: int) -> None:
        """The caller has the tokens now. Tokens beyond the limit are dropped."""
        assert self.answer
        token_ids = self.answer.token_ids
        token_ids += tokens[: limit - len(token_ids)]
        arrivals = self.answer.arrivals
        arrivals += [time.perf_counter() - self.sent] * (len(token_ids) - len(arrivals))
        if len(token_ids) == limit:
            self.sent += arrivals[-1]
            self.answer = None


class JitLoop:
    """Serves prompts, each with `tokens` new tokens and at most `longest` of its own. Every row is a caller."""

    def __init__(self, programs: JittedPrograms, rows: int, k: int, longest: int, tokens: int):
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
        self._pages = place_tables(programs.grid, programs.state, range(rows))
        # Drafts of programs that can sample take two flags: whether any row is drawn, or penalised.
        flags = ("sampled", "penalised") if programs.samples else ()
        self._greedy = dict.fromkeys(flags, self._state.to_device(np.array([False])))
        self._rounds = self._row_rounds = 0
        if not programs.lazy:
            self._find_round()
            for chunk in programs.grid.chunks():
                self._find_prefill(chunk.prefill, chunk.length)

    def serve(self, prompts: Sequence[PromptIds]) -> messages.Served:
        """Serves all prompts. Unless the programs are lazy, tracing raises."""
        answers = [TimedAnswer([], []) for _ in prompts]
        waiting = deque(zip(prompts, answers, strict=True))
        guard = CompileGuard()
        self._rounds = self._row_rounds = 0
        with nullcontext() if self._programs.lazy else guard.forbid_tracing():
            began = time.perf_counter()
            worked = time.thread_time()
            rows = [JitRow(began) for _ in range(self._bucket.batch)]
            while self._refill(rows, waiting):
                self._run_round(rows)
            seconds = time.perf_counter() - began
            worked = time.thread_time() - worked
            self._state.wait()  # for the last kv_write, which would run into the next measurement
        work = messages.ServingWork(
            rounds=self._rounds,
            rows=self._rounds * self._bucket.batch,
            row_rounds=self._row_rounds,
            host_us=round(1e6 * worked),
            compile_events=guard.events,
        )
        return messages.Served(answers, seconds, work)

    def _refill(
        self, rows: Sequence[JitRow], waiting: deque[tuple[PromptIds, TimedAnswer]]
    ) -> bool:
        """Free rows take the next prompts. Returns False if no row is active."""
        for slot, row in enumerate(rows):
            while waiting and not row.answer:
                prompt, row.answer = waiting.popleft()
                row.commit([self._prefill(slot, prompt)], self._tokens)
        return any(row.answer for row in rows)

    def _prefill(self, slot: int, prompt: PromptIds) -> int:
        """The first token of the answer."""
        grid = self._programs.grid
        pages = place_tables(grid, self._state, [slot])
        widest = grid.prefill[-1]
        for start in range(0, len(prompt), widest):
            rows = prompt[start : start + widest]
            chunk = grid.fit_chunk(start, len(rows))
            last = start + len(rows) == len(prompt)
            given = place_rows(self._state, rows, chunk.prefill, slot, start, last)
            prefill, write = self._find_prefill(chunk.prefill, chunk.length)
            found = prefill(self._state, pages=pages, **given)
            if write:
                starts = given["starts"]
                write(self._state, pages=pages, features=found["features"], starts=starts)
        return int(jax.device_get(found["first"])[0])

    def _find_prefill(self, width: int, length: int) -> tuple[Executable, Executable | None]:
        find = self._programs.find
        write = find((KV_WRITE.name(), (1, width))) if self._bucket.k else None
        return find((PREFILL.name(), (width, length))), write

    def _find_round(self) -> tuple[Executable | None, Executable, Executable | None]:
        find = self._programs.find
        bucket = self._bucket
        verify = find((VERIFY.name("greedy"), bucket.sizes))
        if not bucket.k:
            return None, verify, None
        write = find((KV_WRITE.name(), (bucket.batch, bucket.k + 1)))
        return find((DRAFT.name(), bucket.sizes)), verify, write

    def _run_round(self, rows: Sequence[JitRow]) -> None:
        state = self._state
        k = self._bucket.k
        draft, verify, write = self._find_round()
        active = state.to_device(np.array([row.answer is not None for row in rows]))
        block = draft(state, pages=self._pages, **self._greedy) if draft else {}
        found = verify(state, pages=self._pages, active=active, **block)
        if write:
            written = {name: found[name] for name in ("features", "starts")}
            write(state, pages=self._pages, **written)
        self._rounds += 1
        verdict = jax.device_get(found["verdict"]).tolist()
        for row, (accepted, *tokens) in zip(rows, verdict, strict=True):
            if row.answer:
                self._row_rounds += 1
                row.answer.accepted.append(accepted)
                row.commit(tokens[k : k + accepted + 1], self._tokens)


@contextmanager
def open_loop(spec: messages.JitSpec) -> Iterator[Handlers]:
    """Compiles what a question needs when the first question of its kind comes. Raises what reading a pair raises."""
    manifest = read_manifest(Path(spec.bundle))
    select_jax_platforms(manifest.environment.platform)
    programs = JittedPrograms(manifest)

    @functools.cache
    def find_loop(rows: int, tokens: int) -> JitLoop:
        return JitLoop(programs, rows, spec.k, spec.longest, tokens)

    def serve(question: messages.Serve) -> messages.Served:
        return find_loop(question.callers, question.max_tokens).serve(question.prompts)

    yield {messages.Serve: serve}


class BundlePasses:
    """A bundle whose first slot holds the kv of a text. Every pass writes the same kv again."""

    def __init__(self, bundle: LoadedBundle, state: DeviceState, text: Sequence[int]):
        self._bundle = bundle
        self._state = state
        self._text = text
        self._grid = bundle.manifest.grid
        self._pages = place_tables(self._grid, state, [0])
        widest = self._grid.prefill[-1]
        for start in range(0, len(text), widest):
            self._prefill(start, text[start : start + widest])()
        state.wait()

    def run(self, question: messages.RunForward) -> messages.ForwardSeconds:
        """Calls the smallest executable that fits. Raises GridMiss."""
        start = question.length - question.rows
        rows = self._text[start : question.length]
        call = (self._prefill if question.program == "prefill" else self._verify)(start, rows)
        seconds = []
        for _ in range(question.calls):
            self._state.wait()
            began = time.perf_counter()
            found = call()
            found.block_until_ready()
            self._state.wait()
            seconds.append(time.perf_counter() - began)
        # A verdict ends with the token after each row; a prefill gives a single token.
        token_ids = np.asarray(found).ravel()[-question.rows :].tolist()
        return messages.ForwardSeconds(seconds, token_ids)

    def _prefill(self, start: int, rows: Sequence[int]) -> Callable[[], jax.Array]:
        chunk = self._grid.fit_chunk(start, len(rows))
        executable = self._bundle.find(PREFILL, chunk.sizes)
        given = place_rows(self._state, rows, chunk.prefill, 0, start, last=True)
        return lambda: executable(self._state, pages=self._pages, **given)["first"]

    def _verify(self, start: int, rows: Sequence[int]) -> Callable[[], jax.Array]:
        """The first row is the anchor. No slot is active, so that no length advances."""
        bucket = self._grid.fit(1, start + len(rows), len(rows) - 1)
        place = self._state.to_device
        numbers = (place(np.full(self._grid.slots, value, np.int32)) for value in (start, rows[0]))
        self._state.replace(["lengths", "anchors"], list(numbers))
        given = {"pages": self._pages, "active": place(np.zeros(1, bool))}
        if bucket.k:
            given["block"] = place(np.array([rows], np.int32))
        executable = self._bundle.find(VERIFY, bucket.sizes, "greedy")
        return lambda: executable(self._state, **given)["verdict"]


def measure_xla_peaks(dtype: str, question: messages.MeasurePeaks) -> messages.PeakRates:
    """Peak rates of XLA."""
    words = jnp.ones(READ_BYTES // 4, jnp.float32)
    square = jnp.full((SQUARE, SQUARE), 1e-3, dtype)
    add = jax.jit(jnp.sum)
    multiply = jax.jit(partial(jnp.matmul, preferred_element_type=dtype))
    return measure_peaks(
        lambda: add(words).block_until_ready(),
        lambda: multiply(square, square).block_until_ready(),
        question.calls,
    )


@contextmanager
def open_passes(spec: messages.BundleForwardSpec) -> Iterator[Handlers]:
    """Raises what opening a bundle raises."""
    from dflash_aot.runtime.engine_parts import load_engine_parts  # noqa: PLC0415  not for starts of the loop

    manifest = read_manifest(Path(spec.bundle))
    select_jax_platforms(manifest.environment.platform)
    parts = load_engine_parts(Path(spec.bundle), None, None, manifest.grid.k[-1])
    passes = BundlePasses(parts.bundle, parts.state, spec.text)
    yield {
        messages.RunForward: passes.run,
        messages.MeasurePeaks: partial(measure_xla_peaks, manifest.dtype),
    }


if __name__ == "__main__":
    run_worker({messages.JitSpec: open_loop, messages.BundleForwardSpec: open_passes})
