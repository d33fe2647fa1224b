"""Round times of every shape: measured while nothing is served, or estimated until then."""

import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dflash_aot.cache.bundle.manifest import CallCost, Manifest
from dflash_aot.cache.grid import Bucket, Chunk
from dflash_aot.cache.model_config.architecture import MixtureOfExperts
from dflash_aot.cache.sampling_state import ALL_ALLOWED, SAMPLING_MODES, SamplingMode
from dflash_aot.cache.signature import DRAFT, KV_WRITE, VERIFY, ExecutableId, RoundShape
from dflash_aot.cache.weight_recipe import ITEM_BYTES
from dflash_aot.runtime.executables.executable import DeviceState, Executable
from dflash_aot.runtime.executables.loaded_bundle import (
    LoadedBundle,
    list_chunk_executables,
    list_round_executables,
    list_round_shapes,
)
from dflash_aot.runtime.speculation.controller import RoundTimes

MIN_PASSES, MAX_PASSES = 2, 5
PASS_SECONDS = 2.0  # after which no further pass begins
ROUNDS_IN_A_ROW, ROW_SECONDS = 8, 0.02  # see `RoundTimer.time`
TIMED_STATE = ("lengths", "anchors")
# Operations that take as long as one byte of memory: only ratios between Ks matter, until something has run.
OPERATIONS_PER_BYTE = {"cpu": 8.0}
ACCELERATOR_OPERATIONS_PER_BYTE = 200.0
BYTES_PER_SECOND = 1e10  # any number: only ratios of estimates count


def time_rounds(bundle: LoadedBundle, state: DeviceState) -> RoundTimes:
    """Measures a round of every shape (K = 0: verify alone) in seconds: the shortest of 2 to MAX_PASSES passes.

    Every executable must have been called before. Two passes at least, because on CPU the first run after an
    executable's first call takes up to five times as long. Each pass runs through all shapes, so that a moment's
    disturbance of the machine hits few timings of one shape. No slot is active, so nothing advances, and kv is written
    to page 0 and to rings only, where nothing sees it; at the end `state` has zero lengths and anchors, as in an engine
    without requests.
    """
    rounds = RoundTimer(bundle, state)
    shapes = list_round_shapes(bundle.manifest.grid, bundle.manifest.sampling, bundle.k)
    times = dict.fromkeys(shapes, math.inf)
    began = time.perf_counter()
    passes = 0
    while passes < MIN_PASSES or (
        passes < MAX_PASSES and time.perf_counter() - began < PASS_SECONDS
    ):
        for one in shapes:
            times[one] = min(times[one], rounds.time(*one))
        passes += 1
    rounds.clear()
    return bound_times(times)


def estimate_rounds(manifest: Manifest, k: int) -> RoundTimes:
    """Estimates of each shape, right in ratios: the compiler's if all executables have one, else from its counts.

    An estimate from counts is memory time plus compute time. Only ratios of such estimates are right.
    """
    seconds, counted = _estimate_calls(manifest)

    def estimate(shape: RoundShape) -> float:
        bucket = shape[0]
        names = list_round_executables(*shape, drafts=bucket.k > 0)
        experts = _estimate_experts(manifest, bucket.batch * (bucket.k + 1)) if counted else 0.0
        return sum(seconds[name] for name in names) + experts

    return {
        shape: estimate(shape) for shape in list_round_shapes(manifest.grid, manifest.sampling, k)
    }


def estimate_chunks(manifest: Manifest, drafts: bool) -> dict[Chunk, float]:
    """Estimated seconds of each prefill chunk, see `estimate_rounds`; drafts: whether the draft's kv is kept.

    From counts they are about right for a CPU, and too long for a GPU.
    """
    seconds, counted = _estimate_calls(manifest)

    def estimate(chunk: Chunk) -> float:
        experts = _estimate_experts(manifest, chunk.prefill) if counted else 0.0
        return experts + sum(seconds[name] for name in list_chunk_executables(chunk, drafts))

    return {chunk: estimate(chunk) for chunk in manifest.grid.chunks()}


def _estimate_calls(manifest: Manifest) -> tuple[dict[ExecutableId, float], bool]:
    """Estimated seconds of each executable, and whether they are from counts."""
    counted = any(one.cost.estimate_seconds is None for one in manifest.entries)

    def estimate_call(cost: CallCost) -> float:
        if counted or cost.estimate_seconds is None:
            return _weigh(manifest, max(cost.bytes_accessed, 1.0), max(cost.flops, 0.0))
        return cost.estimate_seconds

    return {
        one.signature.executable_id: estimate_call(one.cost) for one in manifest.entries
    }, counted


def _weigh(manifest: Manifest, bytes_: float, operations: float) -> float:
    """Seconds of so many bytes and operations, right in ratios."""
    platform = manifest.environment.platform
    balance = OPERATIONS_PER_BYTE.get(platform, ACCELERATOR_OPERATIONS_PER_BYTE)
    return (bytes_ + operations / balance) / BYTES_PER_SECOND


def _estimate_experts(manifest: Manifest, tokens: int) -> float:
    """Seconds of the experts that the compiler's counts of a verification of so many tokens leave out.

    A loop runs every expert that some token chose, on all tokens, and the compiler counts one pass.
    """
    target = manifest.target.facts
    weights = sum(
        len(kind.numbers) * (kind.mlp.expect_distinct(tokens) - 1) * 3 * kind.mlp.width
        for kind in target.kinds
        if isinstance(kind.mlp, MixtureOfExperts)
    )
    weights = weights * target.decoder.hidden / manifest.environment.device_count
    item = ITEM_BYTES["int8" if manifest.formats.target == "int8" else manifest.dtype]
    return _weigh(manifest, weights * item, 2 * tokens * weights)


