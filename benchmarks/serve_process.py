"""dflash-serve in a process of its own, for as long as it is asked."""

import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dflash_aot.benchmarks.pairs import Pair
from dflash_aot.benchmarks.peer import LAST_LINES, PATIENCE, python_module
from dflash_aot.benchmarks.serve_traffic import ClientOrder
from dflash_aot.cache.errors import PeerFailed

KEY = "DFLASH_API_KEY"


@contextmanager
def open_server(bundle: Path, pair: Pair, k: int, max_waiting: int, max_under_way: int) -> Iterator[ClientOrder]:
    """Where it is, once it is ready. Raises PeerFailed where it ends before that, or does not end well."""
    flags = {
        "bundle": bundle,
        "target": pair.target,
        "draft": pair.draft,
        "k": k,
        "max_waiting": max_waiting,
        "max_per_key": max_under_way,
        "port": 0,
    }
    process = subprocess.Popen(
        [*python_module("dflash_aot.bin.serve"), *(f"--{name}={value}" for name, value in flags.items())],
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != KEY},  # somebody's keys are not for us
        process_group=0,  # Ctrl-C is for the parent
    )
    assert process.stderr
    try:
        lines: deque[str] = deque(maxlen=LAST_LINES)
        url = read_until_ready(process.stderr, lines)
        threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True).start()
        if url:
            yield ClientOrder(url, process.pid)
            process.send_signal(signal.SIGTERM)
        if process.wait(PATIENCE) or not url:
            words = "".join(f"\n  {line.rstrip()}" for line in lines)
            raise PeerFailed(f"dflash-serve ended with {process.returncode}. Its last lines:{words}")
    finally:
        process.kill()
        process.wait()


def read_until_ready(stderr: IO[str], lines: deque[str]) -> str | None:
    """Its address; None where it ends instead."""
    url = None
    for line in stderr:
        lines.append(line)
        if found := re.search(r"listening at (\S+)", line):
            url = found[1]
        if "ready after" in line:
            return url
    return None
