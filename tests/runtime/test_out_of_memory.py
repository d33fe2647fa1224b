"""Lack of memory while an engine serves: each request ends once, with its tokens or with an error of ours.

The limits are those of a process of its own (RLIMIT_AS), lowered while it serves.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_aot.cache.errors import IncompatibleBundle
from dflash_aot.runtime import Engine
from dflash_aot.runtime.executables.executable import MAPPINGS_LIMIT, is_out_of_memory
from tests.runtime.toy import ToyEngine


@pytest.mark.slow
def test_engine_without_memory_goes_on_or_ends_typed(bundle):
    command = [sys.executable, "-m", "tests.runtime.run_out_of_memory", str(bundle("served"))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # libtpu would look for its TPU for minutes
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert report.pop("opening").startswith("IncompatibleBundle: ")
    asked, slots = 4, 4  # requests of `ASKED`, rows of the largest batch
    ended = asked  # the expected answers
    for limit in report.values():
        assert limit["ends"].keys() <= {"right", "EngineFailed"} and sum(limit["ends"].values()) == 2 * asked
        ended += 2 * asked + (0 if limit["failure"] else asked)
        assert sum(limit["finished"].values()) == ended
        assert limit["compiles"] == 0
    much, little, none = (report[name] for name in ("much", "little", "none"))
    assert much["ends"] == {"right": 2 * asked}
    assert 1 <= little["ends"]["EngineFailed"] <= slots, "only requests in a slot fail"
    assert much["after"] == little["after"] == {"right": asked} and much["failure"] is little["failure"] is None
    assert none["ends"].keys() == none["after"].keys() == {"EngineFailed"}
    assert "3 engine steps failed in a row" in none["failure"] and "leaves less than" in none["failure"]


@contextmanager
def take_mappings() -> Iterator[None]:
    """Takes all memory mappings of this process but a thousand."""
    limit, page = int(MAPPINGS_LIMIT.read_text()), mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    libc.mmap.restype, size = ctypes.c_void_p, limit * page
    start = libc.mmap(None, ctypes.c_size_t(size), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    try:
        for number in range((limit - Path("/proc/self/maps").read_bytes().count(b"\n") - 1000) // 2):
            libc.mprotect(ctypes.c_void_p(start + 2 * number * page), ctypes.c_size_t(page), mmap.PROT_READ)
        yield
    finally:
        libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size))


@pytest.mark.skipif(not MAPPINGS_LIMIT.exists(), reason="only Linux limits the mappings of a process")
def test_engine_keeps_the_limit_of_memory_mappings(bundle):
    refusal = r"memory mappings that Linux allows it, .* and \d+ more are needed. Raise the limit: sysctl --write vm"
    path = bundle("tiny")
    with Engine.open(path, k=0) as other:
        with take_mappings(), pytest.raises(IncompatibleBundle, match=refusal) as refused:
            Engine.open(path, preload=True)
        assert f"Open in this process, close it if it is not needed: {other!r}" in str(refused.value)
    Engine.open(path).close()


def test_delta_is_sent_again_where_memory_was_short():
    engine = ToyEngine("batch=1 length=64 k=0 prefill=4", k=0)
    request, waiting = engine.submit([1], 9), engine.submit([2], 9)
    emit, failures = request.emit, [MemoryError("none is left")]

    def emit_without_memory(delta):
        if failures:
            raise failures.pop()
        emit(delta)

    request.emit = emit_without_memory
    engine.run()
    assert (request.output.finish_reason, waiting.output.finish_reason) == ("error", "length")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5242880 bytes."), True),
        (RuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 3751952 bytes."), True),
        (RuntimeError("INTERNAL: no such program"), False),
    ],
)
def test_lack_of_memory_is_recognized(error, expected):
    assert is_out_of_memory(error) == expected
