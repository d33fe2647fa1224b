"""JAX devices: platform selection, attached devices in mesh order, their environment, shardings; JAX's switches."""

import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from msgspec import structs

from dflash_aot.cache.arrays import MESH_AXIS, MeshAxes
from dflash_aot.cache.chips import find_topology
from dflash_aot.cache.environment import (
    VIRTUAL_DEVICES_FLAG,
    Environment,
    is_tpu_attached,
    read_flags,
    read_host_environment,
)
from dflash_aot.cache.errors import EngineFailed

# Linux lists the threads of this process here. JAX's own are not Python's.
THREADS = Path("/proc/self/task")

# Switches of JAX that make calls fail or programs compute something else, and the values with which programs are made
# and called here. An environment variable such as JAX_DEBUG_NANS, or the process that embeds the engine, may have set
# them otherwise. Switches that only log, or that tell XLA how long to work, stay as they are.
SWITCHES: Mapping[str, Any] = MappingProxyType(
    {
        "array_garbage_collection_guard": "allow",
        "check_tracer_leaks": False,
        "debug_infs": False,
        "debug_key_reuse": False,
        "debug_nans": False,
        "default_device": None,
        "default_matmul_precision": None,
        "default_prng_impl": "threefry2x32",
        "disable_jit": False,
        "enable_checks": False,
        "enable_custom_prng": False,
        "enable_x64": False,
        "legacy_prng_key": "allow",
        "no_execution": False,
        "no_tracing": False,
        "numpy_dtype_promotion": "standard",
        "numpy_rank_promotion": "allow",
        "thread_guard": False,
        "threefry_partitionable": True,
        "transfer_guard": "allow",
    }
)


@contextmanager
def ignore_jax_switches() -> Iterator[None]:
    """Inside, on this thread, JAX's switches have the values of SWITCHES, whatever the process has set."""
    with ExitStack() as switched:
        for name, value in SWITCHES.items():
            switched.enter_context(getattr(jax, name)(value))
        yield


def select_jax_platforms(platform: str | None) -> None:
    """Restricts JAX to the platforms that this process uses; starts no backend.

    `platform` is the one that will be used. None means the attached accelerator, if there is one. Without the
    restriction JAX would also start unused accelerators, and libtpu prints many lines where no TPU is attached.
    """
    if platform == "cpu" or (platform == "tpu" and not is_tpu_attached()):
        jax.config.update("jax_platforms", "cpu")
    elif platform == "tpu":
        jax.config.update("jax_platforms", "tpu,cpu")
    elif not (os.environ.get("JAX_PLATFORMS") or is_tpu_attached() or _has_gpu_plugin()):
        jax.config.update("jax_platforms", "cpu")


def _has_gpu_plugin() -> bool:
    """Whether a package that lets JAX use a GPU is installed."""
    return importlib.util.find_spec("jax_plugins") is not None


def read_environment(platform_name: str, device_count: int = 1) -> Environment:
    """Returns the environment of `attached_devices`; starts JAX. Raises RuntimeError as `attached_devices` does."""
    devices = attached_devices(platform_name, device_count)
    return make_environment(devices, _attached_topology(devices[0].platform))


def attached_devices(platform_name: str, device_count: int = 1) -> tuple[jax.Device, ...]:
    """Returns the first `device_count` devices by coordinates, in mesh order; starts JAX.

    Raises RuntimeError, worded for users, if the platform is not attached or has fewer devices; EngineFailed in a fork
    of a process that had started JAX.
    """
    if platform_name == "tpu" and not is_tpu_attached():
        raise RuntimeError(
            "no TPU is attached: no /dev/accel*, and no /dev/vfio/<n> with a Google PCI device"
        )
    devices = jax.devices(platform_name)
    _refuse_fork()
    if jax.process_count() > 1 and device_count < len(devices):
        raise RuntimeError(
            f"{device_count} of the {len(devices)} devices of {jax.process_count()} hosts are asked for, and every "
            "host must have its part"
        )
    if len(devices) < device_count:
        remedy = (
            f". XLA_FLAGS={VIRTUAL_DEVICES_FLAG}={device_count} provides as many"
            if platform_name == "cpu"
            else ""
        )
        raise RuntimeError(
            f"{device_count} {platform_name} devices are needed, {len(devices)} are attached{remedy}"
        )
    return order_in_mesh(sorted(devices, key=_position)[:device_count])


def _refuse_fork() -> None:
    """Raises EngineFailed if another process started JAX: its threads are not here, and calls would wait for them."""
    threads = len(os.listdir(THREADS)) if THREADS.exists() else None
    if os.getpid() != _find_first_process() or threads == threading.active_count():
        raise EngineFailed(
            f"JAX was started in another process, and this is its fork {os.getpid()}: threads and devices do not "
            "survive a fork. Start processes that open an engine by multiprocessing's 'spawn' or 'forkserver'"
        )


@cache
def _find_first_process() -> int:
    """The process that asked first, also in its forks."""
    return os.getpid()


def order_in_mesh(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """Orders devices as `jax.make_mesh` does along one axis: on a TPU along the links between chips where possible."""
    placed = sorted(devices, key=_position)  # JAX's order of a described slice depends on its hosts
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,), devices=placed)
    return tuple(mesh.devices.flat)


def make_environment(devices: Sequence[jax.Device], topology: str) -> Environment:
    """Returns the environment of these devices, attached or described, in this order."""
    first = devices[0]
    return Environment(
        **structs.asdict(read_host_environment(first.platform)),
        platform=first.platform,
        platform_version=first.client.platform_version,
        device_kind=first.device_kind,
        topology=topology,
        device_count=len(devices),
        hosts=len({device.process_index for device in devices}),
        coordinates=tuple(",".join(map(str, _coordinates(device))) for device in devices),
        # JAX itself adds flags here when it is imported on a TPU host.
        libtpu_init_args=read_flags("LIBTPU_INIT_ARGS") if first.platform == "tpu" else "",
    )


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh of the devices, in this order, along the tensor-parallel axis."""
    return Mesh(np.array(devices), (MESH_AXIS,))


def make_sharding(mesh_axes: MeshAxes, devices: Sequence[jax.Device]) -> Sharding:
    """Returns the JAX sharding of an array. A single device gets no mesh, because JAX dispatches that faster."""
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(make_mesh(devices), PartitionSpec(*mesh_axes))


def _attached_topology(platform_name: str) -> str:
    """Returns the name of the attached TPU slice, "" for other platforms.

    All attached devices count, used or not: an executable depends on how the chips are linked.
    """
    if platform_name != "tpu":
        return ""
    devices = jax.devices(platform_name)
    sides = zip(*(_coordinates(device)[:3] for device in devices), strict=True)
    found = find_topology(
        devices[0].device_kind, tuple(max(side) - min(side) + 1 for side in sides)
    )
    return found.name if found and found.devices == len(devices) else ""


def _coordinates(device: jax.Device) -> tuple[int, ...]:
    """Returns x, y, z and core of a TPU device, the id of any other device."""
    return (*device.coords, device.core_on_chip) if device.platform == "tpu" else (device.id,)


def _position(device: jax.Device) -> tuple[int, ...]:
    """Sort key: the order in which libtpu numbers devices, x first."""
    *place, core = _coordinates(device)
    return (*reversed(place), core)
