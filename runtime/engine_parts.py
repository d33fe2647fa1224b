"""Bundle loading and warm-up: from a bundle and its checkpoint pair to what an engine needs to serve.

A follower, which is a host of a group that repeats the leader's device calls, loads its shards in the same way.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

import jax
import msgspec

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.errors import BadInput, DflashError, HostFailed
from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.model_config.speculative_config import KChoice, check_k_ranges, list_range_ks
from dflash_aot.cache.sampling_state import list_modes
from dflash_aot.cache.weight_recipe import CheckpointRole
from dflash_aot.runtime.command_stream import CommandPlayer, MirroredState
from dflash_aot.runtime.diagnostics import diagnose_weights
from dflash_aot.runtime.executables.executable import (
    CompileGuard,
    DeviceState,
    Executable,
    estimate_step_bytes,
    has_host_memory,
)
from dflash_aot.runtime.executables.loaded_bundle import (
    LazyLoader,
    LoadedBundle,
    bundle_devices,
    list_round_shapes,
    make_lazy_loader,
    read_compatible_manifest,
    report_out_of_memory,
    warm_up_executable,
)
from dflash_aot.runtime.host_group import FollowerGroup, LeaderGroup, find_group
from dflash_aot.runtime.requests.request_builder import refuse_ks
from dflash_aot.runtime.scheduler.kv_pages import OffloadCosts
from dflash_aot.runtime.speculation.controller import (
    AcceptanceEstimate,
    AdaptiveK,
    FixedK,
    KByBatchSize,
    RoundTimes,
    SpeculationController,
)
from dflash_aot.runtime.speculation.round_timing import (
    MAX_PASSES,
    RoundTimer,
    estimate_chunks,
    estimate_rounds,
    time_rounds,
)
from dflash_aot.runtime.weights.checkpoint_pair import check_pair_facts, locate_checkpoint_pair
from dflash_aot.runtime.weights.weight_loader import fingerprint_weights, load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """What an engine needs to serve a bundle.

    Attributes:
        bundle: the executables.
        state: the per-slot arrays on the devices.
        controller: chooses K.
        directories: of both checkpoints.
        weights: the fingerprint of the weights.
        startup: seconds of each phase, by the names that `on_phase` is called with.
    """

    bundle: LoadedBundle
    state: DeviceState
    controller: SpeculationController
    directories: Mapping[CheckpointRole, Path]
    weights: str
    startup: Mapping[str, float]


def load_engine_parts(
    path: Path,
    target: str | Path | None,
    draft: str | Path | None,
    k: KChoice,
    signed_by: Path | None = None,
    preload: bool = True,
    on_phase: Callable[[str], None] | None = None,
) -> EngineParts:
    """Loads a bundle, the weights and the executables; arguments and errors are those of `Engine.open`.

    signed_by: the public key that must have signed the bundle. Without `preload`, a thread goes on loading
    executables until `bundle.executables` is closed. The leader of several hosts always preloads.
    """
    group = find_group()
    timer = _PhaseTimer(on_phase)
    timer.enter("bundle")
    manifest = read_compatible_manifest(path, signed_by)
    if isinstance(k, list | tuple):
        k = check_k_ranges(k, "k")
    most = _find_largest_k(manifest, path, k)
    if group:
        group.check_bundle(manifest)
    directories = locate_checkpoint_pair(manifest, target, draft)
    check_pair_facts(path, manifest, directories)
    for warning in diagnose_weights(manifest, directories):
        logger.warning(warning)
    estimates = estimate_rounds(manifest, most)
    weights: dict[str, jax.Array] = {}
    loader = make_lazy_loader(path, manifest, _order_ks(manifest, most, k, estimates), weights)
    timer.enter("weights")
    with (
        report_out_of_memory(path, manifest),
        _load_in_background(loader),
        CompileGuard().forbid_tracing(),
    ):
        devices = bundle_devices(manifest)
        weights |= load_weights(manifest.weights, directories, devices)
        fingerprint = fingerprint_weights(directories)
        bundle = LoadedBundle(path, manifest, most, loader)
        state: DeviceState
        if isinstance(group, LeaderGroup):
            preload = True
            for name in loader.order:
                loader[name]
            state = MirroredState(manifest.state, devices, group.stream)
            group.wait_until_loaded(fingerprint)
            group.watch()
        else:
            state = DeviceState(manifest.state, devices)
        controller = _make_controller(k, most, estimates, bundle)
        if preload:
            timer.enter("first_calls")
            with _report_host_failure(state):
                for name in loader.order:
                    warm_up_executable(loader[name], state)
                timer.enter("timing")
                if isinstance(controller, AdaptiveK):
                    controller = AdaptiveK(time_rounds(bundle, state))
    timer.stop()
    return EngineParts(bundle, state, controller, directories, fingerprint, timer.seconds)


def _make_controller(
    k: KChoice, most: int, estimates: RoundTimes, bundle: LoadedBundle
) -> SpeculationController:
    """Returns what chooses K while serving. `WarmUp` times the rounds of an adaptive one, which begins with estimates.

    most: the largest K.
    """
    if isinstance(k, tuple):
        return KByBatchSize(k)
    if k == "auto" and most > 0:
        return AdaptiveK({}, estimates, bundle)
    return FixedK(most)


def follow(
    group: FollowerGroup,
    path: Path,
    target: str | Path | None,
    draft: str | Path | None,
    signed_by: Path | None = None,
) -> int:
    """Loads a bundle as the leader does, and repeats its calls. Returns the number of frames, when the leader ends.

    path: of the bundle; target, draft, signed_by: as in `Engine.open`.

    Raises HostFailed for any error after loading, and for errors of loading what `Engine.open` raises. The leader is
    told. Ends the process where the leader is gone.
    """
    group.start()
    try:
        player, state = _load_follower(group, path, target, draft, signed_by)
    except BaseException as error:
        group.tell_failure(error)
        raise
    guard = CompileGuard()
    try:
        with guard.forbid_tracing():
            while player.play(group.next_frame()):
                pass
            state.wait()
    except Exception as error:
        group.tell_failure(error)
        if isinstance(error, HostFailed):
            raise
        raise HostFailed(f"a device call failed: {type(error).__name__}: {error}") from error
    if guard.events:
        logger.warning("%d compile events while following", guard.events)
    return player.frames


def _load_follower(
    group: FollowerGroup,
    path: Path,
    target: str | Path | None,
    draft: str | Path | None,
    signed_by: Path | None,
) -> tuple[CommandPlayer, DeviceState]:
    manifest = read_compatible_manifest(path, signed_by)
    group.check_bundle(manifest)
    directories = locate_checkpoint_pair(manifest, target, draft)
    check_pair_facts(path, manifest, directories)
    weights: dict[str, jax.Array] = {}
    executables = make_lazy_loader(path, manifest, manifest.grid.k, weights)
    with report_out_of_memory(path, manifest), CompileGuard().forbid_tracing():
        devices = bundle_devices(manifest)
        weights |= load_weights(manifest.weights, directories, devices)
        for name in executables.order:
            executables[name]
        state = DeviceState(manifest.state, devices)
    group.tell_loaded(fingerprint_weights(directories))
    return CommandPlayer(executables, state), state


def make_offload_costs(
    parts: EngineParts, gibibytes: float, prefix_caching: bool
) -> OffloadCosts | None:
    """What copies to so much host memory cost; None for none. prefix_caching: whether prefixes are shared.

    Raises BadInput where the bundle, or the engine, cannot copy.
    """
    option = f"kv_offloading_size is {gibibytes!r}"
    if isinstance(gibibytes, bool) or not isinstance(gibibytes, int | float):
        raise BadInput(f"{option}: a number of GiB is needed")
    if not 0 <= gibibytes < math.inf:
        raise BadInput(f"{option}: at least 0 GiB are needed")
    if not gibibytes:
        return None
    manifest = parts.bundle.manifest
    if find_group():
        raise BadInput(f"{option}: with several hosts, kv is not copied to their memory")
    if not prefix_caching:
        raise BadInput(f"{option}: without prefix_caching, no prompt would find what is copied")
    if not manifest.grid.offload:
        wider = msgspec.structs.replace(manifest.grid, offload=1)
        command = msgspec.structs.replace(manifest, grid=wider).build_command(parts.bundle.path)
        raise BadInput(f"{option}: the bundle's grid has no offload=1. Add it: {command}")
    capacity = int(gibibytes * 2**30)
    if not has_host_memory(capacity):
        raise BadInput(f"{option}: the limit of this process leaves less memory")
    results = {one.signature.program: one.signature.results for one in manifest.entries}
    page = results["read_page"]
    state = results.get("read_state", ())
    return OffloadCosts(
        capacity=capacity,
        page_bytes=sum(one.bytes for one in page),
        state_bytes=sum(one.bytes for one in state),
        bytes_per_second=parts.state.measure_transfers(page),
        chunk_seconds=estimate_chunks(manifest, parts.bundle.k > 0),
        round_seconds=max(estimate_rounds(manifest, parts.bundle.k).values()),
    )


@contextmanager
def _report_host_failure(state: DeviceState) -> Iterator[None]:
    """Raises HostFailed for errors of device calls that several hosts make: any of them may be at fault."""
    try:
        yield
    except Exception as error:
        if state.recovers:
            raise
        raise HostFailed(f"a device call failed: {type(error).__name__}: {error}") from error


@contextmanager
def _load_in_background(loader: LazyLoader) -> Iterator[None]:
    """Starts the loader's thread, and stops it only if there is an error."""
    loader.start()
    try:
        yield
    except BaseException:
        loader.close()
        raise


