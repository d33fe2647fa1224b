"""Pushing and fetching bundles: whole copies of one manifest, downloaded once."""

import fcntl
import os
import pickle
import shutil

import pytest
from msgspec import structs

from dflash_aot.cache.arrays import derive_pair_shapes, state_arrays
from dflash_aot.cache.bundle.blob import pack_blob, unpack_blob
from dflash_aot.cache.bundle.ed25519 import read_private_key
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest, read_manifest_bytes, rebuild_command
from dflash_aot.cache.bundle.manifest_signature import sign_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import list_expected_files
from dflash_aot.cache.errors import BadInput, CorruptBundle, MissingBundle, StoreFailed
from dflash_aot.cache.files.directory_lock import hold_directory_lock
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.remote.object_store import RetryPolicy
from dflash_aot.cache.remote.transfer import fetch_bundle, push_bundle
from dflash_aot.cache.signature import ProgramWeights, list_signatures
from tests.object_server import afterwards, refuse, silence

HASTY = RetryPolicy(attempts=2, seconds=20, pause=0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))
    return tmp_path / "user cache"


@pytest.fixture
def pushed(store, bucket, manifest, blobs_of):
    for name in (*blobs_of(manifest), "manifest.json"):
        bucket.put(name, (store.bundle / name).read_bytes())
    return bucket


@pytest.fixture
def blobs_of(store):
    def names(manifest):
        return sorted(str(one.path.relative_to(store.bundle)) for one in list_expected_files(store.bundle, manifest))

    return names


def assert_whole_copy(copy, manifest):
    assert read_manifest_bytes(copy) == encode_manifest(manifest)
    for promise in list_expected_files(copy, manifest):
        unpack_blob(promise.blob, promise.path.read_bytes())


@pytest.fixture
def smaller_bundle(manifest):
    pair = derive_pair_shapes(manifest.target.facts, manifest.draft.facts, manifest.dtype, manifest.sampling, 1)
    grid = parse_grid("batch=1 length=32 k=0 prefill=16", pair.block)
    labels = {one.label for one in list_signatures(pair, grid, ProgramWeights((), (), ()))}
    entries = tuple(entry for entry in manifest.entries if entry.signature.label in labels)
    return structs.replace(manifest, grid=grid, state=state_arrays(pair, grid), entries=entries)


@pytest.fixture
def forged(manifest):
    blob, executable = pack_blob(pickle.dumps(os.system))
    entry = structs.replace(manifest.entries[0], **structs.asdict(blob))
    return structs.replace(manifest, entries=(entry, *manifest.entries[1:])), executable


def republish(store, manifest, bucket):
    store.publish(manifest)
    push_bundle(store.bundle, bucket.url)


def test_push_writes_the_manifest_last(store, bucket, manifest, blobs_of):
    push_bundle(store.bundle, bucket.url)
    assert sorted(bucket.asked("PUT")[:-1]) == blobs_of(manifest)
    assert bucket.asked("PUT")[-1] == "manifest.json"
    assert bucket.names() == sorted([*blobs_of(manifest), "manifest.json"])


def test_push_does_not_send_existing_blobs_again(store, pushed, manifest, blobs_of):
    pushed.remove(blobs_of(manifest)[0])
    pushed.put(blobs_of(manifest)[1], b"half")
    result = push_bundle(store.bundle, pushed.url)
    assert sorted(pushed.asked("PUT")) == [*blobs_of(manifest)[:2], "manifest.json"]
    assert (result.sent, result.kept) == (2, len(blobs_of(manifest)) - 2)
    assert pushed.names() == sorted([*blobs_of(manifest), "manifest.json"])


def test_inconsistent_bundle_is_neither_pushed_nor_fetched(store, pushed, manifest):
    contradiction = structs.replace(manifest, dtype="float32")
    store.publish(contradiction)
    with pytest.raises(CorruptBundle, match="manifest.json: state is .*Build it again: dflash-precompile"):
        push_bundle(store.bundle, pushed.url)
    assert pushed.asked("PUT") == []
    pushed.put("manifest.json", encode_manifest(contradiction))
    with pytest.raises(CorruptBundle, match=f"^{pushed.url}/manifest.json: state is .*dflash-bundle push"):
        fetch_bundle(pushed.url)
    assert not any("/" in name for name in pushed.asked("GET"))


