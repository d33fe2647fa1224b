"""Shared stores: verified reads, uploads, and failures that never fail a build."""

import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import SelfTest
from dflash_aot.cache.remote.object_store import DirectoryStore, RetryPolicy, open_object_store
from dflash_aot.cache.remote.shared_store import SharedExecutable, SharedStore
from tests.executable_stand_in import make_stand_in
from tests.object_server import afterwards, change, refuse

HASTY = RetryPolicy(attempts=2, seconds=20, pause=0)


@pytest.fixture
def built(manifest):
    return manifest.entries[2]


@pytest.fixture
def local(store):
    return store


@pytest.fixture
def open_store(bucket):
    return lambda retry=HASTY: SharedStore(open_object_store(bucket.url, retry))


@pytest.fixture
def directory(tmp_path, local, built):
    add(SharedStore(DirectoryStore(tmp_path / "shared")), local, built)
    return tmp_path / "shared"


def add(shared, local, *entries):
    with shared:
        for entry in entries:
            shared.add(local, entry)


def is_same_executable(found, local, entry):
    blobs = local.executable_path(entry).read_bytes(), local.program_path(entry).read_bytes()
    return found == SharedExecutable(entry, *blobs)


@pytest.fixture
def find(local):
    return lambda store, entry: store.find(entry.key, entry.signature, local.read_program(entry))


def name(kind, built):
    places = {"record": f"entries/{built.key}.json", "executable": f"executables/{built.sha256}"}
    return {**places, "program": f"programs/{built.program.sha256}"}[kind]


def make_another(local, entry, number=0):
    blob, executable = pack_blob(make_stand_in(number))
    made = structs.replace(entry, **structs.asdict(blob))
    local.add(made, executable, local.program_path(entry).read_bytes())
    return made


def test_added_executable_is_found_by_another_build(bucket, open_store, local, built, find):
    first, other = open_store(), open_store()
    bucket.server.asked.clear()
    assert find(first, built) is None
    add(first, local, built)
    assert is_same_executable(find(other, built), local, built)
    counts = [(one.hits, one.misses, one.written, one.failures) for one in (first.report(), other.report())]
    assert counts == [(0, 1, 1, ()), (1, 0, 0, ())]
    assert bucket.asked("PUT") == [name(kind, built) for kind in ("program", "executable", "record")]
    assert ".writable" not in bucket.names()


def test_failed_blob_write_leaves_no_build_record(bucket, open_store, local, built):
    store, kind = open_store(), "executable"
    bucket.server.fail("PUT", name(kind, built), *[refuse(500, "InternalError")] * 2)
    add(store, local, built)
    assert not any(found.startswith("entries/") for found in bucket.names())
    assert store.report().written == 0
    (failure,) = store.report().failures
    assert f"{bucket.url}/{name(kind, built)}: told to say InternalError" in failure


@pytest.mark.parametrize("kind", ["record", "executable", "program"])
def test_corrupt_object_is_rejected_and_replaced(directory, local, built, kind, find):
    path = directory / name(kind, built)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store = SharedStore(DirectoryStore(directory))
    assert find(store, built) is None
    (failure,) = store.report().failures
    assert f"{path}: " in failure
    add(store, local, built)
    assert is_same_executable(find(SharedStore(DirectoryStore(directory)), built), local, built)


def test_build_record_of_another_executable_is_rejected(directory, local, built, manifest, find):
    other = manifest.entries[3]
    add(SharedStore(DirectoryStore(directory)), local, other)
    for entry, words in (
        (structs.replace(built, key=other.key), f"the build record of another key, {other.key}"),
        (structs.replace(built, signature=other.signature), "with a signature other than the requested one"),
        (structs.replace(built, program=other.program), "compiled from another program"),
    ):
        (directory / name("record", built)).write_bytes(msgspec.json.encode(entry))
        store = SharedStore(DirectoryStore(directory))
        assert find(store, built) is None
        assert words in store.report().failures[0]


def test_transient_fault_is_retried(bucket, open_store, local, built, find):
    add(open_store(), local, built)
    store = open_store()
    bucket.server.fail("GET", name("executable", built), change(lambda body: body[:9]))
    assert is_same_executable(find(store, built), local, built)
    assert store.report().failures == ()


