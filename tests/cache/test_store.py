"""The executable store: verified blobs, build records, atomic writes, one build at a time."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.atomic_files import write_atomically
from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.bundle.quarantine import QuarantineRecord
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BadInput, BuildFailed, CorruptBundle
from tests.executable_stand_in import make_stand_in

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from dflash_aot.cache.bundle.store import Store
with Store(Path(sys.argv[1])).open_for_building():
    print("held", flush=True)
    sys.stdin.read()
"""

DIE_WHILE_WRITING = """
import resource, signal, sys
from pathlib import Path
from dflash_aot.cache.bundle.atomic_files import write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # a file longer than the limit ends the process in the middle of it
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
write_atomically(Path(sys.argv[1]) / "executables" / "blob", bytes(1000))
"""


@pytest.fixture
def entry(manifest):
    return manifest.entries[2]


@pytest.fixture
def blob_path(store, entry):
    return store.bundle / "executables" / entry.sha256


def hidden_files(directory):
    """Returns temporary files and other files whose names start with a dot."""
    return sorted(path.name for path in directory.rglob(".*"))


def test_added_executable_is_found_and_read_back(find, store, manifest, blobs, texts):
    for entry, blob, text in zip(manifest.entries, blobs, texts, strict=True):
        assert find(store, entry) == entry
        assert store.read_executable(entry) == blob
        assert store.read_program(entry) == text
    assert structs.replace(read_manifest(store.bundle), digest="") == manifest


def test_build_leaves_no_temporary_files(store):
    assert hidden_files(store.bundle) == [".lock"]


def test_bundle_may_be_moved(find, store, manifest, tmp_path):
    moved = Store(shutil.move(store.bundle, tmp_path / "elsewhere"))
    assert [find(moved, entry) for entry in manifest.entries] == list(manifest.entries)


def test_unknown_key_is_not_found(store, entry, texts):
    for place in (store, Store(store.bundle / "nowhere")):
        assert place.find("0" * 64, entry.signature, texts[2]) is None


@pytest.mark.parametrize("kept", [0, 1, 0.5, -1])
def test_truncated_blob_is_refused_with_both_sizes(find, store, entry, blob_path, kept):
    whole = blob_path.read_bytes()
    blob_path.write_bytes(whole[: int(kept * len(whole)) if kept == 0.5 else kept])
    with pytest.raises(CorruptBundle) as refused:
        store.read_executable(entry)
    promised = f"{blob_path.stat().st_size} bytes, the manifest says {entry.bytes}."
    assert f"{blob_path} ({entry.signature.label}): {promised}" in str(refused.value)
    assert str(refused.value).endswith(f"Rebuild it: dflash-precompile --rebuild {store.bundle}")
    assert find(store, entry) is None


@pytest.mark.parametrize("kind", ["executable", "program"])
def test_each_of_200_flipped_bits_is_refused(store, entry, kind):
    """All are found by the hash; no other check finds all of them."""
    chance = random.Random(6)
    text = chance.randbytes(100)
    (blob, executable), (program_blob, program) = pack_blob(make_stand_in(chance.randbytes(100))), pack_blob(text)
    entry = structs.replace(entry, **structs.asdict(blob), program=program_blob)
    store.add(entry, executable, program)
    path, read = {
        "executable": (store.executable_path(entry), store.read_executable),
        "program": (store.program_path(entry), store.read_program),
    }[kind]
    whole = path.read_bytes()
    for bit in chance.sample(range(8 * len(whole)), 200):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptBundle, match=rf"{path} \(.*{entry.signature.label}\): its sha256 is [0-9a-f]{{64}}"):
            read(entry)
    assert store.find(entry.key, entry.signature, text) is None
    path.write_bytes(whole)
    assert store.find(entry.key, entry.signature, text) == entry


def test_swapped_blobs_are_both_refused(find, store, manifest):
    one, other = manifest.entries[:2]
    contents = [store.executable_path(entry).read_bytes() for entry in (one, other)]
    for entry, content in zip((other, one), contents, strict=True):
        store.executable_path(entry).write_bytes(content)
    for entry in (one, other):
        with pytest.raises(
            CorruptBundle, match=rf"\({entry.signature.label}\): .*Rebuild it: dflash-precompile --rebuild"
        ):
            store.read_executable(entry)
        assert find(store, entry) is None