def test_foreign_pickle_is_neither_pushed_nor_fetched(store, pushed, forged):
    manifest, executable = forged
    store.executable_path(manifest.entries[0]).write_bytes(executable)
    store.publish(manifest)
    with pytest.raises(CorruptBundle, match="the pickle names posix.system"):
        push_bundle(store.bundle, pushed.url)
    pushed.put(f"executables/{manifest.entries[0].sha256}", executable)
    pushed.put("manifest.json", encode_manifest(manifest))
    with pytest.raises(CorruptBundle, match="the pickle names posix.system"):
        fetch_bundle(pushed.url)


def test_fetch_returns_a_whole_copy(pushed, manifest, cache, blobs_of):
    copy = fetch_bundle(pushed.url)
    assert_whole_copy(copy, manifest)
    assert cache / "dflash-aot" / "fetched" in copy.parents
    assert rebuild_command(copy).endswith("' --bundle DIR")  # the next fetch undoes changes of the copy
    assert manifest.build_command(copy).startswith("dflash-precompile --bundle DIR --target")
    assert sorted(pushed.asked("GET")) == sorted([*blobs_of(manifest), "manifest.json", "manifest.sig.json"])
    assert pushed.asked("GET")[0] == "manifest.json"


def test_complete_copy_may_be_read_only(pushed, monkeypatch):
    copy = fetch_bundle(pushed.url)
    monkeypatch.setattr(os, "replace", None)  # root may write anywhere
    monkeypatch.setattr(fcntl, "flock", None)
    assert fetch_bundle(pushed.url) == copy


def test_damaged_copy_is_restored(pushed, manifest):
    copy = fetch_bundle(pushed.url)
    broken = Store(copy).executable_path(manifest.entries[3])
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    pushed.server.forget()
    assert_whole_copy(fetch_bundle(pushed.url), manifest)
    assert pushed.asked("GET")[2:] == [f"executables/{manifest.entries[3].sha256}"]
    Store(copy).publish(structs.replace(manifest, entries=manifest.entries[:1]))
    assert fetch_bundle(pushed.url) == copy
    assert_whole_copy(copy, manifest)


def test_interrupted_download_has_no_manifest_and_continues(pushed, manifest, cache, blobs_of):
    broken = f"executables/{manifest.entries[-1].sha256}"
    pushed.server.fail("GET", broken, *[refuse(500, "InternalError")] * 2)
    with pytest.raises(StoreFailed, match=f"{pushed.url}/{broken}: told to say InternalError"):
        fetch_bundle(pushed.url, retry=HASTY)
    assert list(cache.rglob("manifest.json")) == []
    first = set(pushed.asked("GET")) - {broken}
    pushed.server.forget()
    copy = fetch_bundle(pushed.url)
    assert_whole_copy(copy, manifest)
    asked = pushed.asked("GET")[2:]
    assert set(asked).isdisjoint(first - {"manifest.json", "manifest.sig.json"})
    assert first | set(asked) == {*blobs_of(manifest), "manifest.json", "manifest.sig.json"}


def test_corrupt_remote_blob_is_refused(pushed, manifest):
    entry = manifest.entries[1]
    name = f"executables/{entry.sha256}"
    pushed.put(name, pushed.get(name)[:-1] + b"?")
    with pytest.raises(CorruptBundle) as refused:
        fetch_bundle(pushed.url)
    assert str(refused.value).startswith(f"{entry.signature.label}: {pushed.url}/{name}: ")
    assert str(refused.value).endswith(f"dflash-bundle push BUNDLE {pushed.url}")
    assert len(pushed.asked("GET", name)) == 2


def test_location_without_a_bundle_is_refused(bucket):
    with pytest.raises(MissingBundle, match=f"{bucket.url}/manifest.json does not exist: .*dflash-bundle push BUNDLE"):
        fetch_bundle(bucket.url)


def test_bundle_replaced_during_a_fetch_comes_whole(pushed, store, manifest, smaller_bundle, blobs_of):
    gone = [name for name in blobs_of(manifest) if name not in blobs_of(smaller_bundle)]

    def replace():
        republish(store, smaller_bundle, pushed)
        for name in gone:
            pushed.remove(name)

    pushed.server.fail("GET", "manifest.sig.json", afterwards(replace))
    assert_whole_copy(fetch_bundle(pushed.url), smaller_bundle)


def test_copies_of_both_bundles_of_a_url_stay_whole(pushed, store, manifest):
    """A process may go on reading the old copy. Shared files are not downloaded twice."""
    old = fetch_bundle(pushed.url)
    other = structs.replace(manifest, target=structs.replace(manifest.target, reference="elsewhere"))
    republish(store, other, pushed)
    pushed.server.forget()
    assert_whole_copy(fetch_bundle(pushed.url), other)
    assert_whole_copy(old, manifest)
    assert pushed.asked("GET") == ["manifest.json", "manifest.sig.json"]


