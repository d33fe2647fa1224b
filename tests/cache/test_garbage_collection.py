"""Garbage collection: which files are removed, and which are kept."""

import os
import time

import pytest
from msgspec import structs

from dflash_aot.bin.bundle_changes import find_garbage, remove_garbage
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import find_file_flaws

HOUR = 3600.0


@pytest.fixture
def bundle(store, manifest):
    store.publish(structs.replace(manifest, entries=manifest.entries[:-2]))
    return store.bundle


def find(bundle, now=None) -> dict[str, float]:
    found = find_garbage(bundle, read_manifest(bundle), time.time() if now is None else now)
    return {str(one.path.relative_to(bundle)): one.age for one in found}


def test_unreferenced_files_are_garbage_records_first(bundle, manifest):
    left = manifest.entries[-2:]
    assert list(find(bundle)) == [
        *sorted(f"entries/{entry.key}.json" for entry in left),
        *sorted(f"executables/{entry.sha256}" for entry in left),
        *sorted(f"programs/{entry.program.sha256}" for entry in left),
    ]


def test_bundle_is_whole_after_garbage_collection(bundle, texts):
    manifest = read_manifest(bundle)
    remove_garbage(find_garbage(bundle, manifest, time.time()))
    assert find(bundle) == {} and find_file_flaws(bundle, manifest) == []
    for entry, text in zip(manifest.entries, texts, strict=False):
        assert Store(bundle).find(entry.key, entry.signature, text) == entry


def test_shared_blobs_are_not_garbage(bundle, manifest):
    shared = structs.replace(manifest.entries[-1], program=manifest.entries[0].program)
    Store(bundle).write_record(shared)
    assert f"programs/{manifest.entries[0].program.sha256}" not in find(bundle)


def test_quarantined_and_temporary_files_are_garbage(bundle, manifest):
    folder = bundle / "executables" / manifest.entries[0].sha256
    folder.unlink()
    folder.mkdir()
    (folder / "inside").write_bytes(b"12345")
    place = Store(bundle).quarantine(manifest.entries[0], "bytes", "a directory")
    for name in (".x.unfinished", "programs/.x.unfinished"):
        (bundle / name).touch()
    found = find_garbage(bundle, read_manifest(bundle), time.time())
    assert next(one.bytes for one in found if one.path == place) == 5
    remove_garbage(found)
    assert list((bundle / "quarantine").iterdir()) == []
    assert not (bundle / ".x.unfinished").exists() and not (bundle / "programs/.x.unfinished").exists()


def test_foreign_files_are_not_garbage(bundle, tmp_path):
    before = list(find(bundle))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ("1" * 64)).touch()
    (bundle / "executables" / "notes.txt").touch()
    (bundle / "executables" / ("2" * 64)).mkdir()
    (bundle / "notes").mkdir()
    (bundle / "notes" / ("3" * 64)).touch()
    (bundle / "quarantine").symlink_to(outside)
    (bundle / ".nfs0001").touch()
    assert list(find(bundle)) == before


def test_link_is_removed_without_its_target(bundle, tmp_path):
    (tmp_path / "precious").write_text("data")
    (bundle / "executables" / ("1" * 64)).symlink_to(tmp_path / "precious")
    remove_garbage(find_garbage(bundle, read_manifest(bundle), time.time()))
    assert not os.path.lexists(bundle / "executables" / ("1" * 64))
    assert (tmp_path / "precious").read_text() == "data"


def test_blob_is_no_older_than_its_dropping_manifest(bundle):
    for path in (bundle / "executables").iterdir():
        os.utime(path, (0, 0))
    published = (bundle / "manifest.json").stat().st_ctime
    # Setting a file's time is a change itself, a moment after the manifest was written.
    assert all(HOUR / 2 < age <= HOUR + 1e-3 for age in find(bundle, now=published + HOUR).values())
