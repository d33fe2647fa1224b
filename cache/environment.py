"""What an executable depends on besides its program: compared field by field before anything is loaded.

Nothing here needs JAX: `devices` asks it for the rest.
"""

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import msgspec
from msgspec import structs

# The flags of a processor that change which instructions may be emitted; the rest of /proc/cpuinfo is noise.
INSTRUCTION_SETS = re.compile(
    r"(sse|ssse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|aes|vaes|pclmul|vpclmul|gfni|sha|asimd|neon|sve|bf16|i8mm)\w*"
)
VIRTUAL_DEVICES_FLAG = "--xla_force_host_platform_device_count"
GOOGLE_PCI_VENDOR = "0x1ae0"  # the vendor of a TPU on the PCI bus


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


class HostEnvironment(msgspec.Struct, frozen=True):
    """The part of an `Environment` that is known before JAX starts."""

    jax: str
    jaxlib: str
    libtpu: str
    machine: str
    cpu_features: tuple[str, ...]
    xla_flags: str


class EnvironmentDifference(msgspec.Struct, frozen=True):
    """One field that does not fit: what the bundle was built for, what is here."""

    field: str
    built: str
    here: str


def read_host_environment(platform_name: str) -> HostEnvironment:
    """This machine, for executables of that platform; "" and () for what they don't depend on."""
    on_tpu = platform_name == "tpu"
    return HostEnvironment(
        jax=_installed_version("jax"),
        jaxlib=_installed_version("jaxlib"),
        libtpu=libtpu_version() if on_tpu else "",
        machine="" if on_tpu else platform.machine(),  # nothing in an executable for TPU runs on its host
        cpu_features=_cpu_features() if platform_name == "cpu" else (),
        # How many devices are made of the processor is compared as what it leads to.
        xla_flags=read_flags("XLA_FLAGS", but=VIRTUAL_DEVICES_FLAG),
    )


def find_differences(built: Environment, here: Environment) -> list[EnvironmentDifference]:
    """Every field in which an executable built there does not fit here. More CPU features than needed are fine."""
    found = []
    for field in Environment.__struct_fields__:
        old, new = getattr(built, field), getattr(here, field)
        if field == "cpu_features":
            if missing := sorted(set(old) - set(new)):
                found.append(EnvironmentDifference(field, f"uses {' '.join(missing)}", "not on this processor"))
        elif old != new:
            found.append(EnvironmentDifference(field, _spell(old), _spell(new)))
    return found


def compare_with_host(built: Environment) -> tuple[list[EnvironmentDifference], list[str]]:
    """`differences` as far as they are known before JAX starts, and the fields that are known only then."""
    known: dict[str, object] = structs.asdict(read_host_environment(built.platform))
    if built.platform != "tpu":
        known |= {"topology": "", "libtpu_init_args": ""}
    elif not is_tpu_attached():
        known["platform"] = "no TPU is attached"
    if built.platform == "cpu":
        known |= {"platform": "cpu", "platform_version": "cpu", "device_kind": "cpu"}
        if built.device_count == 1:  # every machine has that one
            known |= {"device_count": 1, "coordinates": ("0",)}
    here = structs.replace(built, **known)
    return find_differences(built, here), [field for field in Environment.__struct_fields__ if field not in known]


def is_tpu_attached(files: Path = Path("/dev"), devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """By the files of its driver: asking libtpu where there is none takes time and writes to the terminal.

    Whatever a host passes through has files in vfio/, so there the vendor counts, as it does for JAX.
    """
    if any(files.glob("accel[0-9]*")):
        return True
    vendors = (vendor.read_text().strip() for vendor in devices.glob("*/vendor"))
    return any(files.glob("vfio/[0-9]*")) and GOOGLE_PCI_VENDOR in vendors


def read_flags(variable: str, but: str | None = None) -> str:
    """The flags in an environment variable, in its order; without those that begin with `but`."""
    return " ".join(flag for flag in os.environ.get(variable, "").split() if but is None or not flag.startswith(but))


def libtpu_version() -> str:
    """ "" where the package is not installed."""
    return _installed_version("libtpu")


def _spell(value: str | int | tuple[str, ...]) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_features() -> tuple[str, ...]:
    """Instruction sets of the first processor, sorted; none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return tuple(sorted(flag for flag in flags.split() if INSTRUCTION_SETS.fullmatch(flag)))
