"""Builds as processes that are killed at any moment."""

import inspect
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import find_blob_flaw, pack_blob, unpack_blob
from dflash_aot.cache.bundle.manifest import Entry, Manifest, encode_manifest, read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import find_file_flaws
from dflash_aot.cache.files.atomic_files import list_temporary_files

FORKS = multiprocessing.get_context("forkserver")  # a fork of this process would have the threads of JAX
FORKS.set_forkserver_preload([__name__])
MOMENTS = 20


PACKAGES = {Path(inspect.getfile(one)).parent for one in (Store, list_temporary_files)}


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


@dataclass(frozen=True)
class Build:
    """A bundle to build. blobs: packed executable and program of each entry."""

    bundle: Path
    manifest: Manifest
    blobs: list[tuple[bytes, bytes]]

    def run(self, killed_at: int | None = None) -> tuple[int | None, list[str], int]:
        """In a process that sends itself SIGKILL at a line of `cache.bundle` and `cache.files`, counted without the
        pickle scan. Returns its exit code, the keys of what it built, and the lines that ran: none if it was killed.
        """
        receiver, sender = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=self._build, args=(killed_at, sender))
        process.start()
        sender.close()
        built, lines = [], 0
        with suppress(EOFError):
            built, lines = receiver.recv()
        process.join()
        return process.exitcode, built, lines

    def _build(self, killed_at: int | None, sender: Connection) -> None:
        """Finds or adds each executable and publishes the manifest, as the compilation manager does."""
        lines, store, built = Lines(killed_at), Store(self.bundle), []
        sys.settrace(lines.trace)
        with store.open_for_building():
            for entry, (executable, program) in zip(self.manifest.entries, self.blobs, strict=True):
                if store.find(entry.key, entry.signature, unpack_blob(entry.program, program)) is None:
                    store.add(entry, executable, program)
                    built.append(entry.key)
            store.publish(self.manifest)
        sys.settrace(None)
        sender.send((built, lines.count))


@pytest.fixture
def plan(manifest, blobs, texts) -> Callable[[Path, int], Build]:
    """A directory and a number of entries → the build of the first of them."""

    def make(bundle: Path, count: int) -> Build:
        packed = [(pack_blob(blob)[1], pack_blob(text)[1]) for blob, text in zip(blobs, texts, strict=True)]
        return Build(bundle, structs.replace(manifest, entries=manifest.entries[:count]), packed[:count])

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


def test_killed_build_leaves_a_readable_bundle_and_is_continued(plan, tmp_path):
    """The bundle has one executable of three. The moments are lines of our code, the same in every run."""
    old, new = plan(tmp_path / "template", 1), plan(tmp_path / "whole", 3)
    old.run()
    shutil.copytree(old.bundle, new.bundle)
    code, built, lines = new.run()
    assert (code, built) == (0, keys(new.manifest.entries[1:]))
    readable = {encode_manifest(old.manifest), encode_manifest(new.manifest)}
    seen, left = set(), set()
    for moment in [*random.Random(6).sample(range(1, lines), MOMENTS), lines]:
        build = plan(tmp_path / str(moment), 3)
        shutil.copytree(old.bundle, build.bundle)
        assert build.run(killed_at=moment)[0] == -signal.SIGKILL
        content = (build.bundle / "manifest.json").read_bytes()
        assert content in readable
        assert_whole(build.bundle)
        seen.add(content)
        left |= {path.parent.name for path in find_temporaries(build.bundle)}
        missing = [key for key in keys(new.manifest.entries) if key not in read_records(build.bundle)]
        assert build.run()[:2] == (0, missing)
        assert (build.bundle / "manifest.json").read_bytes() == encode_manifest(new.manifest)
        assert_whole(build.bundle)
        assert find_temporaries(build.bundle) == []
    assert seen == readable and left  # among the moments were some behind the end, and some in the middle of a file
