"""Self-tests in a subprocess: correct, wrong, crashing and damaged executables, and other machines."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_aot.cache.bundle.manifest import Entry, read_manifest
from dflash_aot.cache.bundle.self_test import SelfTestResult, SelfTests, set_up_self_tests
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
