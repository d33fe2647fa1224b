"""Seconds of a whole round of every bucket: measured while nothing is served, or estimated until then."""

import math
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.execution_plan import RoundShape, list_round_executables, list_round_shapes
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle

Times = Mapping[RoundShape, float]
MOST_PASSES = 5
SECONDS = 1.0  # after which no pass begins; the first one is made whatever it takes
SET = ("lengths", "anchors")
# Operations that take as long as a byte of memory, as far as that decides between Ks before anything has run.
OPERATIONS_PER_BYTE = {"cpu": 8.0}
OF_ACCELERATORS = 200.0
BYTES_PER_SECOND = 1e10  # any: only ratios of estimates count


def time_rounds(bundle: LoadedBundle, state: DeviceState) -> Times:
    """Seconds of verify, kv_write and draft by bucket and whether it samples: the least of up to five passes.

    Every executable must have been called before. Passes run through all buckets, so that what disturbs the machine
    for a moment meets few of one bucket's. Nothing is active: nothing advances, and `state` has zero lengths and
    anchors in the end, as an engine without requests.
    """
    rounds = RoundTimer(bundle, state)
    kinds = list_round_shapes(bundle.manifest.grid, bundle.manifest.sampling, bundle.k)
    times = dict.fromkeys(kinds, math.inf)
    began, passes = time.perf_counter(), 0
    while passes == 0 or (passes < MOST_PASSES and time.perf_counter() - began < SECONDS):
        for one in kinds:
            times[one] = min(times[one], rounds.time(*one))
        passes += 1
    rounds.clear()
    return bound_times(times)


def estimate_rounds(manifest: Manifest, k: int) -> Times:
    """By what the compiler counted: bytes and operations take as long as their sum. Right in ratios only, if at all."""
    balance = OPERATIONS_PER_BYTE.get(manifest.environment.platform, OF_ACCELERATORS)
    work = {
        entry.signature.executable_id: max(entry.cost.bytes_accessed, 1.0) + max(entry.cost.flops, 0.0) / balance
        for entry in manifest.entries
    }
    return {
        (bucket, sampled): sum(work[name] for name in list_round_executables(bucket, sampled, k > 0)) / BYTES_PER_SECOND
        for bucket, sampled in list_round_shapes(manifest.grid, manifest.sampling, k)
    }


def bound_times(times: Times) -> Times:
    """No round takes longer than one that does more: what was measured above that was the machine's doing.

    More is at least as many rows, positions and verified tokens, and sampling.
    """

    def does_more(one: tuple[Bucket, bool], other: tuple[Bucket, bool]) -> bool:
        (more, samples), (less, sampled) = one, other
        rows, positions = more.batch >= less.batch, more.length >= less.length
        return rows and positions and more.k >= less.k and samples >= sampled

    return {one: min(times[other] for other in times if does_more(other, one)) for one in times}


class RoundTimer:
    """Rounds of random tokens: a mixture of experts reads as many of them as it will for a text."""

    def __init__(self, bundle: LoadedBundle, state: DeviceState):
        self._bundle, self._state = bundle, state
        self._slots = bundle.manifest.grid.slots
        self._vocab = bundle.manifest.target.facts.decoder.vocab
        self._random = np.random.default_rng(0)

    def time(self, bucket: Bucket, sampled: bool) -> float:
        bundle, state = self._bundle, self._state
        # As full as the bucket gets: rounds of it see that many positions at most.
        self._set(np.full(self._slots, bucket.length - bucket.k - 1), self._draw(self._slots))
        block = [state.place(self._draw((bucket.batch, bucket.k + 1)))] if bucket.k else []
        active = state.place(np.zeros(bucket.batch, bool))
        slots = state.place(np.arange(bucket.batch, dtype=np.int32))
        verify = bundle.sampled_verify(bucket) if sampled else bundle.verify(bucket)
        write = bundle.kv_write(bucket.batch, bucket.k + 1)
        state.wait()
        began = time.perf_counter()
        # The draft comes last: so each call needs what the one before returns, and none of them overlap.
        features, starts, *_ = verify(state, *block, active)
        write(state, features, slots, starts)
        drafted = bundle.draft(bucket)(state) if bucket.k else ()
        jax.block_until_ready(drafted)
        state.wait()
        return time.perf_counter() - began

    def clear(self) -> None:
        declared = [array for array in self._bundle.manifest.state if array.name in SET]
        self._state.replace([array.name for array in declared], [*map(self._state.zeros, declared)])

    def _set(self, *arrays: np.ndarray) -> None:
        self._state.replace(SET, [self._state.place(array.astype(np.int32)) for array in arrays])

    def _draw(self, shape: int | Sequence[int]) -> np.ndarray:
        return self._random.integers(self._vocab, size=shape, dtype=np.int32)
