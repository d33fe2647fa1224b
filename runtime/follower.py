"""A follower: a host of a group that loads its shards and repeats the leader's device calls until the leader ends."""

import logging
from pathlib import Path

import jax

from dflash_aot.cache.errors import HostFailed
from dflash_aot.runtime.command_stream import CommandPlayer
from dflash_aot.runtime.executables.executable import CompileGuard, DeviceState
from dflash_aot.runtime.executables.loaded_bundle import (
    bundle_devices,
    make_lazy_loader,
    read_compatible_manifest,
    report_out_of_memory,
)
from dflash_aot.runtime.host_group import FollowerGroup
from dflash_aot.runtime.weights.checkpoint_pair import check_pair_facts, locate_checkpoint_pair
from dflash_aot.runtime.weights.weight_loader import fingerprint_weights, load_weights

logger = logging.getLogger(__name__)


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
        player, state = _load(group, path, target, draft, signed_by)
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


def _load(
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
