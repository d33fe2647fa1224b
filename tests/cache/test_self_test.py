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
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import IncompatibleBundle
from dflash_aot.cache.self_test import SelfTestResult, SelfTests, set_up_self_tests

PROLOGUE, UNDEFINED = b"\x55\x48\x89\xe5", b"\x0f\x0b\x0f\x0b"  # push rbp; mov rbp, rsp · ud2; ud2


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle("tiny"), tmp_path / "bundle"))


@pytest.fixture
def run_all(copy) -> Callable[..., list[SelfTestResult]]:
    """Runs the self-tests of entries, in one process until it crashes."""

    def run(*entries: Entry) -> list[SelfTestResult]:
        with SelfTests(set_up_self_tests(copy, read_manifest(copy))) as self_tests:
            return [self_tests.run(entry) for entry in entries]

    return run


def children() -> set[int]:
    """Running child processes of this thread."""
    return set(map(int, Path("/proc/thread-self/children").read_text().split()))


def find(manifest: Manifest, label: str) -> Entry:
    return next(entry for entry in manifest.entries if entry.signature.label == label)


def plant(copy: Path, entry: Entry, serialized: bytes) -> Entry:
    """Replaces an executable, with matching hashes."""
    blob, content = pack_blob(serialized)
    (copy / "executables" / blob.sha256).write_bytes(content)
    return structs.replace(entry, **structs.asdict(blob))


def test_every_executable_of_a_build_has_a_record_and_passes(copy, run_all):
    entries = read_manifest(copy).entries
    assert all(entry.self_test and entry.self_test.outputs for entry in entries)
    assert [result.fault for result in run_all(*entries)] == [None] * len(entries)


def test_executable_that_deviates_from_its_record_is_a_fault(copy, run_all):
    entry = find(read_manifest(copy), "verify batch=1 length=32 k=3")
    first, *rest = entry.self_test.outputs
    wrong = structs.replace(first, mean=2 * first.mean)
    (result,) = run_all(structs.replace(entry, self_test=structs.replace(entry.self_test, outputs=(wrong, *rest))))
    assert result.fault == "self_test"
    assert result.reason.startswith("target_k: the mean is") and f"recorded is {wrong.mean:.6g}" in result.reason


def test_crashing_executable_is_a_fault_and_the_next_one_runs(copy, run_all):
    """With machine code that no processor executes."""
    good = find(read_manifest(copy), "kv_write rows=1 width=4")
    serialized = Store(copy).read_executable(good)
    assert PROLOGUE in serialized
    bad = plant(copy, good, serialized.replace(PROLOGUE, UNDEFINED))
    crashed, again = run_all(bad, good)
    assert (crashed.fault, crashed.record) == ("crash", None)
    assert crashed.reason.startswith("the process that called it was ended by SIGILL")
    assert again.fault is None


def test_executable_of_another_signature_is_a_fault(copy, run_all):
    manifest = read_manifest(copy)
    wide, narrow = (find(manifest, f"kv_write rows=1 width={width}") for width in (16, 4))
    exchanged = plant(copy, narrow, Store(copy).read_executable(wide))
    wrong, right = run_all(exchanged, narrow)
    assert wrong.fault == "self_test" and "TypeError" in wrong.reason
    assert right.fault is None


def test_broken_file_is_never_called(copy, run_all):
    entry = read_manifest(copy).entries[0]
    path = copy / "executables" / entry.sha256
    path.write_bytes(path.read_bytes()[:-1])
    (result,) = run_all(entry)
    assert result.fault == "bytes" and str(path) in result.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_count": 4096}, "4096 cpu devices are needed, 1 are attached"),
        ({"cpu_features": ("avx2048",)}, "cpu_features: built for 'uses avx2048', here 'not on this processor'"),
    ],
)
def test_no_executable_is_called_on_another_machine(copy, changes, words):
    manifest = read_manifest(copy)
    setup = set_up_self_tests(copy, manifest)
    setup = structs.replace(setup, environment=structs.replace(setup.environment, **changes))
    with SelfTests(setup) as self_tests, pytest.raises(IncompatibleBundle, match=words):
        self_tests.run(manifest.entries[0])


def test_killed_process_is_not_a_fault_of_its_executable(copy):
    """As by a system that is short of memory."""
    manifest, others = read_manifest(copy), children()
    with SelfTests(set_up_self_tests(copy, manifest)) as self_tests:
        assert self_tests.run(manifest.entries[0]).fault is None
        (worker,) = children() - others
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(IncompatibleBundle, match="was killed, probably because memory ran out"):
            self_tests.run(manifest.entries[0])


def test_record_of_other_inputs_is_not_compared(copy, run_all):
    entry = read_manifest(copy).entries[0]
    old = structs.replace(entry, self_test=structs.replace(entry.self_test, version=0, outputs=()))
    (again,), (now,) = run_all(old), run_all(entry)
    assert (again.fault, again.compared, again.record) == (None, False, entry.self_test)
    assert (now.fault, now.compared) == (None, True)
