"""How long this process has been running, by the kernel's clock."""

import os
import time
from pathlib import Path


def seconds_since_process_start() -> float:
    """Since the kernel started this process, the interpreter's own start included."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):  # not Linux
        return time.process_time()
