"""What Ray has started below a process, found by what it calls itself."""

import os
import time
from pathlib import Path

PATIENCE = 120  # seconds; never waited for where all is well


def find_running(name: str, root: int | None = None) -> list[int]:
    """Processes below `root`, this one if not said, that run a task or an actor of this name."""
    root = root or os.getpid()
    parents, titles = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat, title = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        parents[int(entry.name)], titles[int(entry.name)] = int(stat.rpartition(")")[2].split()[1]), title

    def is_below(process: int) -> bool:
        return process == root or (process in parents and is_below(parents[process]))

    return [one for one, title in titles.items() if title.startswith(f"ray::{name}".encode()) and is_below(one)]


def wait_for_running(name: str, root: int | None = None, count: int = 1) -> list[int]:
    """As soon as there are so many, or none any more where that is 0."""
    end = time.monotonic() + PATIENCE
    while True:
        found = find_running(name, root)
        if len(found) >= count and (count or not found):
            return found
        assert time.monotonic() < end, f"{len(found)} of {count} run {name}"
        time.sleep(0.01)
