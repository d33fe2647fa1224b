"""The compilation manager on a small pair: complete, incremental and resumed builds, and failures."""

from concurrent.futures import Future
from functools import partial

import jax
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.remote.object_store import DirectoryStore
from dflash_aot.cache.remote.shared_store import SharedStore
from dflash_aot.compile.pipeline.build_target import attach_devices
from dflash_aot.compile.pipeline.compilation_manager import BuildObserver, InProcessPool, compile_all
from dflash_aot.compile.pipeline.executable_builder import COMPILER_SETTINGS
from dflash_aot.compile.programs.programs import BundledPrograms, Programs, TracedPrograms
from tests.executable_stand_in import make_stand_in

BUCKETS = "batch=1 length=32 k=0,3 prefill=16"
LABELS = [
    "prefill prefill=16 length=32",
    "draft batch=1 length=32 k=3",
    "verify batch=1 length=32 k=0",
    "verify batch=1 length=32 k=3",
    "kv_write rows=1 width=1",
    "kv_write rows=1 width=4",
    "kv_write rows=1 width=16",
]


class RecordingObserver(BuildObserver):
    def __init__(self):
        self.progress = []

    def on_executable(self, progress):
        self.progress.append(progress)


@pytest.fixture(scope="module")
def build_in(small_pair):
    devices = attach_devices("cpu", None, None)

    def run(bundle, buckets=BUCKETS, programs=Programs, jobs=1):
        store, observer = Store(bundle), RecordingObserver()
        source = TracedPrograms(programs(*small_pair, "float32"), parse_grid(buckets, small_pair[1].block))
        with store.open_for_building(), InProcessPool(devices, store, jobs) as pool:
            compilation = compile_all(source, pool, store, observer)
        return compilation, observer.progress

    return run


@pytest.fixture(scope="module")
def first(build_in, tmp_path_factory):
    bundle = tmp_path_factory.mktemp("first")
    return bundle, *build_in(bundle)


def labels(compilation, keys):
    return [entry.signature.label for entry in compilation.entries if entry.key in keys]


class BrokenPrograms(Programs):
    """One program that cannot be traced, and one that cannot be compiled."""

    def function(self, signature):
        run = super().function(signature)
        broken = {"draft": self.fail, "kv_write": partial(self.call_unknown, run)}
        return broken.get(signature.program, run)

    def fail(self, arrays):
        raise ValueError("no draft today\nand more lines")

    def call_unknown(self, run, arrays):
        unknown = jax.ffi.ffi_call("tpu_custom_call", jax.typeof(arrays["draft_k"]))
        return {**run(arrays), "draft_k": unknown(arrays["draft_k"])}


def test_first_build_compiles_and_reports_every_program(first, small_pair):
    bundle, compilation, progress = first
    assert labels(compilation, compilation.compiled) == LABELS
    assert [p.label for p in progress if p.entry is None] == LABELS
    finished = [p for p in progress if p.entry is not None]
    assert [p.label for p in finished] == [p.entry.signature.label for p in finished] == LABELS
    assert [p.done for p in finished] == [1, 2, 3, 4, 5, 6, 7]
    assert {p.total for p in progress} == {len(LABELS)}
    known = Programs(*small_pair, "float32").arrays_by_name(parse_grid(BUCKETS, 4))
    for entry in compilation.entries:
        assert len(Store(bundle).read_executable(entry)) == entry.serialized_bytes > entry.bytes > 0
        assert entry.seconds > 0 and entry.memory.arguments > 0
        assert entry.memory.aliased == sum(known[name].bytes for name in entry.signature.donated), "in place"
    assert not (bundle / "manifest.json").exists()  # the build job publishes it


def test_compiler_settings_of_the_process_are_replaced_while_a_pool_is_open(tmp_path):
    known = COMPILER_SETTINGS.keys() & jax.config.values.keys()
    jax.config.update("jax_optimization_level", "O0")
    try:
        with InProcessPool(attach_devices("cpu", None, None), Store(tmp_path), 1):
            assert {name: jax.config.values[name] for name in known} == {
                name: COMPILER_SETTINGS[name] for name in known
            }
        assert jax.config.values["jax_optimization_level"] == "O0"
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")


def test_all_failures_are_reported_and_other_executables_are_built(tmp_path, build_in, first):
    with pytest.raises(BuildFailed) as failed:
        build_in(tmp_path, programs=BrokenPrograms, jobs=2)
    summary, *lines = str(failed.value).splitlines()
    assert summary == "4 of 7 executables could not be built, the others are kept:"
    reasons = dict(line.strip().split(": ", 1) for line in lines)
    assert reasons.pop("draft batch=1 length=32 k=3") == "ValueError: no draft today"
    assert sorted(reasons) == ["kv_write rows=1 width=1", "kv_write rows=1 width=16", "kv_write rows=1 width=4"]
    assert all("tpu_custom_call" in reason for reason in reasons.values())
    assert not (tmp_path / "manifest.json").exists()
    compilation, _ = build_in(tmp_path, jobs=2)
    assert labels(compilation, compilation.compiled) == ["draft batch=1 length=32 k=3", *LABELS[4:]]
    assert [entry.key for entry in compilation.entries] == [entry.key for entry in first[1].entries]


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