def test_executable_replaced_during_a_read_is_read_again(bucket, open_store, local, built, find):
    """Another build writes its own executable in between, and the first one is removed."""
    add(open_store(), local, built)
    other, store = make_another(local, built), open_store()

    def replace():
        bucket.put(name("executable", other), local.executable_path(other).read_bytes())
        bucket.put(name("record", other), msgspec.json.encode(other))
        bucket.remove(name("executable", built))

    bucket.server.fail("GET", name("record", built), afterwards(replace))
    assert is_same_executable(find(store, built), local, other)


def test_store_without_delete_permission_is_written(bucket, open_store, local, built, find):
    bucket.server.fail("DELETE", ".writable", refuse(403, "AccessDenied"))
    store = open_store()
    add(store, local, built)
    assert is_same_executable(find(open_store(), built), local, built)


def test_full_store_is_reported_once_and_read(directory, local, built, manifest, find, full_disk):
    store = SharedStore(DirectoryStore(directory))
    with full_disk(200):
        add(store, local, *(entry for entry in manifest.entries if entry != built))
        late = SharedStore(DirectoryStore(directory))
    (failure,) = store.report().failures
    assert failure.endswith(": File too large: nothing more is written there") and not store.report().writable
    assert late.unwritable == "" and is_same_executable(find(store, built), local, built)
    with full_disk(9):
        assert "File too large" in SharedStore(DirectoryStore(directory)).unwritable


def test_store_is_not_used_after_three_failures(bucket, open_store, local, built, manifest, find):
    store = open_store()
    bucket.server.fail("GET", "entries/", *[refuse(500, "InternalError")] * 100)
    bucket.server.asked.clear()
    assert all(find(store, entry) is None for entry in manifest.entries)
    assert len(bucket.asked("GET")) == 2 * 3  # attempts, failures in a row
    report = store.report()
    assert report.misses == len(manifest.entries)
    assert len(report.failures) == 4
    assert report.failures[-1] == f"{bucket.url}: no longer used after 3 failures in a row"
    add(store, local, built)
    assert not any(found.startswith("entries/") for found in bucket.names())


def test_single_failures_do_not_disable_the_store(bucket, open_store, local, built, find):
    add(open_store(), local, built)
    store = open_store()
    for _ in range(4):
        bucket.server.fail("GET", "entries/", *[refuse(500, "InternalError")] * 2)
        assert find(store, built) is None
        assert is_same_executable(find(store, built), local, built)
    assert len(store.report().failures) == 4


def test_executable_of_an_earlier_build_is_uploaded(bucket, open_store, local, built):
    store = open_store()
    add(store, local, built)
    assert (store.report().hits, store.report().misses, store.report().written) == (0, 0, 1)
    bucket.server.asked.clear()
    store = open_store()
    add(store, local, built)
    assert bucket.asked("PUT") == [".writable"]
    assert store.report().written == 0


def test_executable_with_a_new_self_test_is_uploaded_again(open_store, local, built, find):
    add(open_store(), local, built)
    store = open_store()
    assert is_same_executable(find(store, built), local, built)
    proven = structs.replace(built, self_test=SelfTest(1, ()))
    add(store, local, proven)
    assert (store.report().hits, store.report().written) == (1, 1)
    assert is_same_executable(find(open_store(), built), local, proven)


def test_rejected_executable_is_replaced(open_store, local, built, find):
    add(open_store(), local, built)
    store = open_store()
    store.reject(find(store, built), "it was quarantined")
    add(store, local, built)
    report = store.report()
    assert (report.hits, report.misses, report.written) == (0, 1, 1)
    assert report.failures[0].endswith(f"executables/{built.sha256}: not used: it was quarantined")


def test_corrupt_local_executable_is_not_uploaded(open_store, local, built, find):
    local.executable_path(built).write_bytes(b"broken")
    store = open_store()
    add(store, local, built)
    assert store.report().written == 0
    assert f"{local.executable_path(built)}: 6 bytes" in store.report().failures[0]
    assert find(open_store(), built) is None
