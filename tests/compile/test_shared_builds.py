"""Builds with a shared store: found executables are not compiled, missing and quarantined ones are."""

from concurrent.futures import Future

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


def test_quarantined_and_missing_executables_of_a_shared_store_are_compiled(bundle, tmp_path):
    """Into another directory than that of the bundle, whose executables the shared store holds."""
    built, store, place = Store(bundle("tiny")), Store(tmp_path / "bundle"), DirectoryStore(tmp_path / "shared")
    manifest = read_manifest(built.bundle)
    with SharedStore(place) as shared:
        for entry in manifest.entries:
            shared.add(built, entry)
    entry, missing = manifest.entries[2], manifest.entries[4]
    (tmp_path / "shared" / "entries" / f"{missing.key}.json").unlink()
    with store.open_for_building():
        store.add(entry, built.executable_path(entry).read_bytes(), built.program_path(entry).read_bytes())
    store.quarantine(entry, "self_test", "it computes something else")
    shared, pool = SharedStore(place), RecordingPool(manifest, store)
    with store.open_for_building():
        report = compile_all(BundledPrograms(manifest, built), pool, store, shared=shared)
    assert pool.started == [entry.signature.label, missing.signature.label]
    assert report.compiled == {entry.key, missing.key}
    assert all(store.read_executable(one) for one in report.entries)
    assert (shared.report().hits, shared.report().misses) == (len(manifest.entries) - 2, 2)
    assert "it computes something else" in shared.report().failures[0]
    with shared:
        shared.add(store, report.entries[2])
    assert SharedStore(place).find(entry.key, entry.signature, built.read_program(entry)).entry == report.entries[2]