class _PhaseTimer:
    """Measures the phases of loading, and reports the beginning of each.

    Attributes:
        seconds: duration of each finished phase.
    """

    def __init__(self, on_phase: Callable[[str], None] | None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase
        self._phase, self._began = "", 0.0

    def enter(self, phase: str) -> None:
        self.stop()
        self._phase = phase
        self._began = time.perf_counter()
        if self._on_phase:
            self._on_phase(phase)

    def stop(self) -> None:
        if self._phase:
            self.seconds[self._phase] = time.perf_counter() - self._began


def _find_largest_k(manifest: Manifest, path: Path, k: KChoice) -> int:
    """Returns the largest K that is served. Raises BadInput, GridMiss."""
    ks = manifest.grid.k
    if k == "auto":
        return ks[-1]
    if not isinstance(k, tuple) and (type(k) is not int or k < 0):
        raise BadInput(
            f"k is {k!r}: 'auto', one of {', '.join(map(str, ks))}, or ranges ((first, last, K), ...) of requests in "
            "the round are needed"
        )
    named = list_range_ks(k) if isinstance(k, tuple) else [k]
    if missing := [one for one in named if one not in ks]:
        raise refuse_ks(manifest, path, missing)
    return named[-1]


def _order_ks(manifest: Manifest, most: int, k: KChoice, estimates: RoundTimes) -> list[int]:
    """Returns the served Ks in loading order: the user's K or the best K for a short request, then 0, then the others.

    Of ranges, the user's K is that of a request alone. The best has the least estimated time per expected token of a
    request without history.
    """
    grid = manifest.grid
    tokens = AcceptanceEstimate().expected_tokens(most)
    mode = list_modes(manifest.sampling)[0]

    def seconds_per_token(one: int) -> float:
        return estimates[Bucket(grid.batch[0], grid.length[0], one), mode] / tokens[one]

    best, *others = sorted((one for one in grid.k if one <= most), key=seconds_per_token)
    if k != "auto":
        best = k if isinstance(k, int) else k[0][-1]
        others = [one for one in grid.k if one <= most and one != best]
    return [best, *sorted(others, key=lambda one: one != 0)]


# -- warm-up without preload: first calls and round times, step by step while the engine is idle

FAILURES = (DflashError, MemoryError, RuntimeError)  # RuntimeError: the base class of JAX's errors


class WarmUp:
    """Does what `Engine.open` skips without `preload`. The engine's thread calls `step` while no slot is active."""

    def __init__(
        self,
        bundle: LoadedBundle,
        state: DeviceState,
        controller: SpeculationController,
        reset: Callable[[], None],
    ):
        """reset: empties the device state after a failed call, and forgets which kv pages it held."""
        self._bundle = bundle
        self._state = state
        self._reset = reset
        self._controller = controller if isinstance(controller, AdaptiveK) else None
        self._timer = RoundTimer(bundle, state)
        self._step_bytes = estimate_step_bytes(bundle.manifest)
        manifest = bundle.manifest
        shapes = list_round_shapes(manifest.grid, manifest.sampling, bundle.k)
        untimed = [
            one
            for one in shapes
            if self._controller and not self._controller.costs.is_measured(one)
        ]
        # Pass by pass, so that a moment's disturbance of the machine hits few timings of one shape.
        self._untimed = untimed * MAX_PASSES
        self._broken: WeakSet[Executable] = WeakSet()  # those of a closed engine are freed

    def step(self) -> bool:
        """Calls one executable, or times one round shape. Returns False if nothing is left to do for now."""
        if not has_host_memory(self._step_bytes):
            return False
        for executable in self._bundle.executables.list_loaded():
            if not executable.called and executable not in self._broken:
                self._call(executable)
                return True
        if self._controller is None or not self._bundle.executables.has_ended:
            return False  # while the loader's thread works, rounds take up to twice as long
        return self._time_round(self._controller)

    def _call(self, executable: Executable) -> None:
        """An error is only logged: a request that needs the executable gets the error."""
        try:
            warm_up_executable(executable, self._state)
        except FAILURES as error:
            logger.error(error)
            self._broken.add(executable)
            self._reset()

    def _time_round(self, controller: AdaptiveK) -> bool:
        """Times one round of the next shape of which all executables were called. Returns False if there is none."""
        self._untimed = [shape for shape in self._untimed if not controller.costs.is_served(shape)]
        for index, shape in enumerate(self._untimed):
            if self._bundle.has_run(shape, multi_round=False):
                del self._untimed[index]
                try:
                    controller.costs.set_measured(shape, self._timer.time(*shape))
                    self._timer.clear()
                except FAILURES as error:  # served rounds will tell how long they take
                    logger.error("a round was not timed: %s", error)
                    self._reset()
                return True
        return False
