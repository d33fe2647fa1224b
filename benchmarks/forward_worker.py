"""Worker with the executables of a bundle: one forward pass of the target at a time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_aot.benchmarks import messages
from dflash_aot.benchmarks.messages import Handlers, run_worker
from dflash_aot.benchmarks.record import READ_BYTES, SQUARE, measure_peaks
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.grid import Bucket, Chunk
from dflash_aot.runtime.engine_parts import load_engine_parts
from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle


@contextmanager
def open_bundle_passes(spec: messages.BundleForwardSpec) -> Iterator[Handlers]:
    """Raises what opening a bundle raises."""
    manifest = read_manifest(Path(spec.bundle))
    select_jax_platforms(manifest.environment.platform)
    parts = load_engine_parts(Path(spec.bundle), spec.target, spec.draft, manifest.grid.k[-1])
    passes = BundlePasses(parts.bundle, parts.state, spec.text)
    yield {
        messages.RunForward: passes.run,
        messages.MeasurePeaks: partial(measure_xla_peaks, manifest.dtype),
    }


class BundlePasses:
    """A bundle whose first slot holds the kv of a text. Every pass writes the same kv again."""

    def __init__(self, bundle: LoadedBundle, state: DeviceState, text: Sequence[int]):
        self._bundle = bundle
        self._state = state
        self._text = text
        self._grid = bundle.manifest.grid
        start = 0
        self._pages = state.to_device(np.array(self._grid.separate_tables([0]), np.int32))
        while start < len(text):
            chunk = self._grid.fit_chunk(start, len(text) - start)
            count = min(chunk.prefill, len(text) - start)
            self._prefill(chunk, start, text[start : start + count])()
            start += count
        state.wait()

    def run(self, question: messages.RunForward) -> messages.ForwardSeconds:
        """Calls the executable of the shortest length that fits. Raises GridMiss, KeyError for other row counts."""
        start = question.length - question.rows
        length = self._grid.fit(1, question.length, 0).length
        rows = self._text[start : question.length]
        if question.program == "prefill":
            call = self._prefill(Chunk(len(rows), length), start, rows)
            chosen = slice(None)
        else:
            call = self._verify(Bucket(1, length, len(rows) - 1), start, rows)
            chosen = slice(len(rows), None)
        seconds = []
        for _ in range(question.calls):
            self._state.wait()
            began = time.perf_counter()
            found = call()
            found.block_until_ready()
            self._state.wait()
            seconds.append(time.perf_counter() - began)
        return messages.ForwardSeconds(seconds, np.asarray(found).ravel()[chosen].tolist())

    def _prefill(self, chunk: Chunk, start: int, rows: Sequence[int]) -> Callable[[], jax.Array]:
        tokens = np.zeros((1, chunk.prefill), np.int32)
        tokens[0, : len(rows)] = rows
        executable = self._bundle.prefill(chunk)
        numbers = map(self._number, (0, start, len(rows)))
        given = (
            self._pages,
            self._state.to_device(tokens),
            *numbers,
            self._state.to_device(np.array([True])),
        )
        return lambda: executable(self._state, *given)[1]

    def _verify(self, bucket: Bucket, start: int, rows: Sequence[int]) -> Callable[[], jax.Array]:
        """The first row is the anchor. No slot is active, so that no length advances."""
        place = self._state.to_device
        at = {"lengths": start, "anchors": rows[0]}
        self._state.replace(
            [*at], [place(np.full(self._grid.slots, value, np.int32)) for value in at.values()]
        )
        executable = self._bundle.verify(bucket)
        given = [self._pages, *([place(np.array([rows], np.int32))] if bucket.k else [])]
        given.append(place(np.zeros(1, bool)))
        return lambda: executable(self._state, *given)[2]

    def _number(self, number: int) -> jax.Array:
        return self._state.to_device(np.array([number], np.int32))


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


if __name__ == "__main__":
    run_worker(messages.BundleForwardSpec, open_bundle_passes)
