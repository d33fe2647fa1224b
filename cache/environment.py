"""What an executable depends on besides its program: compared field by field before anything is loaded."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib
import msgspec
from jax.sharding import AxisType

from dflash_aot.cache.topology import find_topology

# The flags of a processor that change which instructions may be emitted; the rest of /proc/cpuinfo is noise.
INSTRUCTION_SETS = re.compile(
    r"(sse|ssse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|aes|vaes|pclmul|vpclmul|gfni|sha|asimd|neon|sve|bf16|i8mm)\w*"
)
VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"
GOOGLE = "0x1ae0"  # the vendor of a TPU on the PCI bus


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some devices of one machine as the compiler sees them, in the order of their mesh.

    `topology` is the slice of which they are all or some, "" where that means nothing. `coordinates` are x, y, z and
    core of each TPU device, the ids of others.

    Not verified on a TPU: that `platform_version` of a described device is the one that a TPU VM with the same libtpu
    tells (JAX's sources show the same three lines for both), and that coordinates there start at 0.
    """

    jax: str
    jaxlib: str
    libtpu: str
    platform: str
    platform_version: str
    device_kind: str
    topology: str
    device_count: int
    coordinates: tuple[str, ...]
    machine: str
    cpu_features: tuple[str, ...]
    xla_flags: str
    libtpu_init_args: str


class Difference(msgspec.Struct, frozen=True):
    """One field that does not fit: what the bundle was built for, what is here."""

    field: str
    built: str
    here: str


def read_environment(platform_name: str, device_count: int = 1) -> Environment:
    """This process's environment on `attached_devices`; starts JAX. Raises RuntimeError, as that does."""
    devices = attached_devices(platform_name, device_count)
    topology = _attached_topology(devices[0].platform)
    return describe_environment(devices, topology)


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
        remedy = f". XLA_FLAGS={VIRTUAL_DEVICES}={device_count} makes so many" if platform_name == "cpu" else ""
        raise RuntimeError(f"{device_count} {platform_name} devices are needed, here are {len(devices)}{remedy}")
    return order_in_mesh(sorted(devices, key=_position)[:device_count])


def is_tpu_attached(files: Path = Path("/dev"), devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """By the files of its driver: asking libtpu where there is none takes time and writes to the terminal.

    Whatever a host passes through has files in vfio/, so there the vendor counts, as it does for JAX.
    """
    if any(files.glob("accel[0-9]*")):
        return True
    vendors = (vendor.read_text().strip() for vendor in devices.glob("*/vendor"))
    return any(files.glob("vfio/[0-9]*")) and GOOGLE in vendors


def libtpu_version() -> str:
    """ "" where the package is not installed."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def order_in_mesh(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """As `jax.make_mesh` lays them along one axis: on a TPU it follows the links between chips where it can."""
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    return tuple(mesh.devices.flat)


def describe_environment(devices: Sequence[jax.Device], topology: str) -> Environment:
    """Of these devices, attached or described, in this order."""
    first = devices[0]
    on_cpu, on_tpu = first.platform == "cpu", first.platform == "tpu"
    return Environment(
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        libtpu=libtpu_version() if on_tpu else "",
        platform=first.platform,
        platform_version=first.client.platform_version,
        device_kind=first.device_kind,
        topology=topology,
        device_count=len(devices),
        coordinates=tuple(",".join(map(str, _coordinates(device))) for device in devices),
        machine="" if on_tpu else platform.machine(),  # nothing in an executable for TPU runs on its host
        cpu_features=_cpu_features() if on_cpu else (),
        # How many devices are made of the processor is compared as what it leads to.
        xla_flags=_join_flags("XLA_FLAGS", but=VIRTUAL_DEVICES),
        # JAX itself adds to these on a TPU host, when it is imported.
        libtpu_init_args=_join_flags("LIBTPU_INIT_ARGS") if on_tpu else "",
    )


def differences(built: Environment, here: Environment) -> list[Difference]:
    """Every field in which an executable built there does not fit here. More CPU features than needed are fine."""
    found = []
    for field in Environment.__struct_fields__:
        old, new = getattr(built, field), getattr(here, field)
        if field == "cpu_features":
            if missing := sorted(set(old) - set(new)):
                found.append(Difference(field, f"uses {' '.join(missing)}", "not on this processor"))
        elif old != new:
            found.append(Difference(field, _spell(old), _spell(new)))
    return found


def _spell(value: str | int | tuple[str, ...]) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


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


def _join_flags(variable: str, but: str | None = None) -> str:
    """The flags in an environment variable, in its order; without those that begin with `but`."""
    return " ".join(flag for flag in os.environ.get(variable, "").split() if but is None or not flag.startswith(but))


def _cpu_features() -> tuple[str, ...]:
    """Instruction sets of the first processor, sorted; none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return tuple(sorted(flag for flag in flags.split() if INSTRUCTION_SETS.fullmatch(flag)))