def packed(serialized):
    return pack_blob(serialized)[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (packed(bytes(10**6)), "does not unpack to 102 bytes"),
        (packed(bytes(103)), "does not unpack to 102 bytes"),
        (packed(bytes(101)), "does not unpack to 102 bytes"),
        (packed(bytes(102))[:-1], "does not unpack to 102 bytes"),  # its checksum is cut off
        (packed(bytes(102)) + b"more", "does not unpack to 102 bytes"),
        (packed(bytes(102))[:-1] + b"?", "incorrect data check"),
        (bytes(102), "unknown compression method"),
    ],
)
def test_blob_with_a_valid_hash_and_wrong_content_is_refused(find, store, texts, entry, content, words):
    """Neither reading nor a build accepts it."""
    sha256 = hashlib.sha256(content).hexdigest()
    other = structs.replace(entry, sha256=sha256, bytes=len(content), serialized_bytes=102)
    store.add(other, content, pack_blob(texts[2])[1])
    with pytest.raises(CorruptBundle, match=rf"{other.sha256} \({entry.signature.label}\): .*{words}.*Rebuild it"):
        store.read_executable(other)
    assert find(store, other) is None and not store.executable_path(other).exists()


def test_blob_is_not_unpacked_beyond_the_expected_size(store, entry):
    blob, bomb = pack_blob(bytes(10**7))
    other = structs.replace(entry, sha256=blob.sha256, bytes=blob.bytes, serialized_bytes=0)
    store.add(other, bomb, b"")
    tracemalloc.start()
    with pytest.raises(CorruptBundle, match="does not unpack to 0 bytes"):
        store.read_executable(other)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_missing_blob_is_refused(find, store, entry, blob_path):
    blob_path.unlink()
    with pytest.raises(CorruptBundle, match=rf"{entry.sha256} \(.*\): No such file or directory"):
        store.read_executable(entry)
    assert find(store, entry) is None


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff\xfe"])
def test_unreadable_build_record_is_not_found(find, store, entry, content):
    (store.bundle / "entries" / f"{entry.key}.json").write_bytes(content)
    assert find(store, entry) is None


def test_build_record_under_another_key_is_not_found(find, store, manifest):
    one, other = manifest.entries[:2]
    records = store.bundle / "entries"
    (records / f"{one.key}.json").write_bytes((records / f"{other.key}.json").read_bytes())
    assert find(store, one) is None
    assert find(store, other) == other


def test_build_record_of_another_executable_is_quarantined(find, store, manifest):
    one, other = manifest.entries[:2]
    store.write_record(structs.replace(other, key=one.key))
    assert find(store, one) is None
    words = f"the build record of {other.signature.label} with a signature other than the requested one"
    assert quarantine_reasons(store) == [words]
    store.write_record(one)
    assert find(store, one) == one


@pytest.mark.parametrize("length", ["the same", "another"])
def test_build_record_of_another_program_is_quarantined(find, store, entry, blobs, texts, length):
    text = texts[2][::-1] if length == "the same" else texts[3]
    (blob, executable), (program_blob, program) = pack_blob(blobs[2]), pack_blob(text)
    changed = structs.replace(entry, **structs.asdict(blob), program=program_blob)
    store.add(changed, executable, program)
    assert find(store, entry) is None
    assert quarantine_reasons(store) == ["the build record of an executable that was compiled from another program"]
    assert (
        store.executable_path(changed).exists() and store.program_path(changed).exists()
    )  # which are what they should be


def quarantine_reasons(store) -> list[str]:
    notes = (store.bundle / "quarantine").glob("*.0.json")
    return [msgspec.json.decode(note.read_bytes(), type=QuarantineRecord).reason for note in notes]


def test_failed_blob_write_leaves_no_build_record(tmp_path, entry):
    store = Store(tmp_path / "bundle")
    with store.open_for_building():
        (store.bundle / "executables" / entry.sha256).mkdir()  # so that the blob cannot be put in its place
        with pytest.raises(OSError):
            store.add(entry, b"blob", b"program")
    assert list((store.bundle / "entries").iterdir()) == []
    assert hidden_files(store.bundle) == [".lock"]


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_error_names_the_file_and_keeps_the_old_one(store, manifest, entry, full_disk):
    """For blobs, build records and the manifest."""
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


def test_reader_sees_whole_files_during_writes(tmp_path):
    path, contents = tmp_path / "file", [bytes([seed]) * 300_000 for seed in range(2)]
    write_atomically(path, contents[0])

    def write():
        for turn in range(20):
            write_atomically(path, contents[turn % 2])

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while writer.is_alive():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= set(contents)
    assert path.read_bytes() == contents[1]


def test_published_files_are_readable_by_others(store):
    assert (store.bundle / "manifest.json").stat().st_mode & 0o777 == 0o644


def test_publishing_again_replaces_the_manifest(store, manifest):
    fewer = structs.replace(manifest, entries=manifest.entries[:1])
    store.publish(fewer)
    assert (store.bundle / "manifest.json").read_bytes() == encode_manifest(fewer)


def test_failed_publish_keeps_the_signature_of_the_old_manifest(store, manifest, full_disk):
    signatures = store.bundle / "manifest.sig.json"
    signatures.write_bytes(b"of the old one")
    fewer = structs.replace(manifest, entries=())
    with full_disk(200), pytest.raises(OSError):
        store.publish(fewer)
    assert signatures.exists()
    store.publish(fewer)
    assert not signatures.exists()


