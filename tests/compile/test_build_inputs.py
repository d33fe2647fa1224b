"""A build with nothing to do traces no program, and every change of what programs are made from makes it trace all."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_aot.cache.bundle.store import INPUTS_FILE, Store
from dflash_aot.cache.key import DEVICE_OPTIONS
from dflash_aot.compile.pipeline import build_job
from dflash_aot.compile.pipeline.build_inputs import find_changed_inputs, is_newer_than_process
from dflash_aot.compile.pipeline.build_job import BuildJob, BuildOptions, BuildRequest, resolve, run_build
from dflash_aot.compile.pipeline.compilation_manager import BuildObserver
from dflash_aot.compile.programs.programs import TracedPrograms
from tests.cache.damage import cut, flip

REPOSITORY = Path(__file__).parents[2]
SOURCE = "compile/models/layers.py"
INPUTS = {SOURCE: "1", "flax": "0.12", "XLA_FLAGS": "", "jax_enable_x64": "False"}


class CountingPrograms(TracedPrograms):
    exported = 0

    def export(self, signature):
        self.exported += 1
        return super().export(signature)


class Messages(BuildObserver):
    def __init__(self):
        self.lines = []

    def on_info(self, message):
        self.lines.append(message)


@pytest.fixture(scope="module")
def request_(smallest) -> BuildRequest:
    return BuildRequest(
        target=str(smallest.target),
        draft=str(smallest.draft),
        grid="batch=1 length=16 k=0 prefill=4",
        platform="cpu",
        sampling=("greedy",),
    )


def plan(request: BuildRequest, bundle: Path, retrace: bool = False) -> BuildJob:
    options = BuildOptions(self_test=False, retrace=retrace, exact=True, replace=True)
    job = build_job.plan(resolve(request, Store(bundle), BuildObserver()), options, BuildObserver())
    deployment = job.deployment
    source = CountingPrograms(deployment.programs, deployment.grid)
    return dataclasses.replace(job, source=source)


@pytest.fixture(scope="module")
def built(request_, tmp_path_factory) -> Path:
    bundle = tmp_path_factory.mktemp("built") / "bundle"
    run_build(plan(request_, bundle), BuildObserver(), inputs=INPUTS)
    return bundle


@pytest.fixture
def bundle(built, tmp_path) -> Path:
    return shutil.copytree(built, tmp_path / "bundle")


def build_again(
    request: BuildRequest, bundle: Path, inputs=INPUTS, retrace: bool = False
) -> tuple[int, int, list[str]]:
    job, messages = plan(request, bundle, retrace), Messages()
    compilation = run_build(job, messages, inputs=inputs)
    return job.source.exported, len(compilation.compiled), messages.lines


def test_nothing_is_traced_where_nothing_has_changed(request_, bundle):
    before = (bundle / "manifest.json").read_bytes()
    assert build_again(request_, bundle) == (0, 0, [])
    assert (bundle / "manifest.json").read_bytes() == before


def test_changed_input_is_named_and_everything_is_traced_once(request_, bundle):
    inputs = {**INPUTS, SOURCE: "another value"}
    traced, compiled, lines = build_again(request_, bundle, inputs)
    assert (traced, compiled) == (4, 0)
    assert lines == [f"every program is traced again, because of changes since the last build: {SOURCE}"]
    assert build_again(request_, bundle, inputs)[0] == 0


def test_build_without_inputs_traces_and_records_nothing(request_, bundle):
    recorded = (bundle / INPUTS_FILE).read_bytes()
    assert build_again(request_, bundle, inputs=None)[0] == 4
    assert (bundle / INPUTS_FILE).read_bytes() == recorded


def write_pair(request: BuildRequest, folder: Path) -> BuildRequest:
    config = json.loads((Path(request.draft) / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2 * config["rms_norm_eps"]}))
    return dataclasses.replace(request, draft=str(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda request, _: dataclasses.replace(request, weights="int8"),
        lambda request, tmp_path: write_pair(request, tmp_path / "draft"),
    ],
    ids=["weights", "config"],
)
def test_changed_request_is_traced(request_, bundle, tmp_path, change):
    traced, compiled, _ = build_again(change(request_, tmp_path), bundle)
    assert traced >= 4 and compiled > 0


def test_other_compiler_options_are_compiled(request_, bundle, monkeypatch):
    monkeypatch.setitem(DEVICE_OPTIONS, "cpu", {"xla_backend_optimization_level": "0"})
    assert build_again(request_, bundle)[:2] == (4, 4)


@pytest.mark.parametrize(("folder", "damage"), [("executables", Path.unlink), ("programs", flip), ("entries", cut)])
def test_missing_or_corrupt_file_is_made_again(request_, bundle, folder, damage):
    path = min((bundle / folder).iterdir())
    damage(path)
    traced, compiled, lines = build_again(request_, bundle)
    assert (traced, compiled) == (4, 1)
    assert lines == [f"every program is traced again, because {path} is missing or corrupt"]
    assert build_again(request_, bundle) == (0, 0, [])


def test_unreadable_inputs_count_as_none(request_, bundle):
    for content in (b"", b"{", b'{"manifest": 1, "inputs": {}}', b"[" * 100_000):
        (bundle / INPUTS_FILE).write_bytes(content)
        assert Store(bundle).read_build_inputs() is None
    assert build_again(request_, bundle)[0] == 4
    assert Store(bundle).read_build_inputs() == INPUTS


def read_elsewhere(folder: Path, before: str = "", **variables: str) -> dict[str, str]:
    """The inputs that a new process reads, which finds the packages of a folder first."""
    code = (
        f"{before}\nimport json\nfrom dflash_aot.compile.pipeline.build_inputs import read_build_inputs\n"
        "from dflash_aot.compile.pipeline.build_target import attach_devices\n"
        "print(json.dumps(read_build_inputs(attach_devices('cpu', None, 1))))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder), **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_versions_flags_and_settings_are_inputs(tmp_path):
    before = read_elsewhere(tmp_path)
    installed = tmp_path / "flax-99.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: flax\nVersion: 99.0\n")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=false"
    matmul = "import jax; jax.default_matmul_precision('highest').__enter__()"
    after = read_elsewhere(tmp_path, matmul, XLA_FLAGS=flags, LIBTPU_INIT_ARGS="--xla_tpu_scoped_vmem_limit_kib=16384")
    expected = ["LIBTPU_INIT_ARGS", "XLA_FLAGS", "flax", "jax_default_matmul_precision"]
    assert find_changed_inputs(before, after) == expected


def test_file_that_was_written_after_the_start_of_the_process_is_newer(tmp_path):
    """A process may run what a file held before; so it neither trusts nor records a digest of such a file."""
    path = tmp_path / "module.py"
    path.touch()
    assert is_newer_than_process(path)
    os.utime(path, (time.time() - 1e6,) * 2)
    assert is_newer_than_process(path), "its name or time was changed"
    assert not is_newer_than_process(Path(os.__file__))


def test_command_finds_a_changed_source_of_its_own_package(request_, tmp_path):
    copy = tmp_path / "copy/dflash_aot"
    for package in ("bin", "cache", "compile", "runtime"):
        shutil.copytree(REPOSITORY / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "dflash_aot.bin.precompile", "--noself_test", "--exact", "--platform", "cpu"]
    command += ["--target", request_.target, "--draft", request_.draft, "--bundle", str(tmp_path / "bundle")]
    command += ["--buckets", request_.grid, "--sampling", "greedy"]
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}

    def build() -> str:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "4 compiled" in build()
    again = build()
    assert "nothing to compile: all 4" in again and "traced again" not in again
    source = copy / SOURCE
    source.write_text(f"{source.read_text()}\n# Another line.\n")
    changed = build()
    assert f"changes since the last build: {SOURCE}\n" in changed and "nothing to compile: all 4" in changed
