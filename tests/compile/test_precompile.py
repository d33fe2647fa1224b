"""The library interface of a build: reports, observers, silence, restored settings, refused arguments."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.compile import BuildObserver, plan_build, precompile, rebuild

GRID = "batch=1 length=16 k=0 prefill=4"


class RecordingObserver(BuildObserver):
    def __init__(self):
        self.phases, self.messages = [], []

    def on_phase(self, phase, total):
        self.phases.append([phase, total])

    def on_executable(self, progress):
        self.phases[-1][2:] = [progress.done]

    def on_info(self, message):
        self.messages.append(message)

    on_warning = on_info


@pytest.fixture
def pair(smallest) -> dict[str, Path]:
    return {"target": smallest.target, "draft": smallest.draft}


def test_precompile_builds_reports_and_prints_nothing(pair, tmp_path, capfd):
    observer, cache = RecordingObserver(), jax.config.values["jax_enable_compilation_cache"]
    options = {"bundle": tmp_path, "grid": GRID, "platform": "cpu", "sampling": ["greedy"]}
    report = precompile(**pair, **options, observer=observer)
    count = len(report.entries)
    assert read_manifest(tmp_path).entries == report.entries
    assert report.compiled == {entry.key for entry in report.entries}
    assert (report.bundle, report.deployment.dtype, report.memory, report.store) == (tmp_path, "float32", None, None)
    assert all(entry.self_test for entry in report.entries)
    assert observer.phases == [["compile", count, count], ["self-test", count, count]]
    assert observer.messages == []
    again = precompile(**pair, **{**options, "grid": parse_grid(GRID, 8)})
    assert (again.compiled, again.entries) == (frozenset(), report.entries)
    assert rebuild(tmp_path).entries == report.entries
    assert capfd.readouterr() == ("", "")
    assert jax.config.values["jax_enable_compilation_cache"] == cache


def test_build_that_was_planned_over_an_older_bundle_is_refused(pair, tmp_path):
    options = {**pair, "bundle": tmp_path, "platform": "cpu", "sampling": ["greedy"], "self_test": False}

    class Meanwhile(BuildObserver):
        def on_plan(self, deployment):
            precompile(**options, grid=GRID)

    wider = "batch=1 length=16 k=0,1 prefill=4"
    with pytest.raises(BuildFailed, match="changed while this build was planned"):
        precompile(**options, grid=wider, observer=Meanwhile())
    assert str(read_manifest(tmp_path).grid) == GRID
    precompile(**options, grid=wider)
    assert str(read_manifest(tmp_path).grid) == wider


def test_default_grid_has_every_k_of_the_ranges(pair, tmp_path):
    ranges = ((1, 1, 5), (2, 3, 2), (4, 8, 0))
    asked = {**pair, "bundle": tmp_path, "platform": "cpu", "num_speculative_tokens_per_batch_size": ranges}
    assert plan_build(**asked).deployment.grid.k == (0, 2, 5)
    assert plan_build(**asked, num_speculative_tokens=7).deployment.grid.k == (0, 2, 5, 7)
    with pytest.raises(BadInput, match="^num_speculative_tokens_per_batch_size has K = 5, more than .* = 3"):
        plan_build(**asked, num_speculative_tokens=3)


def test_error_of_an_observer_ends_the_build(pair, tmp_path):
    class Cancelling(BuildObserver):
        def on_phase(self, phase, total):
            raise BuildFailed("cancelled")

    with pytest.raises(BuildFailed, match="cancelled"):
        precompile(**pair, bundle=tmp_path, grid=GRID, platform="cpu", observer=Cancelling())
    assert not (tmp_path / "manifest.json").exists()


def test_compiler_process_imports_no_model_code():
    """With flax it would take 1.25 s to start instead of 0.8 s."""
    code = "import sys, dflash_aot.compile.pipeline.worker_process; print('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
