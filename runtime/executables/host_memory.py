"""Host memory that the limits of this process leave, looked at before code that aborts the process without memory.

XLA and LLVM are built without exceptions: where an allocation fails in one of their threads, the process ends.
"""

import mmap
import resource
import time

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.units import format_bytes

LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
RESERVE = 8 << 20  # bytes: for the threads of the runtime, and to end requests and report the failure
ROUNDS_IN_FLIGHT = 2
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


def has_host_memory(size: int) -> bool:
    """Whether the limits of this process leave `size` bytes. True without a limit: the kernel then ends processes."""
    if all(resource.getrlimit(limit)[0] == resource.RLIM_INFINITY for limit in LIMITS):
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