def bound_times(times: RoundTimes) -> RoundTimes:
    """Bounds each time by those of larger shapes: a smaller round that took longer was disturbed.

    A shape is larger with at least as many rows, positions and verified tokens, and at least as much sampling.
    """

    def does_more(one: RoundShape, other: RoundShape) -> bool:
        more, mode = one
        less, simpler = other
        rows = more.batch >= less.batch
        positions = more.length >= less.length
        modes = SAMPLING_MODES.index(mode) >= SAMPLING_MODES.index(simpler)
        return rows and positions and more.k >= less.k and modes

    return {one: min(times[other] for other in times if does_more(other, one)) for one in times}


class RoundTimer:
    """Times rounds of random tokens: with these, a mixture of experts reads as many experts as for a text."""

    def __init__(self, bundle: LoadedBundle, state: DeviceState):
        self._bundle = bundle
        self._state = state
        self._grid = bundle.manifest.grid
        self._vocab = bundle.manifest.target.facts.decoder.vocab
        self._random = np.random.default_rng(0)

    def time(self, bucket: Bucket, mode: SamplingMode) -> float:
        """Seconds of a round, at the middle of the lengths for which this bucket is chosen.

        Short rounds run in a row: as many as take ROW_SECONDS, at most ROUNDS_IN_A_ROW. Their mean time counts. While
        serving, the engine dispatches a round before the previous round has ended, which hides dispatch and wake-up.
        These take nearly the same time for each K, so they must not count here either. Served rounds of the embedded
        pair take 2.2 times as long with K = 3 as with K = 0. Rounds timed in a row give a ratio of 2.1, rounds timed
        singly at the bucket's end 1.9.
        """
        shorter = max((one for one in self._grid.length if one < bucket.length), default=0)
        calls = self._prepare(bucket, mode, (shorter + bucket.length) // 2)
        seconds = self._run(calls)
        rounds = min(int(ROW_SECONDS / seconds), ROUNDS_IN_A_ROW)
        return self._run(calls * rounds) / rounds if rounds > 1 else seconds

    def _run(self, calls: Sequence[Callable[[], None]]) -> float:
        """Seconds of all calls together, waited for at the end."""
        began = time.perf_counter()
        for call in calls:
            call()
        self._state.wait()
        return time.perf_counter() - began

    def _prepare(self, bucket: Bucket, mode: SamplingMode, end: int) -> list[Callable[[], None]]:
        """The calls of a round, in order. Each needs the result of the call before, so that calls do not overlap.

        end: kv positions of each row after the round; K + 1 if that is more.
        """
        bundle = self._bundle
        state = self._state
        start = max(end - bucket.k - 1, 0)
        self._set_state(np.full(self._grid.slots, start), self._draw_tokens(self._grid.slots))
        verify = bundle.find(VERIFY, bucket.sizes, mode)
        given: dict[str, np.ndarray] = {
            "pages": self._make_tables(bucket.batch, start),
            "active": np.zeros(bucket.batch, bool),
            "sampled": np.array([mode != "greedy"]),
            "penalised": np.array([False]),
        }
        for array in verify.signature.arguments:
            if array.name == "block":
                given["block"] = self._draw_tokens(array.shape)
            elif array.name == "allowed":
                given["allowed"] = np.full(array.shape, ALL_ALLOWED, np.int32)
            elif array.name == "ends":
                given["ends"] = np.full(array.shape, -1, np.int32)
        known = {name: state.to_device(array) for name, array in given.items()}

        def call(executable: Executable) -> dict[str, jax.Array]:
            """Calls it with those arrays that it takes; adds features and starts for the kv_write."""
            names = [array.name for array in executable.signature.arguments]
            return executable(state, **{name: known[name] for name in names})

        def run_verify() -> None:
            known.update(call(verify))

        def run_kv_write() -> None:
            call(bundle.find(KV_WRITE, (bucket.batch, bucket.k + 1)))

        def run_draft() -> None:
            jax.block_until_ready(call(bundle.find(DRAFT, bucket.sizes)))

        state.wait()
        if not bucket.k:  # a round without drafts defers the write, see `DraftKvWriter`
            return [run_verify]
        return [run_verify, run_kv_write, run_draft]

    def clear(self) -> None:
        """Resets lengths and anchors to zero."""
        declared = [array for array in self._bundle.manifest.state if array.name in TIMED_STATE]
        self._state.replace([array.name for array in declared], [*map(self._state.zeros, declared)])

    def _make_tables(self, batch: int, start: int) -> np.ndarray:
        """Page tables whose rows read pages of the pool, and write to page 0: other pages may be kept for requests."""
        tables = np.array(self._grid.separate_tables(range(batch)), np.int32)
        tables[:, start // self._grid.page :] = 0
        return tables

    def _set_state(self, *arrays: np.ndarray) -> None:
        self._state.replace(
            TIMED_STATE, [self._state.to_device(array.astype(np.int32)) for array in arrays]
        )

    def _draw_tokens(self, shape: int | Sequence[int]) -> np.ndarray:
        return self._random.integers(self._vocab, size=shape, dtype=np.int32)
