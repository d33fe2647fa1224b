"""Builds as processes that are killed at any moment."""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import find_blob_flaw, pack_blob
from dflash_aot.cache.bundle.manifest import Entry, encode_manifest, read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import find_file_flaws
from dflash_aot.cache.files.atomic_files import list_temporary_files
from tests.cache.toy_builder import Order, Outcome

REPOSITORY = Path(__file__).parents[2]
MOMENTS = 20


@pytest.fixture(scope="module")
def run_builder() -> Iterator[Callable[[Order], Outcome]]:
    command = [sys.executable, "-m", "tests.cache.toy_builder"]
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
    """Checks that all blobs of the manifest and of all build records are there."""
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
