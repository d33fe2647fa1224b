"""From a bundle and its checkpoints to executables that have run once, on weights that are in place."""

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_aot.cache.errors import BadInput, CorruptBundle, GridMiss, IncompatibleBundle
from dflash_aot.cache.manifest import Manifest, replace_commands
from dflash_aot.runtime.bundle import Bundle, bundle_devices, call_once, check_bundle, load_executables
from dflash_aot.runtime.compile_watch import CompileWatch
from dflash_aot.runtime.depth import AdaptiveDepth, Depth, FixedDepth
from dflash_aot.runtime.executable import DeviceState, Executable, is_exhausted
from dflash_aot.runtime.pair import check_facts, locate_pair
from dflash_aot.runtime.round_times import time_rounds
from dflash_aot.runtime.weights import load_weights


@dataclass(frozen=True)
class Opened:
    """What serving needs; `target` is the target's directory, `startup` the seconds of each phase."""

    bundle: Bundle
    state: DeviceState
    depth: Depth
    target: Path
    startup: Mapping[str, float]


def open_bundle(
    path: Path,
    target: str | Path | None,
    draft: str | Path | None,
    k: int | Literal["auto"],
    signed_by: Path | None = None,
) -> Opened:
    """As `Engine.open` describes it, errors included."""
    clock = _Clock()
    manifest = check_bundle(path, signed_by)
    chosen = _choose_k(manifest, k)
    places = locate_pair(manifest, target, draft)
    check_facts(path, manifest, places)
    clock.lap("bundle")
    with (
        _within_memory(path, manifest),
        load_executables(path, manifest, chosen) as loading,
        CompileWatch().forbid_tracing(),
    ):
        devices = bundle_devices(manifest)
        weights = load_weights(manifest.weights, places, devices)
        state = DeviceState(manifest.state, devices)
        clock.lap("weights")
        executables = []
        for executable in loading:
            executable.bind(weights)
            _try_first_call(path, executable, state)
            executables.append(executable)
        clock.lap("canaries")
        opened = Bundle(path, manifest, chosen, executables)
        depth = choose_depth(opened, state, k)
        clock.lap("timing")
    return Opened(opened, state, depth, places["target"], clock.laps)


@contextmanager
def _within_memory(path: Path, manifest: Manifest) -> Iterator[None]:
    """Raises IncompatibleBundle where weights, state or what executables need besides find no room."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_exhausted(error):
            raise
        raise IncompatibleBundle(
            f"{path} needs more memory than is free here: {next(iter(str(error).splitlines()), 'none is left')}\n"
            f"What it takes: dflash-bundle inspect {shlex.quote(str(path))}. Make room, or build a smaller grid: "
            f"{manifest.rebuild_command(path)}"
        ) from error


def _try_first_call(path: Path, executable: Executable, state: DeviceState) -> None:
    """Raises CorruptBundle."""
    try:
        call_once(executable, state)
    except CorruptBundle as error:
        raise CorruptBundle(f"{path}: {error}\nMend it: {replace_commands(path)}") from error


def choose_depth(bundle: Bundle, state: DeviceState, k: int | Literal["auto"]) -> Depth:
    """A K of the user's holds; to choose one, rounds of every K are timed, where there is more than one."""
    if k == "auto" and bundle.k > 0:
        return AdaptiveDepth(time_rounds(bundle, state))
    return FixedDepth(bundle.k)


class _Clock:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def _choose_k(manifest: Manifest, k: int | Literal["auto"]) -> int:
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
