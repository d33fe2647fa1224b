"""Executables called in a process of their own: what they compute, and what becomes of those that crash."""

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
from dflash_aot.runtime.self_test.client import Canaries, order_canaries
from dflash_aot.runtime.self_test.worker import Trial

PROLOGUE, UNDEFINED = b"\x55\x48\x89\xe5", b"\x0f\x0b\x0f\x0b"  # push rbp; mov rbp, rsp · ud2; ud2


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle("tiny"), tmp_path / "bundle"))


@pytest.fixture
def try_all(copy) -> Callable[..., list[Trial]]:
    """Entries as they are, or as something has changed them → their trials, by one process as long as it lives."""

    def run(*entries: Entry) -> list[Trial]:
        with Canaries(order_canaries(copy, read_manifest(copy))) as canaries:
            return [canaries.try_one(entry) for entry in entries]

    return run


def children() -> set[int]:
    """Processes that this thread has started and that live."""
    return set(map(int, Path("/proc/thread-self/children").read_text().split()))


def find(manifest: Manifest, label: str) -> Entry:
    return next(entry for entry in manifest.entries if entry.signature.label == label)


def plant(copy: Path, entry: Entry, serialized: bytes) -> Entry:
    """Another executable in its place, all hashes right."""
    blob, content = pack_blob(serialized)
    (copy / "executables" / blob.sha256).write_bytes(content)
    return structs.replace(entry, **structs.asdict(blob))


def test_a_build_keeps_what_every_executable_computes_and_all_compute_it_again(copy, try_all):
    entries = read_manifest(copy).entries
    assert all(entry.self_test and entry.self_test.outputs for entry in entries)
    assert [trial.kind for trial in try_all(*entries)] == [None] * len(entries)


def test_an_executable_that_computes_something_else_is_told(copy, try_all):
    entry = find(read_manifest(copy), "verify batch=1 length=32 k=3")
    first, *rest = entry.self_test.outputs
    wrong = structs.replace(first, mean=2 * first.mean)
    (trial,) = try_all(structs.replace(entry, self_test=structs.replace(entry.self_test, outputs=(wrong, *rest))))
    assert trial.kind == "canary"
    assert trial.words.startswith("target_k: the mean is") and f"recorded is {wrong.mean:.6g}" in trial.words


def test_an_executable_that_ends_its_process_is_named_and_the_next_one_is_tried(copy, try_all):
    """Machine code with instructions that no processor has."""
    good = find(read_manifest(copy), "kv_write rows=1 width=4")
    serialized = Store(copy).read_executable(good)
    assert PROLOGUE in serialized
    bad = plant(copy, good, serialized.replace(PROLOGUE, UNDEFINED))
    crashed, again = try_all(bad, good)
    assert (crashed.kind, crashed.canary) == ("crash", None)
    assert crashed.words.startswith("the process that called it was ended by SIGILL")
    assert again.kind is None


def test_an_executable_of_another_signature_raises_and_is_named(copy, try_all):
    manifest = read_manifest(copy)
    wide, narrow = (find(manifest, f"kv_write rows=1 width={width}") for width in (16, 4))
    exchanged = plant(copy, narrow, Store(copy).read_executable(wide))
    wrong, right = try_all(exchanged, narrow)
    assert wrong.kind == "canary" and "TypeError" in wrong.words
    assert right.kind is None


def test_a_broken_file_is_never_called(copy, try_all):
    entry = read_manifest(copy).entries[0]
    path = copy / "executables" / entry.sha256
    path.write_bytes(path.read_bytes()[:-1])
    (trial,) = try_all(entry)
    assert trial.kind == "bytes" and str(path) in trial.words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_count": 4096}, "4096 cpu devices are needed, 1 are attached"),
        ({"cpu_features": ("avx2048",)}, "cpu_features: built for 'uses avx2048', here 'not on this processor'"),
    ],
)
def test_on_another_machine_nothing_is_called(copy, changes, words):
    manifest = read_manifest(copy)
    order = order_canaries(copy, manifest)
    order = structs.replace(order, environment=structs.replace(order.environment, **changes))
    with Canaries(order) as canaries, pytest.raises(IncompatibleBundle, match=words):
        canaries.try_one(manifest.entries[0])


def test_an_executable_whose_process_was_killed_is_not_to_blame(copy):
    """As the system kills who takes too much memory."""
    manifest, others = read_manifest(copy), children()
    with Canaries(order_canaries(copy, manifest)) as canaries:
        assert canaries.try_one(manifest.entries[0]).kind is None
        (worker,) = children() - others
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(IncompatibleBundle, match="was killed. Where nobody did that, memory was short"):
            canaries.try_one(manifest.entries[0])


def test_what_is_kept_of_other_inputs_is_not_compared(copy, try_all):
    entry = read_manifest(copy).entries[0]
    old = structs.replace(entry, self_test=structs.replace(entry.self_test, version=0, outputs=()))
    (again,), (now,) = try_all(old), try_all(entry)
    assert (again.kind, again.compared, again.canary) == (None, False, entry.self_test)
    assert (now.kind, now.compared) == (None, True)
