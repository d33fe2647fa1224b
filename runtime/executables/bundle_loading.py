"""From a bundle and its checkpoints to executables that can be called, on weights that are in place."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.executables.compile_guard import CompileGuard
from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.lazy_loader import LazyLoader
from dflash_aot.runtime.executables.loaded_bundle import (
    LoadedBundle,
    bundle_devices,
    make_lazy_loader,
    read_compatible_manifest,
    report_out_of_memory,
    warm_up_executable,
)
from dflash_aot.runtime.speculation.acceptance_estimate import AcceptanceEstimate
from dflash_aot.runtime.speculation.controller import AdaptiveK, FixedK, SpeculationController
from dflash_aot.runtime.speculation.round_timing import Times, estimate_rounds, time_rounds
from dflash_aot.runtime.weights.checkpoint_pair import check_pair_facts, locate_checkpoint_pair
from dflash_aot.runtime.weights.weight_loader import load_weights


@dataclass(frozen=True)
class EngineParts:
    """What serving needs; `target` is the target's directory, `startup` the seconds of each phase."""

    bundle: LoadedBundle
    state: DeviceState
    controller: SpeculationController
    target: Path
    startup: Mapping[str, float]


def load_engine_parts(
    path: Path,
    target: str | Path | None,
    draft: str | Path | None,
    k: int | Literal["auto"],
    signed_by: Path | None = None,
    preload: bool = True,
    on_phase: Callable[[str], None] | None = None,
) -> EngineParts:
    """As `Engine.open` describes it, errors included.

    Without `preload` a thread goes on loading, until the bundle's loader is closed.
    """
    clock = _Clock(on_phase)
    clock.enter("bundle")
    manifest = read_compatible_manifest(path, signed_by)
    most = _find_most(manifest, k)
    places = locate_checkpoint_pair(manifest, target, draft)
    check_pair_facts(path, manifest, places)
    estimates = estimate_rounds(manifest, most)
    weights: dict[str, jax.Array] = {}
    loader = make_lazy_loader(path, manifest, _order_ks(manifest, k, estimates), weights)
    clock.enter("weights")
    with _loading(loader), report_out_of_memory(path, manifest), CompileGuard().forbid_tracing():
        devices = bundle_devices(manifest)
        weights |= load_weights(manifest.weights, places, devices)
        bundle, state = LoadedBundle(path, manifest, most, loader), DeviceState(manifest.state, devices)
        if preload:
            clock.enter("canaries")
            for name in loader.order:
                warm_up_executable(loader[name], state)
            clock.enter("timing")
            depth = choose_depth(bundle, state, k)
        else:
            depth = AdaptiveK({}, estimates, bundle) if _adapts(bundle, k) else FixedK(most)
    clock.stop()
    return EngineParts(bundle, state, depth, places["target"], clock.laps)


@contextmanager
def _loading(loader: LazyLoader) -> Iterator[None]:
    """The loader's thread runs, and goes on unless there is an error."""
    loader.start()
    try:
        yield
    except BaseException:
        loader.close()
        raise


def choose_depth(bundle: LoadedBundle, state: DeviceState, k: int | Literal["auto"]) -> SpeculationController:
    """A K of the user's holds; to choose one, rounds of every K are timed, where there is more than one."""
    return AdaptiveK(time_rounds(bundle, state)) if _adapts(bundle, k) else FixedK(bundle.k)


def _adapts(bundle: LoadedBundle, k: int | Literal["auto"]) -> bool:
    return k == "auto" and bundle.k > 0


class _Clock:
    """Seconds per phase; each is told of when it begins."""

    def __init__(self, on_phase: Callable[[str], None] | None) -> None:
        self.laps: dict[str, float] = {}
        self._on_phase = on_phase
        self._phase, self._began = "", 0.0

    def enter(self, phase: str) -> None:
        self.stop()
        self._phase, self._began = phase, time.perf_counter()
        if self._on_phase:
            self._on_phase(phase)

    def stop(self) -> None:
        if self._phase:
            self.laps[self._phase] = time.perf_counter() - self._began


def _find_most(manifest: Manifest, k: int | Literal["auto"]) -> int:
    """The largest K that is served. Raises BadInput, GridMiss."""
    ks = manifest.grid.k
    if k == "auto":
        return ks[-1]
    if type(k) is not int or k < 0:
        raise BadInput(f"k is {k!r}: 'auto' or one of {', '.join(map(str, ks))} is needed")
    if k not in ks:
        axis = f"k={','.join(map(str, sorted({*ks, k})))}"
        raise GridMiss(
            f"no executable verifies k={k} tokens: the grid has k={','.join(map(str, ks))}. "
            f"Precompile it: dflash-precompile --buckets '... {axis} ...' (a block of "
            f"{manifest.draft.facts.block} allows k up to {manifest.draft.facts.block - 1})"
        )
    return k


def _order_ks(manifest: Manifest, k: int | Literal["auto"], estimates: Times) -> list[int]:
    """By their worth for a single short row of which nothing is known: the best or the user's own, 0, the others."""
    grid, most = manifest.grid, _find_most(manifest, k)
    tokens, sampled = AcceptanceEstimate().expected_tokens(most), "greedy" not in manifest.sampling

    def rate(one: int) -> float:
        return estimates[Bucket(grid.batch[0], grid.length[0], one), sampled] / tokens[one]

    best, *others = sorted((one for one in grid.k if one <= most), key=rate)
    if k != "auto":
        best, others = k, [one for one in grid.k if one < k]
    return [best, *sorted(others, key=lambda one: one != 0)]
