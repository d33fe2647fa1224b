"""Quarantine: corrupt files are moved with a record, and misbehaving executables are not built again."""

import os

import msgspec
import pytest

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.quarantine import QuarantineRecord, quarantine_file
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BuildFailed, CorruptBundle
from tests.cache.damage import cut, directory, fifo, flip


@pytest.fixture
def entry(manifest):
    return manifest.entries[2]


def read_records(store) -> dict[str, QuarantineRecord]:
    records = (store.bundle / "quarantine").glob("*.json")
    return {record.stem: msgspec.json.decode(record.read_bytes(), type=QuarantineRecord) for record in records}


def test_quarantined_file_is_unchanged_and_has_a_record(store, entry):
    content = store.executable_path(entry).read_bytes()
    path = store.quarantine(entry, "self_test", "target_k is 1.5, here 2.5")
    assert path.read_bytes() == content and not store.executable_path(entry).exists()
    assert read_records(store) == {
        f"{entry.sha256}.0": QuarantineRecord("self_test", f"executables/{entry.sha256}", "target_k is 1.5, here 2.5")
    }


def test_quarantine_replaces_no_file(store, entry):
    for turn in range(3):
        store.executable_path(entry).write_bytes(bytes([turn]))
        store.quarantine(entry, "bytes", str(turn))
    aside = store.bundle / "quarantine"
    (aside / f"{entry.sha256}.1.json").unlink()  # the file alone reserves its name
    store.executable_path(entry).write_bytes(b"more")
    assert store.quarantine(entry, "bytes", "more").name == f"{entry.sha256}.3"
    assert [(aside / f"{entry.sha256}.{turn}").read_bytes() for turn in range(4)] == [b"\0", b"\1", b"\2", b"more"]


def test_file_that_cannot_be_moved_stays_without_a_record(store, entry, tmp_path):
    with pytest.raises(OSError):
        quarantine_file(store.bundle, store.bundle, "bytes", "a directory into itself")
    assert read_records(store) == {}
    (tmp_path / "full" / "executables").mkdir(parents=True)
    (tmp_path / "full" / "quarantine").touch()
    with pytest.raises(OSError):
        Store(tmp_path / "full").quarantine(entry, "bytes", "nowhere to go")


@pytest.mark.parametrize("kind", ["self_test", "crash"])
def test_quarantined_executable_is_not_added_again(find, store, manifest, blobs, texts, entry, kind):
    executable, program = pack_blob(blobs[2])[1], pack_blob(texts[2])[1]
    store.quarantine(entry, kind, "signal 11 in draft")
    assert find(store, entry) is None
    with pytest.raises(BuildFailed, match=rf"\({kind}\): signal 11 in draft.*remove .*{entry.sha256}.0.json and build"):
        store.add(entry, executable, program)
    assert find(store, entry) is None
    other = manifest.entries[3]
    store.add(other, pack_blob(blobs[3])[1], pack_blob(texts[3])[1])
    (store.bundle / "quarantine" / f"{entry.sha256}.0.json").unlink()
    store.add(entry, executable, program)
    assert find(store, entry) == entry


@pytest.mark.parametrize("content", [b"", b"{}", b'{"kind":"\xff"}', b"[" * 100_000])
def test_unreadable_record_is_ignored(find, store, blobs, texts, entry, content):
    store.quarantine(entry, "crash", "signal 11")
    (store.bundle / "quarantine" / f"{entry.sha256}.0.json").write_bytes(content)
    store.add(entry, pack_blob(blobs[2])[1], pack_blob(texts[2])[1])
    assert find(store, entry) == entry


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("method", "damage"),
    [*(("executable_path", damage) for damage in (cut, flip, link, directory, fifo)), ("program_path", cut)],
)
def test_corrupt_blob_is_quarantined_and_built_again(find, store, blobs, texts, entry, method, damage):
    path = getattr(store, method)(entry)
    damage(path)
    assert find(store, entry) is None
    assert not os.path.lexists(path)
    assert [(one.kind, one.file) for one in read_records(store).values()] == [
        ("bytes", f"{path.parent.name}/{path.name}")
    ]
    store.add(entry, pack_blob(blobs[2])[1], pack_blob(texts[2])[1])
    assert find(store, entry) == entry


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_corrupt_build_record_is_quarantined(find, store, entry, content):
    record = store.bundle / "entries" / f"{entry.key}.json"
    record.write_bytes(content)
    assert find(store, entry) is None
    assert not record.exists()
    assert [one.file for one in read_records(store).values()] == [f"entries/{entry.key}.json"]


def test_corrupt_blob_stays_where_the_disk_is_full(find, store, entry, full_disk):
    flip(store.executable_path(entry))
    with full_disk(9):
        assert find(store, entry) is None
    assert store.executable_path(entry).exists() and not [*(store.bundle / "quarantine").iterdir()]


def test_missing_files_are_not_quarantined(find, store, entry):
    store.executable_path(entry).unlink()
    assert find(store, entry) is None
    assert store.find("0" * 64, entry.signature, b"") is None
    assert not (store.bundle / "quarantine").exists()


def test_reading_quarantines_nothing(store, entry):
    flip(store.executable_path(entry))
    with pytest.raises(CorruptBundle, match="its sha256 is"):
        store.read_executable(entry)
    assert store.executable_path(entry).exists()
    assert not (store.bundle / "quarantine").exists()
