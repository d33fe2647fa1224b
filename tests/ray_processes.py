"""Finds Ray's worker processes below a process, by the task or actor in their process title."""

import os
import time
from pathlib import Path

TIMEOUT = 120  # seconds


def find_running(name: str, root: int | None = None) -> list[int]:
    """Ids of processes below `root` (default: this process) that run a task or an actor of this name."""
    root = root or os.getpid()
    parents, titles = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat, title = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
            continue
        parents[int(entry.name)], titles[int(entry.name)] = int(stat.rpartition(")")[2].split()[1]), title

    def is_below(process: int) -> bool:
        return process == root or (process in parents and is_below(parents[process]))

    named = [process for process, title in titles.items() if title.startswith(f"ray::{name}".encode())]
    return [process for process in named if is_below(process)]


def wait_for_running(name: str, root: int | None = None, count: int = 1) -> list[int]:
    """Waits until `count` such processes run, or until none runs if `count` is 0; returns their ids."""
    end = time.monotonic() + TIMEOUT
    while True:
        found = find_running(name, root)
        if len(found) >= count and (count or not found):
            return found
        assert time.monotonic() < end, f"{len(found)} of {count} processes run {name}"
        time.sleep(0.01)
