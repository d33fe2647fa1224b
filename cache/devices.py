"""The devices that JAX sees, and the environment that they make up."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType
from msgspec import structs

from dflash_aot.cache.environment import (
    VIRTUAL_DEVICES_FLAG,
    Environment,
    is_tpu_attached,
    read_flags,
    read_host_environment,
)
from dflash_aot.cache.topology import find_topology


def read_environment(platform_name: str, device_count: int = 1) -> Environment:
    """This process's environment on `attached_devices`; starts JAX. Raises RuntimeError, as that does."""
    devices = attached_devices(platform_name, device_count)
    topology = _attached_topology(devices[0].platform)
    return make_environment(devices, topology)


def attached_devices(platform_name: str, device_count: int = 1) -> tuple[jax.Device, ...]:
    """The first devices, by their coordinates, in the order of their mesh; starts JAX.

    Raises RuntimeError, in words for users, where the platform is not there or has fewer devices.
    """
    if platform_name == "tpu" and not is_tpu_attached():
        raise RuntimeError("no TPU is attached: no /dev/accel*, and no /dev/vfio/<n> with a PCI device of Google's")
    devices = jax.devices(platform_name)
    if any(device.process_index for device in devices):
        raise RuntimeError(f"these {len(devices)} devices belong to several hosts, which is not supported")
    if len(devices) < device_count:
        remedy = f". XLA_FLAGS={VIRTUAL_DEVICES_FLAG}={device_count} makes so many" if platform_name == "cpu" else ""
        raise RuntimeError(f"{device_count} {platform_name} devices are needed, here are {len(devices)}{remedy}")
    return order_in_mesh(sorted(devices, key=_position)[:device_count])


def order_in_mesh(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """As `jax.make_mesh` lays them along one axis: on a TPU it follows the links between chips where it can."""
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    return tuple(mesh.devices.flat)


def make_environment(devices: Sequence[jax.Device], topology: str) -> Environment:
    """Of these devices, attached or described, in this order."""
    first = devices[0]
    return Environment(
        **structs.asdict(read_host_environment(first.platform)),
        platform=first.platform,
        platform_version=first.client.platform_version,
        device_kind=first.device_kind,
        topology=topology,
        device_count=len(devices),
        coordinates=tuple(",".join(map(str, _coordinates(device))) for device in devices),
        # JAX itself adds to these on a TPU host, when it is imported.
        libtpu_init_args=read_flags("LIBTPU_INIT_ARGS") if first.platform == "tpu" else "",
    )


def _attached_topology(platform_name: str) -> str:
    """The slice that all attached devices are, used or not: executables know how chips are linked. "" for others."""
    if platform_name != "tpu":
        return ""
    devices = jax.devices(platform_name)
    sides = zip(*(_coordinates(device)[:3] for device in devices), strict=True)
    found = find_topology(devices[0].device_kind, tuple(max(side) - min(side) + 1 for side in sides))
    return found.name if found and found.devices == len(devices) else ""


def _coordinates(device: jax.Device) -> tuple[int, ...]:
    """x, y, z and core of a TPU's; others have an id."""
    return (*device.coords, device.core_on_chip) if device.platform == "tpu" else (device.id,)


def _position(device: jax.Device) -> tuple[int, ...]:
    """Sorts devices as libtpu counts them: x first."""
    *place, core = _coordinates(device)
    return (*reversed(place), core)
