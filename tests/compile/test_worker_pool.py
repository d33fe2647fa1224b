"""The worker pool: builds for a TPU that is not attached, in processes that may crash."""

import os
import platform
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.chips import parse_topology
from dflash_aot.cache.environment import libtpu_version
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import executable_key
from dflash_aot.compile.models.backend import TPU
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.pipeline import worker_pool
from dflash_aot.compile.pipeline.build_target import check_compiler
from dflash_aot.compile.pipeline.compilation_manager import compile_all
from dflash_aot.compile.pipeline.executable_builder import CompileJob
from dflash_aot.compile.pipeline.worker_pool import WorkerPool, find_last_words
from dflash_aot.compile.programs.programs import Programs, TracedPrograms

SLICE = parse_topology("v5e:1x1")
GRID = "batch=1 length=32 k=0,3 prefill=16"
LOGS = "dflash-worker-*.log"
# What a stored file must not name: paths of the building machine.
PATHS = [str(Path(worker_pool.__file__).parent), str(Path.home()), ".py", "site-packages"]
PATHS += [platform.node()] if len(platform.node()) > 3 else []  # "vm" is part of every executable

pytestmark = pytest.mark.skipif(not libtpu_version(), reason="libtpu is not installed")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bundle")


@pytest.fixture(scope="module")
def source(small_pair) -> TracedPrograms:
    programs = Programs(*small_pair, "bfloat16", TensorParallel(backend=TPU))
    return TracedPrograms(programs, parse_grid(GRID, small_pair[1].block))


@pytest.fixture(scope="module")
def first(source, bundle):
    store = Store(bundle)
    with store.open_for_building(), WorkerPool(SLICE, bundle, 2) as pool:
        return compile_all(source, pool, store), pool.environment


@pytest.fixture(scope="module")
def compile_jobs(source, first) -> list[CompileJob]:
    return [
        CompileJob(one, dict(source.known), text, executable_key(text, one, first[1]), {})
        for one in source.signatures
        for text in [source.export(one)]
    ]


@pytest.fixture
def logs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(worker_pool.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def children(of: int | str = "self") -> set[int]:
    while True:
        with suppress(
            FileNotFoundError, ProcessLookupError
        ):  # a thread ended meanwhile, and another one has its children
            tasks = Path(f"/proc/{of}/task").iterdir()
            return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def test_pool_compiles_for_a_tpu_that_is_not_attached(first, source, bundle):
    report, environment = first
    assert [entry.signature for entry in report.entries] == source.signatures
    assert len(report.compiled) == len(source.signatures)
    assert (environment.platform, environment.topology) == ("tpu", "v5e:1x1")
    for entry in report.entries:
        assert Store(bundle).read_executable(entry)
        assert all("T(" in entry.analysis.layouts[name] for name in entry.signature.state)  # only a TPU has tiles
        for kept in (Store(bundle).read_executable(entry), Store(bundle).read_program(entry)):
            assert [word for word in (str(bundle), *PATHS) if word.encode() in kept] == []


def test_crashed_worker_fails_one_executable_and_keeps_its_log(first, compile_jobs, bundle, logs):
    before = children()
    with WorkerPool(SLICE, bundle, 1) as pool:
        (log,), (worker,) = logs.glob(LOGS), children() - before
        os.kill(*children(worker), signal.SIGABRT)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # libtpu's handler takes its time, and writes
        with open(log, "a") as end:
            end.write("F0101 00:00:00.000000 1 heap.cc:1] Check failed: enough\n*** stack trace ***\n    @ 0x1 f()\n")
        with pytest.raises(BuildFailed) as failed:
            pool.start(compile_jobs[0]).result()
        words = str(failed.value)
        assert words.startswith(f"the compiler process was ended by SIGABRT. {log}: F0101")
        assert words.endswith("Check failed: enough")
        assert pool.start(compile_jobs[0]).result().key == first[0].entries[0].key
        assert worker not in children()
    assert (children(), list(logs.glob(LOGS))) == (before, [log])


def test_killed_worker_names_its_log_without_quoting_it(compile_jobs, bundle, logs, monkeypatch):
    monkeypatch.setenv("JAX_DEBUG_LOG_MODULES", "jax")
    before = children()
    with WorkerPool(SLICE, bundle, 1) as pool:
        (log,), (worker,) = logs.glob(LOGS), children() - before
        assert log.read_text().strip()
        os.kill(*children(worker), signal.SIGKILL)
        with pytest.raises(BuildFailed) as failed:
            pool.start(compile_jobs[0]).result()
    words = "SIGKILL, probably because memory ran out: try --jobs 1. Log: "
    assert str(failed.value) == f"the compiler process was ended by {words}{log}"


def test_pool_gives_up_after_two_crashes(compile_jobs, bundle, logs, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_nonsense=1")
    with WorkerPool(SLICE, bundle, 1) as pool:
        failures = [str(pool.start(job).exception()) for job in compile_jobs[:4]]
    assert all("xla_nonsense" in failure for failure in failures[:2])
    assert failures[2].startswith("not tried: ") and failures[2].endswith(f"at {compile_jobs[0].signature.label}")
    assert failures[3] == failures[2]
    assert len(list(logs.glob(LOGS))) == 2


def test_closed_pool_ends_workers_that_are_starting(compile_jobs, bundle):
    before = children()
    with WorkerPool(SLICE, bundle, 2) as pool:
        for job in compile_jobs[:2]:
            pool.start(job)
        while len(children() - before) < 2:
            time.sleep(0.01)
    assert children() == before


def test_unknown_compiler_flag_is_reported_in_the_compilers_words(tmp_path, logs, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")
    with pytest.raises(BuildFailed, match=r"process ended with 1\. .*: ERROR: Unknown .* flag 'no_such_flag'"):
        WorkerPool(SLICE, tmp_path, 1)


def test_missing_compiler_is_reported_with_its_install_command(monkeypatch, tmp_path):
    check_compiler()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        BadInput, match=r'pip install "dflash-aot\[tpu\]", or in a clone: pip install -c constraints.txt'
    ):
        check_compiler()


def test_last_words_are_the_line_that_explains_the_crash():
    for log, words in [
        ("", ""),
        ("F0101 a check\n*** Check failure stack trace: ***\n    @  0x1  f()\n", "F0101 a check"),
        (
            "noise\n*** SIGSEGV received\nPC: @ 0x1 f()\n   @ 0x2\nE0101 1 a.cc:1] RAW: dumping\n",
            "*** SIGSEGV received",
        ),
        ("Traceback\n  File x\nValueError: of Python\n", "ValueError: of Python"),
    ]:
        assert find_last_words(log) == words