def test_unreachable_store_error_names_the_last_copy(pushed):
    copy = fetch_bundle(pushed.url)
    pushed.server.fail("GET", "manifest.json", *[silence(pushed.server)] * 20)
    with pytest.raises(StoreFailed, match=f"no answer in time.*can be used instead: --bundle {copy}$"):
        fetch_bundle(pushed.url, retry=RetryPolicy(attempts=1, seconds=0.3))


def test_unwritable_cache_is_named(pushed, cache):
    cache.write_text("a file")
    with pytest.raises(BadInput, match=r"cannot write to .*user cache.*: Not a directory\. XDG_CACHE_HOME sets"):
        fetch_bundle(pushed.url)


def test_wait_for_another_download_is_bounded(pushed, monkeypatch, caplog):
    home = fetch_bundle(pushed.url).parent
    shutil.rmtree(home)
    home.mkdir()
    monkeypatch.setattr("dflash_aot.cache.remote.transfer.LOCK_SECONDS", 0.3)
    refused = pytest.raises(BadInput, match=rf"process {os.getpid()} on .* has been fetching .* for more than 0 s")
    with hold_directory_lock(home), refused:
        fetch_bundle(pushed.url)
    assert f"waiting up to 0 s for process {os.getpid()}" in caplog.text


@pytest.fixture
def signed(pushed, store, make_key):
    private, public = make_key("mine")
    sign_manifest(store.bundle, read_manifest_bytes(store.bundle), read_private_key(private))
    push_bundle(store.bundle, pushed.url)
    return pushed, public


def test_invalid_signature_does_not_replace_a_valid_one(signed):
    bucket, public = signed
    copy = fetch_bundle(bucket.url, public)
    bucket.put("manifest.sig.json", b"{}")
    with pytest.raises(CorruptBundle, match=f"^{bucket.url}/manifest.sig.json: .*dflash-bundle sign BUNDLE"):
        fetch_bundle(bucket.url, public)
    read_manifest(copy, public)


def test_signed_bundle_is_fetched_with_its_signature(signed, manifest, make_key):
    bucket, public = signed
    assert read_manifest(fetch_bundle(bucket.url, public), public).grid == manifest.grid
    with pytest.raises(CorruptBundle, match="signed by .* not by"):
        fetch_bundle(bucket.url, make_key("other")[1])
    bucket.remove("manifest.sig.json")
    bucket.put("manifest.json", b"{")  # a manifest without a signature is not parsed
    with pytest.raises(CorruptBundle, match="not signed"):
        fetch_bundle(bucket.url, public)


def test_signature_of_an_older_manifest_is_read_again(pushed, store, make_key):
    private, public = make_key("mine")
    sign_manifest(store.bundle, read_manifest_bytes(store.bundle), read_private_key(private))
    envelope = (store.bundle / "manifest.sig.json").read_bytes()
    pushed.server.fail("GET", "manifest.sig.json", afterwards(lambda: pushed.put("manifest.sig.json", envelope)))
    read_manifest(fetch_bundle(pushed.url, public), public)


def test_push_removes_signatures_of_another_manifest(pushed, store):
    pushed.put("manifest.sig.json", b"of another manifest")
    push_bundle(store.bundle, pushed.url)
    assert "manifest.sig.json" not in pushed.names()


def test_push_restores_its_signatures_and_refuses_another_manifest(signed, store):
    bucket, _ = signed
    mine = (store.bundle / "manifest.sig.json").read_bytes()
    bucket.server.fail("PUT", "manifest.json", afterwards(lambda: bucket.put("manifest.sig.json", b"another push")))
    push_bundle(store.bundle, bucket.url)
    assert bucket.get("manifest.sig.json") == mine
    bucket.server.fail("PUT", "manifest.json", afterwards(lambda: bucket.put("manifest.json", b"another push")))
    with pytest.raises(StoreFailed, match="another push writes there at the same time"):
        push_bundle(store.bundle, bucket.url)


def test_progress_is_reported_in_bytes(pushed, manifest):
    reported = []
    fetch_bundle(pushed.url, on_progress=lambda done, total: reported.append((done, total)))
    total = sum(entry.bytes + entry.program.bytes for entry in manifest.entries)
    assert reported[-1] == (total, total)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
