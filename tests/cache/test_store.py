"""The executable store: verified blobs, build records, atomic writes, one build at a time."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.quarantine import QuarantineRecord
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import find_file_flaws
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.files.atomic_files import TEMPORARY_SUFFIX
from dflash_aot.cache.key import executable_key
from tests.cache.damage import cut
from tests.executable_stand_in import make_stand_in

# Copies the first executables of a bundle as a build adds them, and sends itself SIGKILL at a line of our code.
BUILD = """
import os, signal, sys
from pathlib import Path
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.bundle.store import Store
from msgspec import structs
whole, store, count, last = *map(Store, map(Path, sys.argv[1:3])), *map(int, sys.argv[3:])
manifest, lines, built = read_manifest(whole.bundle), 0, 0
manifest = structs.replace(manifest, entries=manifest.entries[:count])
blobs = [[place(one).read_bytes() for place in (whole.executable_path, whole.program_path)] for one in manifest.entries]
programs = [whole.read_program(one) for one in manifest.entries]

def trace(frame, event, _):
    global lines
    folder, _, file = frame.f_code.co_filename.rpartition("/")
    if not folder.endswith(("/bundle", "/files")) or file.startswith("pickle_"):  # a scan that writes nothing
        return None
    lines += event == "line"
    if lines == last > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace

sys.settrace(trace)
with store.open_for_building():
    for entry, blob, program in zip(manifest.entries, blobs, programs, strict=True):
        if store.find(entry.key, entry.signature, program) is None:
            store.add(entry, *blob)
            built += 1
    store.publish(manifest)
print(built, lines)
"""
MOMENTS = 6


@pytest.fixture
def entry(manifest):
    return manifest.entries[2]


@pytest.fixture
def blob_path(store, entry):
    return store.bundle / "executables" / entry.sha256


def hidden_files(directory):
    return sorted(path.name for path in directory.rglob(".*"))


def test_added_executable_is_found_and_read_back(find, store, manifest, blobs, texts):
    for entry, blob, text in zip(manifest.entries, blobs, texts, strict=True):
        assert find(store, entry) == entry
        assert store.read_executable(entry) == blob
        assert store.read_program(entry) == text
    assert structs.replace(read_manifest(store.bundle), digest="") == manifest
    assert hidden_files(store.bundle) == [".lock"]


def test_build_record_of_another_executable_is_quarantined(find, store, manifest):
    one, other = manifest.entries[:2]
    store.write_record(structs.replace(other, key=one.key))
    assert find(store, one) is None
    words = f"the build record of {other.signature.label} with a signature other than the requested one"
    assert quarantine_reasons(store) == [words]
    store.write_record(one)
    assert find(store, one) == one


def test_build_record_of_another_program_is_quarantined(find, store, entry, blobs, texts):
    text = texts[2][::-1]
    (blob, executable), (program_blob, program) = pack_blob(blobs[2]), pack_blob(text)
    changed = structs.replace(entry, **structs.asdict(blob), program=program_blob)
    store.add(changed, executable, program)
    assert find(store, entry) is None
    assert quarantine_reasons(store) == ["the build record of an executable that was compiled from another program"]
    assert store.executable_path(changed).exists() and store.program_path(changed).exists()


def test_only_trusted_build_records_are_taken(find, store, manifest):
    one, two = manifest.entries[:2]
    blob, executable = pack_blob(make_stand_in(99))
    planted = structs.replace(one, **structs.asdict(blob))
    store.add(planted, executable, store.program_path(one).read_bytes())
    assert find(store, one) == planted and find(store, two) == two
    store.trust_only([one])
    assert find(store, one) == one and find(store, two) is None


def quarantine_reasons(store) -> list[str]:
    notes = (store.bundle / "quarantine").glob("*.0.json")
    return [msgspec.json.decode(note.read_bytes(), type=QuarantineRecord).reason for note in notes]


def test_full_disk_error_keeps_the_old_file(store, manifest, entry, full_disk):
    program, (blob, executable) = store.program_path(entry).read_bytes(), pack_blob(bytes(range(256)))
    changed, fewer = structs.replace(entry, **structs.asdict(blob)), structs.replace(manifest, entries=())
    before = {path: path.read_bytes() for path in store.bundle.rglob("*") if path.is_file()}
    for write, name in (
        (lambda: store.add(changed, executable, program), f"executables/{changed.sha256}"),
        (lambda: store.write_record(changed), f"entries/{entry.key}.json"),
        (lambda: store.publish(fewer), "manifest.json"),
    ):
        with full_disk(200), pytest.raises(OSError, match="File too large") as refused:
            write()
        assert refused.value.filename == str(store.bundle / name)
        assert {path: path.read_bytes() for path in store.bundle.rglob("*") if path.is_file()} == before


def test_failed_publish_keeps_the_signature_of_the_old_manifest(store, manifest, full_disk):
    signatures = store.bundle / "manifest.sig.json"
    signatures.write_bytes(b"of the old one")
    fewer = structs.replace(manifest, entries=())
    with full_disk(200), pytest.raises(OSError):
        store.publish(fewer)
    assert signatures.exists()
    store.publish(fewer)
    assert not signatures.exists()


def test_stored_are_executables_with_build_records(store, manifest):
    wanted = [entry.signature for entry in manifest.entries[:2]]
    (store.bundle / "executables" / ("0" * 64)).write_bytes(b"of nobody")
    assert sorted(store.list_stored(wanted), key=wanted.index) == wanted  # in the order of the directory
    assert store.list_stored([]) == []


@pytest.mark.parametrize("damage", [cut, lambda path: path.symlink_to(path.rename(path.parent / "elsewhere"))])
def test_missing_truncated_and_linked_files_are_not_stored(store, entry, blob_path, damage):
    damage(blob_path)
    (store.bundle / "entries" / f"{'0' * 64}.json").write_bytes(b"{")
    assert store.list_stored([entry.signature]) == []


@contextmanager
def without_rights() -> Iterator[None]:
    """Runs as another user, because root may write anywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("room", ["executables", "programs", "entries"])
