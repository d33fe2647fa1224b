"""Builds as processes that are killed at any moment.

As a program, this module reads an order per line, builds in a process, and writes a line with the outcome.
"""

import inspect
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import find_blob_flaw, pack_blob, unpack_blob
from dflash_aot.cache.bundle.manifest import Entry, Manifest, encode_manifest, read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import find_file_flaws
from dflash_aot.cache.files.atomic_files import list_temporary_files

REPOSITORY = Path(__file__).parents[2]
MOMENTS = 20


PACKAGES = {Path(inspect.getfile(one)).parent for one in (Store, list_temporary_files)}


class Order(msgspec.Struct, frozen=True):
    """A bundle to build.

    blobs: packed executable and program of each entry.
    killed_at: the process sends itself SIGKILL at this line, counted in `cache.bundle` and `cache.files` without the
        pickle scan.
    """

    bundle: str
    manifest: Manifest
    blobs: list[tuple[bytes, bytes]]
    killed_at: int | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The end of a process: exit code, keys of the built executables, lines that ran."""

    code: int
    built: list[str] = []
    lines: int = 0


class Lines:
    """Counts the lines of `cache.bundle` and `cache.files` that run, and kills the process at one of them."""

    def __init__(self, last: int | None):
        self.count, self._last = 0, last

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        file = Path(frame.f_code.co_filename)
        if file.parent not in PACKAGES or file.stem.startswith(
            "pickle_"
        ):  # the scan writes nothing, in thousands of lines
            return None
        if event == "line":
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def build(order: Order) -> Outcome:
    """Finds or adds each executable and publishes the manifest, as the compilation manager does."""
    lines, store, built = Lines(order.killed_at), Store(Path(order.bundle)), []
    sys.settrace(lines.trace)
    try:
        with store.open_for_building():
            for entry, (executable, program) in zip(order.manifest.entries, order.blobs, strict=True):
                if store.find(entry.key, entry.signature, unpack_blob(entry.program, program)) is None:
                    store.add(entry, executable, program)
                    built.append(entry.key)
            store.publish(order.manifest)
    finally:
        sys.settrace(None)
    return Outcome(0, built, lines=lines.count)


def run(order: Order) -> Outcome:
    """Runs an order. A killed process has an outcome without keys."""
    answer, say = os.pipe()
    if (child := os.fork()) == 0:
        _end(order, say)
    os.close(say)
    with os.fdopen(answer, "rb") as file:
        content = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return msgspec.json.decode(content, type=Outcome) if content else Outcome(code)


def _end(order: Order, say: int) -> NoReturn:
    """Runs an order in a child process and exits, whatever happens."""
    try:
        os.write(say, msgspec.json.encode(build(order)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.fixture(scope="module")
def run_builder() -> Iterator[Callable[[Order], Outcome]]:
    command = [sys.executable, "-m", "tests.cache.test_builders"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=REPOSITORY, **pipes) as process:

        def run(order: Order) -> Outcome:
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
            return msgspec.json.decode(process.stdout.readline(), type=Outcome)

        yield run
        process.stdin.close()


@pytest.fixture
def order(manifest, blobs, texts) -> Callable[..., Order]:
    def make(bundle: Path, entries: slice, killed_at: int | None = None) -> Order:
        packed = [(pack_blob(blob)[1], pack_blob(text)[1]) for blob, text in zip(blobs, texts, strict=True)]
        fewer = structs.replace(manifest, entries=manifest.entries[entries])
        return Order(str(bundle), fewer, packed[entries], killed_at)

    return make


def keys(entries: tuple[Entry, ...]) -> list[str]:
    return [entry.key for entry in entries]


def read_records(bundle: Path) -> dict[str, Entry]:
    records = (bundle / "entries").glob("*.json")
    return {record.stem: msgspec.json.decode(record.read_bytes(), type=Entry) for record in records}


def find_temporaries(bundle: Path) -> list[Path]:
    return [path for folder in (bundle, *bundle.glob("*/")) for path in list_temporary_files(folder)]


def assert_whole(bundle: Path) -> None:
    assert find_file_flaws(bundle, read_manifest(bundle)) == []
    store = Store(bundle)
    for entry in read_records(bundle).values():
        for blob, path in ((entry, store.executable_path(entry)), (entry.program, store.program_path(entry))):
            assert find_blob_flaw(blob, path.read_bytes()) is None


def test_killed_build_leaves_a_readable_bundle_and_is_continued(run_builder, order, tmp_path):
    """The bundle has one executable of three. The moments are lines of our code, the same in every run."""
    old, new = order(tmp_path / "template", slice(1)), order(tmp_path / "whole", slice(3))
    run_builder(old)
    shutil.copytree(old.bundle, new.bundle)
    whole = run_builder(new)
    assert (whole.code, whole.built) == (0, keys(new.manifest.entries[1:]))
    readable = {encode_manifest(old.manifest), encode_manifest(new.manifest)}
    seen, left = set(), set()
    for moment in [*random.Random(6).sample(range(1, whole.lines), MOMENTS), whole.lines]:
        bundle = tmp_path / str(moment)
        shutil.copytree(old.bundle, bundle)
        killed = run_builder(order(bundle, slice(3), killed_at=moment))
        assert killed.code == -9
        content = (bundle / "manifest.json").read_bytes()
        assert content in readable
        assert_whole(bundle)
        seen.add(content)
        left |= {path.parent.name for path in find_temporaries(bundle)}
        missing = [key for key in keys(new.manifest.entries) if key not in read_records(bundle)]
        resumed = run_builder(order(bundle, slice(3)))
        assert (resumed.code, resumed.built) == (0, missing)
        assert (bundle / "manifest.json").read_bytes() == encode_manifest(new.manifest)
        assert_whole(bundle)
        assert find_temporaries(bundle) == []
    assert seen == readable and left  # among the moments were some behind the end, and some in the middle of a file


if __name__ == "__main__":
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(run(msgspec.json.decode(line, type=Order))) + b"\n")
        sys.stdout.buffer.flush()
