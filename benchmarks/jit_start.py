"""One start without a bundle, see `start`: the same programs under plain `jax.jit`, compiled when they are called.

With JAX's persistent cache of compiled programs, where one is named; it keeps every one. The loop is the plain one of
jit_loop.py, for one row; what a round needs is compiled when the first token is there, unless all is asked for.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import jax
import numpy as np

from dflash_aot.benchmarks.laps import Laps
from dflash_aot.benchmarks.start import Order, Start
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.devices import make_mesh, select_jax_platforms
from dflash_aot.compile.programs.lowering import jit_program
from dflash_aot.compile.programs.programs import Programs
from dflash_aot.runtime.executables.executable import DeviceState, Executable
from dflash_aot.runtime.executables.loaded_bundle import bundle_devices
from dflash_aot.runtime.weights.checkpoint_pair import locate_checkpoint_pair
from dflash_aot.runtime.weights.weight_loader import load_weights


def start_jit(order: Order, laps: Laps) -> Start:
    """Raises what reading a manifest and its checkpoints raises."""
    jax.config.update("jax_enable_compilation_cache", bool(order.cache))  # cold, whatever the environment says
    if order.cache:
        jax.config.update("jax_compilation_cache_dir", order.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    manifest = read_manifest(Path(order.bundle))
    select_jax_platforms(manifest.environment.platform)
    server = JitServer(manifest, order.target, order.draft, laps)
    if order.scope == "grid":
        server.call_all()
    laps.end("executables")
    tokens = server.decode(order.prompt_ids, order.tokens)
    chosen = [next(tokens)]
    laps.end("first token")
    first = laps.total
    chosen = [*chosen, *tokens][: order.tokens]
    return Start(laps.seconds, first, laps.total, chosen, server.ready)


class JitServer:
    """Every program of a grid as a jitted function, traced and compiled at its first call; and one row to decode."""

    def __init__(self, manifest: Manifest, target: str, draft: str, laps: Laps):
        programs = Programs(manifest.target.facts, manifest.draft.facts, manifest.dtype, sampling=manifest.sampling)
        self._grid, devices = manifest.grid, bundle_devices(manifest)
        known, mesh = programs.arrays_by_name(self._grid), make_mesh(devices)
        laps.end("programs")
        weights = load_weights(manifest.weights, locate_checkpoint_pair(manifest, target, draft), devices)
        self._state = DeviceState(manifest.state, devices)
        laps.end("weights")
        self._all: dict[tuple, Executable] = {}
        for signature in programs.list_signatures(self._grid):
            jitted = jit_program(signature, programs.function(signature), known, mesh)
            executable = Executable(signature, cast(jax.stages.Compiled, jitted))  # called alike
            executable.bind(weights)
            self._all[signature.executable_id] = executable
        self._called: set[tuple] = set()

    @property
    def ready(self) -> int:
        """How many were called."""
        return len(self._called)

    def call_all(self) -> None:
        """No slot is active."""
        for (program, sizes), executable in self._all.items():
            self._call(program, *sizes, arguments=[*map(self._state.zeros, executable.signature.arguments)])
            self._state.wait()

    def decode(self, prompt: Sequence[int], tokens: int) -> Iterator[int]:
        """At least so many, greedy, at the grid's largest K; every round is waited for."""
        k, place = self._grid.k[-1], self._state.to_device
        yield self._prefill(prompt)
        bucket = self._grid.fit(1, len(prompt) + tokens + k, k)
        slots, active, found = place(np.zeros(1, np.int32)), place(np.ones(1, bool)), 1
        while found < tokens:
            block = self._call("draft", 1, bucket.length, k) if k else ()
            features, starts, verdict = self._call("verify", 1, bucket.length, k, arguments=(*block, active))
            if k:
                self._call("kv_write", 1, k + 1, arguments=(features, slots, starts))
            accepted, *rest = jax.device_get(verdict)[0].tolist()
            yield from rest[k : k + accepted + 1]
            found += accepted + 1

    def _prefill(self, prompt: Sequence[int]) -> int:
        """All chunks. Returns the token behind them."""
        start, slots = 0, self._number(0)
        while start < len(prompt):
            chunk = self._grid.fit_chunk(start, len(prompt) - start)
            count = min(chunk.prefill, len(prompt) - start)
            part = np.zeros((1, chunk.prefill), np.int32)
            part[0, :count] = prompt[start : start + count]
            given = self._state.to_device(part), slots, self._number(start), self._number(count)
            features, first = self._call("prefill", chunk.prefill, chunk.length, arguments=given)
            if self._grid.k[-1]:
                self._call("kv_write", 1, chunk.prefill, arguments=(features, slots, self._number(start)))
            start += count
        return int(jax.device_get(first)[0])

    def _call(self, program: str, *sizes: int, arguments: Sequence[jax.Array] = ()) -> Sequence[jax.Array]:
        self._called.add((program, sizes))
        return self._all[program, sizes](self._state, *arguments)

    def _number(self, number: int) -> jax.Array:
        return self._state.to_device(np.array([number], np.int32))