def test_directory_without_write_permission_is_refused(store, room):
    with tempfile.TemporaryDirectory() as place:  # pytest's own is for nobody else
        os.chmod(place, 0o755)
        copy = Path(shutil.copytree(store.bundle, Path(place) / "bundle"))
        for path in (copy, *copy.iterdir()):
            path.chmod(0o777)
        (copy / room).chmod(0o555)
        refused = pytest.raises(BadInput, match=f"cannot write to {copy / room}: Permission denied")
        with without_rights(), refused, Store(copy).open_for_building():
            pytest.fail("a builder that will not be able to keep what it compiles")


def test_complete_bundle_may_be_read_only(store):
    with tempfile.TemporaryDirectory() as place:  # pytest's own is for nobody else
        os.chmod(place, 0o755)
        store = Store(Path(shutil.copytree(store.bundle, Path(place) / "bundle")))
        manifest = read_manifest(store.bundle)
        (entry, *_), before = manifest.entries, sorted(store.bundle.rglob("*"))
        program = store.read_program(entry)
        store.bundle.chmod(0o555)
        with without_rights():
            with store.open_for_building():
                assert store.find(entry.key, entry.signature, program) == entry
                store.publish(manifest)
            with pytest.raises(BadInput, match=f"it is missing, and {store.bundle} is read-only"):
                store.check_writable()
            with pytest.raises(BadInput, match="is read-only, and its manifest would change: name another bundle"):
                store.publish(structs.replace(manifest, dtype="float32"))
        assert sorted(store.bundle.rglob("*")) == before
        store.check_writable()


@pytest.mark.parametrize(
    ("own", "there", "write"),
    [
        ("executables", True, Store.open_for_building),
        ("entries", True, Store.hold_lock),
        ("quarantine", False, Store.open_for_building),
        (".lock", True, Store.hold_lock),
        (".lock", False, Store.open_for_building),
    ],
)
def test_nothing_is_written_through_a_link(store, tmp_path, own, there, write):
    elsewhere = tmp_path / "elsewhere"
    path = store.bundle / own
    if path.exists():
        path.rename(tmp_path / "was here")
    if there:
        elsewhere.touch() if own == ".lock" else elsewhere.mkdir()
    path.symlink_to(elsewhere)
    refused = pytest.raises(
        BadInput, match=f"cannot write to {store.bundle}: {own} is a symbolic link.*Remove the link, or"
    )
    with refused, write(store):
        pytest.fail("wrote through a link")
    assert elsewhere.exists() == there and (own == ".lock" or not there or list(elsewhere.iterdir()) == [])


def test_build_removes_temporary_files_of_a_killed_build(store):
    (store.bundle / "executables" / f".blob.0{TEMPORARY_SUFFIX}").touch()
    foreign = store.bundle / "entries" / ".nfs0001"
    foreign.write_bytes(b"")
    with store.open_for_building():
        assert hidden_files(store.bundle) == [".lock", ".nfs0001"]


def test_killed_build_leaves_a_readable_bundle_and_is_continued(store, manifest, find, tmp_path):
    """The bundle has one executable of three. It is killed at lines all over the build, and at the last one."""

    def build(place: Path, count: int, killed_at: int = 0) -> list[int]:
        command = [sys.executable, "-c", BUILD, store.bundle, place, str(count), str(killed_at)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (-signal.SIGKILL if killed_at else 0, "")
        return [*map(int, done.stdout.split())]

    old, new = tmp_path / "old", tmp_path / "new"
    assert build(old, 1)[0] == 1
    built, lines = build(shutil.copytree(old, new), 3)
    readable, seen = {(place / "manifest.json").read_bytes() for place in (old, new)}, set()
    assert built == 2 and len(readable) == 2
    for moment in range(lines, 1, -(lines // MOMENTS)):
        place = Path(shutil.copytree(old, tmp_path / str(moment)))
        build(place, 3, moment)
        seen.add((place / "manifest.json").read_bytes())
        recorded = [one for one in manifest.entries[:3] if (place / "entries" / f"{one.key}.json").exists()]
        assert find_file_flaws(place, read_manifest(place)) == []
        assert [find(Store(place), one) for one in recorded] == recorded
        assert build(place, 3)[0] == 3 - len(recorded)
        assert (place / "manifest.json").read_bytes() == (new / "manifest.json").read_bytes()
        assert find_file_flaws(place, read_manifest(place)) == [] and hidden_files(place) == [".lock"]
    assert seen == readable


def test_compiler_options_change_the_key_and_their_order_does_not(manifest):
    signature, environment = manifest.entries[0].signature, manifest.environment

    def key(**options: str) -> str:
        return executable_key(b"program", signature, environment, options)

    assert len({key(), key(a="1"), key(a="2"), key(a="1", b="1")}) == 4
    assert key(a="1", b="2") == key(b="2", a="1")