# -- what is stored


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def dangle(path):
    path.unlink()
    path.symlink_to("nowhere")


def test_stored_are_executables_with_build_records(store, manifest):
    wanted = [entry.signature for entry in manifest.entries[:2]]
    (store.bundle / "executables" / ("0" * 64)).write_bytes(b"of nobody")
    assert store.list_stored(wanted) == wanted
    assert store.list_stored([]) == []


def test_executable_of_several_compilers_is_stored_once(store, entry, texts):
    blob, executable = pack_blob(make_stand_in("made by another compiler"))
    store.add(structs.replace(entry, **structs.asdict(blob), key="0" * 64), executable, pack_blob(texts[2])[1])
    assert store.list_stored([entry.signature]) == [entry.signature]


@pytest.mark.parametrize(
    "damage", [cut, Path.unlink, lambda path: path.symlink_to(path.rename(path.parent / "elsewhere")), dangle]
)
def test_missing_truncated_and_linked_files_are_not_stored(store, entry, blob_path, damage):
    damage(blob_path)
    (store.bundle / "entries" / f"{'0' * 64}.json").write_bytes(b"{")
    assert store.list_stored([entry.signature]) == []


# -- locks and permissions


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
def test_directory_without_write_permission_is_refused_before_a_build(store, room):
    with tempfile.TemporaryDirectory() as place:  # pytest's own is for nobody else
        os.chmod(place, 0o755)
        copy = Path(shutil.copytree(store.bundle, Path(place) / "bundle"))
        for path in (copy, *copy.iterdir()):
            path.chmod(0o777)
        (copy / room).chmod(0o555)
        refused = pytest.raises(BadInput, match=f"cannot write to {copy / room}: Permission denied")
        with without_rights(), refused, Store(copy).open_for_building():
            pytest.fail("a builder that will not be able to keep what it compiles")


def test_complete_bundle_is_built_again_where_nothing_can_be_written(bundle):
    with tempfile.TemporaryDirectory() as place:  # pytest's own is for nobody else
        os.chmod(place, 0o755)
        store = Store(Path(shutil.copytree(bundle("tiny"), Path(place) / "bundle")))
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
                store.publish(structs.replace(manifest, dtype="bfloat16"))
        assert sorted(store.bundle.rglob("*")) == before
        store.check_writable()


@pytest.mark.parametrize("own", ["executables", "programs", "entries", "quarantine", ".lock"])
@pytest.mark.parametrize("there", [True, False], ids=["something", "nothing"])
@pytest.mark.parametrize("write", [Store.open_for_building, Store.hold_lock])
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


def test_restore_records_refuses_a_linked_directory(store, manifest, tmp_path):
    (store.bundle / "entries").rename(tmp_path / "was here")
    (tmp_path / "elsewhere").mkdir()
    (store.bundle / "entries").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="entries is a symbolic link"):
        store.restore_records(manifest)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_second_build_is_refused(tmp_path):
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(BuildFailed, match="another dflash-precompile"), Store(tmp_path).open_for_building():
                pytest.fail("two builders in one store")
        finally:
            other.kill()
    with Store(tmp_path).open_for_building():  # the lock died with its holder
        pass


def test_lock_is_released_when_a_build_ends_or_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), Store(tmp_path).open_for_building():
        raise ZeroDivisionError
    with Store(tmp_path).open_for_building():
        pass


def test_build_error_is_not_reported_as_a_lock(tmp_path):
    with pytest.raises(BlockingIOError), Store(tmp_path).open_for_building():
        raise BlockingIOError("a terminal that does not keep up")


@pytest.mark.parametrize(("name", "words"), [("file", "File exists"), ("/proc/bundle", "No such file or directory")])
def test_invalid_bundle_path_is_refused(tmp_path, name, words):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / name)
    refused = pytest.raises(BadInput, match=rf"cannot write to {tmp_path / name}: {words}")
    with refused, store.open_for_building():
        pytest.fail("a store where none can be")


def test_build_records_are_json(store, entry):
    record = (store.bundle / "entries" / f"{entry.key}.json").read_bytes()
    assert msgspec.json.decode(record)["signature"]["program"] == entry.signature.program


def test_build_removes_temporary_files_of_a_killed_build(store):
    killed = subprocess.run([sys.executable, "-c", DIE_WHILE_WRITING, store.bundle], check=False)
    assert killed.returncode == -signal.SIGXFSZ
    assert hidden_files(store.bundle) != [".lock"]
    foreign = store.bundle / "entries" / ".nfs0001"
    foreign.write_bytes(b"")
    with store.open_for_building():
        assert hidden_files(store.bundle) == [".lock", ".nfs0001"]
