"""Environment of an executable: compiler versions, devices, CPU features and flags, compared before loading.

JAX is not imported here; `devices` reads from JAX what only JAX knows.
"""

import importlib.metadata
import os
import platform
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from dflash_aot.cache.errors import BadInput

# CPU flags that change which instructions the compiler may emit; the other flags of /proc/cpuinfo do not matter.
INSTRUCTION_SETS = re.compile(
    r"(sse|ssse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|aes|vaes|pclmul|vpclmul|gfni|sha|asimd|neon|sve|bf16|i8mm)\w*"
)
VIRTUAL_DEVICES_FLAG = "--xla_force_host_platform_device_count"
GOOGLE_PCI_VENDOR = "0x1ae0"


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an executable depends on in addition to its program: compiler, devices in mesh order, flags.

    Attributes:
        jax, jaxlib: versions.
        libtpu: version, "" for other platforms.
        platform: as JAX names it.
        platform_version: the full text of the PJRT client.
        device_kind: as JAX names it.
        topology: the TPU slice that the devices belong to, "" for other platforms.
        device_count: devices in use.
        hosts: whose devices these are, each served by one process.
        coordinates: x, y, z and core of each TPU device, the ids of other devices.
        machine: CPU architecture, "" for TPU.
        cpu_features: instruction sets, for CPU only.
        xla_flags: XLA_FLAGS without the number of virtual devices.
        libtpu_init_args: LIBTPU_INIT_ARGS, for TPU only.

    Not verified on a TPU: that a described device and a TPU VM with the same libtpu have the same `platform_version`
    (JAX compares the two itself before it compiles for a described device; jaxlib 0.10 begins both with a line "PJRT C
    API", jaxlib 0.12 neither), and that coordinates on a TPU VM start at 0.
    """

    jax: str
    jaxlib: str
    libtpu: str
    platform: str
    platform_version: str
    device_kind: str
    topology: str
    device_count: int
    hosts: int
    coordinates: tuple[str, ...]
    machine: str
    cpu_features: tuple[str, ...]
    xla_flags: str
    libtpu_init_args: str


class HostEnvironment(msgspec.Struct, frozen=True):
    """The fields of `Environment` that are known before JAX starts."""

    jax: str
    jaxlib: str
    libtpu: str
    machine: str
    cpu_features: tuple[str, ...]
    xla_flags: str


class EnvironmentDifference(msgspec.Struct, frozen=True):
    """A field of the environment in which a bundle does not fit this machine.

    Attributes:
        field: name in `Environment`.
        built: the bundle's value.
        here: this machine's value.
    """

    field: str
    built: str
    here: str


def read_host_environment(platform_name: str) -> HostEnvironment:
    """Returns this machine's fields for a platform; "" and () for fields that its executables do not depend on."""
    on_tpu = platform_name == "tpu"
    return HostEnvironment(
        jax=installed_version("jax"),
        jaxlib=jaxlib_version(),
        libtpu=libtpu_version() if on_tpu else "",
        machine=""
        if on_tpu
        else platform.machine(),  # no part of a TPU executable runs on the host
        cpu_features=_cpu_features() if platform_name == "cpu" else (),
        # The number of virtual CPU devices is compared as `device_count`.
        xla_flags=read_flags("XLA_FLAGS", without=VIRTUAL_DEVICES_FLAG),
    )


def name_python(jax: str) -> str:
    """Returns the Python under which this project installs a version of JAX, as pyproject.toml requires it."""
    return "Python 3.11" if jax.startswith("0.10.") else "Python 3.12 or later"


def describe_install(built: Environment, found: Sequence["EnvironmentDifference"]) -> str | None:
    """Returns which installation fits an environment, as text; None where no version is among the differences."""
    packages = ("jax", "jaxlib", "libtpu")
    if not {one.field for one in found} & {*packages}:
        return None
    pinned = " ".join(
        f"{name}=={version}" for name in packages if (version := getattr(built, name))
    )
    here = f"{platform.python_version()} with JAX {installed_version('jax')}"
    return (
        f"It was built with {name_python(built.jax)}'s JAX {built.jax}; here is Python {here}. An installation that "
        f"fits: {name_python(built.jax)} with {pinned}"
    )


def find_differences(built: Environment, here: Environment) -> list[EnvironmentDifference]:
    """Returns every field in which an executable does not fit this machine. Additional CPU features are allowed."""
    found = []
    for field in Environment.__struct_fields__:
        old = getattr(built, field)
        new = getattr(here, field)
        if field == "cpu_features":
            if missing := sorted(set(old) - set(new)):
                found.append(
                    EnvironmentDifference(
                        field, f"uses {' '.join(missing)}", "not on this processor"
                    )
                )
        elif old != new:
            found.append(EnvironmentDifference(field, _format_value(old), _format_value(new)))
    return found


def compare_with_host(built: Environment) -> tuple[list[EnvironmentDifference], list[str]]:
    """Returns the differences that are visible before JAX starts, and the names of the fields that are not."""
    known: dict[str, object] = structs.asdict(read_host_environment(built.platform))
    if built.platform != "tpu":
        known |= {"topology": "", "libtpu_init_args": ""}
    elif not is_tpu_attached():
        known["platform"] = "no TPU is attached"
    if built.platform == "cpu":
        known |= {"platform": "cpu", "platform_version": "cpu", "device_kind": "cpu"}
        if built.device_count == 1:  # every machine has one CPU device
            known |= {"device_count": 1, "hosts": 1, "coordinates": ("0",)}
    here = structs.replace(built, **known)
    return find_differences(built, here), [
        field for field in Environment.__struct_fields__ if field not in known
    ]


def is_tpu_attached(
    files: Path = Path("/dev"), devices: Path = Path("/sys/bus/pci/devices")
) -> bool:
    """Whether a TPU is attached, according to device files. Asking libtpu would take time and print messages.

    vfio/ has files for every device that a host passes through, so that the PCI vendor is checked too, as JAX does.
    """
    if any(files.glob("accel[0-9]*")):
        return True
    vendors = (vendor.read_text().strip() for vendor in devices.glob("*/vendor"))
    return any(files.glob("vfio/[0-9]*")) and GOOGLE_PCI_VENDOR in vendors


def read_flags(variable: str, without: str | None = None) -> str:
    """Returns the flags in an environment variable, in order; not those that begin with `without`.

    Raises BadInput for the name of a file, from which XLA would read flags: no executable's key would have them.
    """
    flags = os.environ.get(variable, "").split()
    if flags and not flags[0].startswith("--"):
        raise BadInput(
            f"{variable} names the file {flags[0]!r} instead of flags. The flags must be known: set them in {variable} "
            f"itself, {variable}=\"$(tr '\\n' ' ' < {shlex.quote(flags[0])})\""
        )
    return " ".join(flag for flag in flags if without is None or not flag.startswith(without))


def installed_version(package: str) -> str:
    """Returns the version of a package, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def libtpu_version() -> str:
    """Returns the version of libtpu, "" if the package is not installed."""
    return installed_version("libtpu")


def jaxlib_version() -> str:
    """Returns the version of jaxlib, "" if the package is not installed."""
    return installed_version("jaxlib")


def _format_value(value: str | int | tuple[str, ...]) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _cpu_features() -> tuple[str, ...]:
    """Returns the sorted instruction sets of the first processor, () on systems without /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next(
        (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), ""
    )
    return tuple(sorted(flag for flag in flags.split() if INSTRUCTION_SETS.fullmatch(flag)))
