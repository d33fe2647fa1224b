"""Self-tests in a subprocess: correct, wrong, crashing and damaged executables, and other machines."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import Entry, Manifest, read_manifest
from dflash_aot.cache.bundle.self_test import SelfTestResult, SelfTests, set_up_self_tests
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import IncompatibleBundle
from tests.conftest import JAX_SWITCHES


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle("tiny"), tmp_path / "bundle"))


@pytest.fixture
def run_all(copy) -> Callable[..., list[SelfTestResult]]:
    def run(*entries: Entry) -> list[SelfTestResult]:
        with SelfTests(set_up_self_tests(copy, read_manifest(copy))) as self_tests:
            return [self_tests.run(entry) for entry in entries]

    return run


def children() -> set[int]:
    return set(map(int, Path("/proc/thread-self/children").read_text().split()))


def find(manifest: Manifest, label: str) -> Entry:
    return next(entry for entry in manifest.entries if entry.signature.label == label)


def plant(copy: Path, entry: Entry, serialized: bytes) -> Entry:
    blob, content = pack_blob(serialized)
    (copy / "executables" / blob.sha256).write_bytes(content)
    return structs.replace(entry, **structs.asdict(blob))


def test_wrong_exchanged_and_broken_executables_are_faults(copy, run_all):
    manifest, store = read_manifest(copy), Store(copy)
    entry = find(manifest, "verify batch=1 length=32 k=3")
    first, *rest = entry.self_test.outputs
    wrong = structs.replace(first, mean=2 * first.mean)
    deviating = structs.replace(entry, self_test=structs.replace(entry.self_test, outputs=(wrong, *rest)))
    wide, narrow = (find(manifest, f"kv_write rows=1 width={width}") for width in (16, 4))
    exchanged = plant(copy, narrow, store.read_executable(wide))
    broken = find(manifest, "verify batch=1 length=32 k=0")
    path = store.executable_path(broken)
    path.write_bytes(path.read_bytes()[:-1])
    results = run_all(deviating, exchanged, broken, narrow)
    assert [result.fault for result in results] == ["self_test", "self_test", "bytes", None]
    reasons = [result.reason for result in results]
    assert reasons[0].startswith("target_k: the mean is") and f"recorded is {wrong.mean:.6g}" in reasons[0]
    assert "TypeError" in reasons[1] and str(path) in reasons[2]


def test_executables_are_tested_whatever_switches_of_jax_are_set(copy, run_all, monkeypatch):
    for name, value in JAX_SWITCHES.items():
        monkeypatch.setenv(name, value)
    assert [result.fault for result in run_all(*read_manifest(copy).entries)] == [None] * len(
        read_manifest(copy).entries
    )


def test_killed_process_is_not_a_fault_of_its_executable(copy):
    manifest, others = read_manifest(copy), children()
    with SelfTests(set_up_self_tests(copy, manifest)) as self_tests:
        assert self_tests.run(manifest.entries[0]).fault is None
        (worker,) = children() - others
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(IncompatibleBundle, match="was killed, probably because memory ran out"):
            self_tests.run(manifest.entries[0])
