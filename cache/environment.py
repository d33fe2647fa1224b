"""What an executable depends on besides its program: compared field by field before anything is loaded."""

import os
import platform
import re
from pathlib import Path

import jax
import jaxlib
import msgspec

# The flags of a processor that change which instructions may be emitted; the rest of /proc/cpuinfo is noise.
INSTRUCTION_SETS = re.compile(
    r"(sse|ssse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|aes|vaes|pclmul|vpclmul|gfni|sha|asimd|neon|sve|bf16|i8mm)\w*"
)


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine as the compiler sees it."""

    jax: str
    jaxlib: str
    platform: str
    platform_version: str
    device_kind: str
    device_count: int
    machine: str
    cpu_features: tuple[str, ...]
    xla_flags: str


class Difference(msgspec.Struct, frozen=True):
    """One field that does not fit: what the bundle was built for, what is here."""

    field: str
    built: str
    here: str


def read_environment(platform_name: str) -> Environment:
    """This process's environment on one platform; starts JAX. Raises RuntimeError where there is no such device."""
    device = jax.devices(platform_name)[0]
    return Environment(
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        platform=device.platform,
        platform_version=device.client.platform_version,
        device_kind=device.device_kind,
        device_count=1,
        machine=platform.machine(),
        cpu_features=_cpu_features() if device.platform == "cpu" else (),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
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
            found.append(Difference(field, str(old), str(new)))
    return found


def _cpu_features() -> tuple[str, ...]:
    """Instruction sets of the first processor, sorted; none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return tuple(sorted(flag for flag in flags.split() if INSTRUCTION_SETS.fullmatch(flag)))
