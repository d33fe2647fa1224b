"""Builds with a shared store: found executables are not compiled, missing and quarantined ones are."""

from concurrent.futures import Future

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.remote.object_store import DirectoryStore
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.compile.pipeline.compilation_manager import compile_all
from dflash_aot.compile.programs.program_source import BundledPrograms
from tests.executable_stand_in import make_stand_in


class RecordingPool:
    """A compiler pool that returns its own bytes for every job, and records the labels."""

    jobs = 1

    def __init__(self, manifest, store):
        self.environment, self.started = manifest.environment, []
        self._entries, self._store = {entry.key: entry for entry in manifest.entries}, store

    def start(self, job):
        self.started.append(job.signature.label)
        (blob, executable), (program, text) = pack_blob(make_stand_in("compiled here")), pack_blob(job.program)
        entry = structs.replace(self._entries[job.key], **structs.asdict(blob), program=program)
        self._store.add(entry, executable, text)
        done = Future()
        done.set_result(entry)
        return done


@pytest.fixture
def built(bundle):
    """A bundle that another machine has built."""
    return Store(bundle("tiny"))


@pytest.fixture
def manifest(built):
    return read_manifest(built.bundle)


@pytest.fixture
def open_shared(tmp_path, built, manifest):
    """Opens a shared store that holds all executables of the bundle."""
    with SharedStore(DirectoryStore(tmp_path / "shared")) as shared:
        for entry in manifest.entries:
            shared.add(built, entry)
    return lambda: SharedStore(DirectoryStore(tmp_path / "shared"))


@pytest.fixture
def run(tmp_path, built, manifest):
    """Builds the bundle in another directory with a shared store; returns the compilation, and labels compiled."""
    store = Store(tmp_path / "bundle")

    def run(shared):
        pool = RecordingPool(manifest, store)
        with store.open_for_building():
            return compile_all(BundledPrograms(manifest, built), pool, store, shared=shared), pool.started

    return run


def test_executables_in_the_shared_store_are_not_compiled(run, open_shared, manifest, tmp_path):
    shared = open_shared()
    report, compiled = run(shared)
    assert (compiled, report.compiled, report.entries) == ([], frozenset(), manifest.entries)
    assert all(Store(tmp_path / "bundle").read_executable(entry) for entry in manifest.entries)
    assert shared.report().hits == len(manifest.entries)


def test_shared_executable_that_is_quarantined_here_is_compiled(run, open_shared, manifest, tmp_path, built):
    entry, store = manifest.entries[2], Store(tmp_path / "bundle")
    with store.open_for_building():
        store.add(entry, built.executable_path(entry).read_bytes(), built.program_path(entry).read_bytes())
    store.quarantine(entry, "self_test", "it computes something else")
    shared = open_shared()
    report, compiled = run(shared)
    assert compiled == [entry.signature.label]
    assert report.compiled == {entry.key}
    assert (shared.report().hits, shared.report().misses) == (len(manifest.entries) - 1, 1)
    assert "it computes something else" in shared.report().failures[0]
    with shared:
        shared.add(store, report.entries[2])
    assert open_shared().find(entry.key, entry.signature, built.read_program(entry)).entry == report.entries[2]


def test_executable_missing_from_the_shared_store_is_compiled(run, open_shared, manifest, tmp_path):
    entry = manifest.entries[4]
    (tmp_path / "shared" / "entries" / f"{entry.key}.json").unlink()
    shared = open_shared()
    report, compiled = run(shared)
    assert compiled == [entry.signature.label]
    assert (shared.report().hits, shared.report().misses) == (len(manifest.entries) - 1, 1)
