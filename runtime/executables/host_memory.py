"""Host memory and mappings that the limits of this process leave, looked at before code that ends it without them.

XLA and LLVM are built without exceptions: where an allocation fails in one of their threads, the process ends.
"""

import mmap
import resource
import time
from pathlib import Path

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.units import format_bytes

LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
RESERVE = 8 << 20  # bytes: for the threads of the runtime, and to end requests and report the failure
ROUNDS_IN_FLIGHT = 2
MAPPINGS_LIMIT = Path("/proc/sys/vm/max_map_count")
KERNEL = b"\x7fELF"  # XLA:CPU serializes each kernel as an object file of its own,
MAPPINGS_PER_KERNEL = 3  # and maps its code, constants and data separately
RESERVED_MAPPINGS = 2000  # for threads (two each) and large arrays
LOADING_FACTOR = 8  # memory for loading an executable over its serialized size; 1 to 4 was observed
POLL_SECONDS = 0.02


def estimate_step_bytes(manifest: Manifest) -> int:
    """Host memory that a step of the engine may allocate: on a CPU what the rounds in flight need, and the reserve."""
    if manifest.environment.platform != "cpu":
        return RESERVE
    calls = (entry.memory for entry in manifest.entries)
    largest = max(call.temporaries + call.outputs - call.aliased for call in calls)
    return RESERVE + ROUNDS_IN_FLIGHT * largest


def estimate_loading_bytes(serialized: int) -> int:
    """Host memory that loading an executable of `serialized` bytes may take."""
    return RESERVE + LOADING_FACTOR * serialized


def has_memory_limit() -> bool:
    """Whether the memory of this process is limited."""
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in LIMITS)


def has_host_memory(size: int) -> bool:
    """Whether the limits of this process leave `size` bytes. True without a limit: the kernel then ends processes."""
    if not has_memory_limit():
        return True
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


def require_host_memory(size: int, seconds: float = 0.0) -> None:
    """Waits up to `seconds` until the limits of this process leave `size` bytes. Raises MemoryError."""
    deadline = time.monotonic() + seconds
    while not has_host_memory(size):
        if time.monotonic() >= deadline:
            waited = f" after {seconds:g} s" if seconds else ""
            raise MemoryError(f"the limit of this process leaves less than {format_bytes(size)} of memory{waited}")
        time.sleep(POLL_SECONDS)


def require_mappings(serialized: bytes) -> None:
    """Checks that this process may map the kernels of a serialized executable for a CPU. Raises MemoryError.

    Linux lets a process have 65,530 mappings unless told otherwise. Where they end, LLVM crashes.
    """
    if not MAPPINGS_LIMIT.exists():  # another system than Linux
        return
    limit, mapped = int(MAPPINGS_LIMIT.read_text()), Path("/proc/self/maps").read_bytes().count(b"\n")
    needed = MAPPINGS_PER_KERNEL * serialized.count(KERNEL)
    if mapped + needed + RESERVED_MAPPINGS > limit:
        raise MemoryError(
            f"this process has {mapped} of the {limit} memory mappings that Linux allows it, {RESERVED_MAPPINGS} are "
            f"kept in reserve, and {needed} more are needed. Raise the limit: sysctl --write "
            f"vm.max_map_count={4 * limit}"
        )
