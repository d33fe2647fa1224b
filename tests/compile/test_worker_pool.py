"""Building for a TPU that is not there, in processes that may die."""

import os
import platform
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.topology import parse_topology
from dflash_aot.compile.pipeline import worker_pool as module
from dflash_aot.compile.pipeline.build_target import check_compiler
from dflash_aot.compile.pipeline.compilation_manager import build
from dflash_aot.compile.pipeline.executable_builder import Order
from dflash_aot.compile.pipeline.worker_pool import Workers, find_last_words
from dflash_aot.compile.programs.program_source import TracedPrograms
from dflash_aot.compile.programs.programs import Programs

SLICE = parse_topology("v5e:1x1")
GRID = "batch=1 length=32 k=0,3 prefill=16"
LOGS = "dflash-worker-*.log"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libtpu is for Linux")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """The directory that all tests of this file build in."""
    return tmp_path_factory.mktemp("bundle")


@pytest.fixture(scope="module")
def source(small_pair) -> TracedPrograms:
    programs = Programs(*small_pair, "bfloat16", stacked=True)
    return TracedPrograms(programs, parse_grid(GRID, small_pair[1].block), "tpu")


@pytest.fixture(scope="module")
def first(source, bundle):
    """A build of everything, two at a time: its report, and the workers' environment."""
    store = Store(bundle)
    with store.open_for_building(), Workers(SLICE, bundle, 2) as workers:
        return build(source, workers, store, lambda _: None), workers.environment


@pytest.fixture(scope="module")
def orders(source, first) -> list[Order]:
    """What workers are asked for, executable by executable."""
    return [
        Order(one, dict(source.known), text, executable_key(text, one, first[1]))
        for one in source.signatures
        for text in [source.export(one)]
    ]


@pytest.fixture
def logs(tmp_path, monkeypatch) -> Path:
    """Where workers started from here on keep theirs."""
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def children() -> set[int]:
    """Processes that this one has started and that have not been waited for."""
    while True:
        with suppress(
            FileNotFoundError, ProcessLookupError
        ):  # a thread ended meanwhile, and another one has its children
            tasks = Path("/proc/self/task").iterdir()
            return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def test_everything_is_built_for_a_tpu_that_is_not_there(first, source, bundle):
    report, environment = first
    assert [entry.signature for entry in report.entries] == source.signatures
    assert len(report.compiled) == len(source.signatures)
    assert (environment.platform, environment.topology) == ("tpu", "v5e:1x1")
    for entry in report.entries:
        assert Store(bundle).read_executable(entry)
        assert all("T(" in entry.analysis.layouts[name] for name in entry.signature.state)  # only a TPU has tiles


def test_what_is_built_is_found_again_and_nothing_is_left_behind(first, source, bundle, logs):
    before = children()
    with Workers(SLICE, bundle, 1) as workers:
        assert len(children() - before) == len(list(logs.glob(LOGS))) == 1
        again = build(source, workers, Store(bundle), lambda _: None)
    assert (again.entries, again.compiled) == (first[0].entries, frozenset())
    assert (children(), list(logs.glob(LOGS))) == (before, [])


def test_a_worker_that_dies_takes_one_executable_with_it_and_tells_where_to_look(first, orders, bundle, logs):
    before = children()
    with Workers(SLICE, bundle, 1) as workers:
        (log,), (worker,) = logs.glob(LOGS), children() - before
        os.kill(worker, signal.SIGABRT)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # libtpu's handler takes its time, and writes
        with open(log, "a") as end:
            end.write("F0101 00:00:00.000000 1 heap.cc:1] Check failed: enough\n*** stack trace ***\n    @ 0x1 f()\n")
        with pytest.raises(BuildFailed) as failed:
            workers.start(orders[0]).result()
        words = str(failed.value)
        assert words.startswith(f"the compiler's process was ended by SIGABRT. {log} says: F0101")
        assert words.endswith("Check failed: enough")
        assert workers.start(orders[0]).result().key == first[0].entries[0].key
        assert worker not in children()
    assert (children(), list(logs.glob(LOGS))) == (before, [log])


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGUSR1, "SIGUSR1. Log: "),
        (signal.SIGKILL, "SIGKILL: where nobody did that, memory was short, and --jobs 1 takes less. Log: "),
    ],
)
def test_what_a_worker_says_at_its_start_is_no_reason_for_its_end(orders, bundle, logs, monkeypatch, number, words):
    monkeypatch.setenv("JAX_DEBUG_LOG_MODULES", "jax")
    before = children()
    with Workers(SLICE, bundle, 1) as workers:
        (log,), (worker,) = logs.glob(LOGS), children() - before
        assert log.read_text().strip()
        os.kill(worker, number)
        with pytest.raises(BuildFailed) as failed:
            workers.start(orders[0]).result()
    assert str(failed.value) == f"the compiler's process was ended by {words}{log}"


def test_what_kills_every_worker_is_told_once(orders, bundle, logs, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_nonsense=1")
    with Workers(SLICE, bundle, 1) as workers:
        failures = [str(workers.start(order).exception()) for order in orders[:4]]
    assert all("xla_nonsense" in failure for failure in failures[:2])
    assert failures[2].startswith("given up: ") and failures[2].endswith(f"see {orders[0].signature.label}")
    assert failures[3] == failures[2]
    assert len(list(logs.glob(LOGS))) == 2


def test_a_worker_that_is_still_starting_is_ended_too(orders, bundle):
    before = children()
    with Workers(SLICE, bundle, 2) as workers:
        for order in orders[:2]:
            workers.start(order)
        while len(children() - before) < 2:
            time.sleep(0.01)
    assert children() == before


def test_an_executable_is_the_same_bytes_whoever_built_it_when(first, orders, tmp_path, monkeypatch):
    """In another bundle, one at a time in another order, from another directory, as another user."""
    monkeypatch.chdir(tmp_path)
    for variable in ("USER", "LOGNAME", "HOME"):
        monkeypatch.setenv(variable, "/nowhere/else")
    with Store(tmp_path / "other place").open_for_building(), Workers(SLICE, tmp_path / "other place", 1) as workers:
        for entry, order in reversed(list(zip(first[0].entries, orders, strict=True))[2:5]):
            again = workers.start(order).result()
            assert (again.key, again.sha256, again.program) == (entry.key, entry.sha256, entry.program)


def test_nothing_of_the_building_machine_is_in_what_is_kept(first, bundle):
    telling = [
        str(bundle),
        str(Path(module.__file__).parent),
        str(Path.home()),
        *([platform.node()] if len(platform.node()) > 3 else []),  # "vm" stands in every executable
        ".py",
        "site-packages",
    ]
    for entry in first[0].entries:
        for kept in (Store(bundle).read_executable(entry), Store(bundle).read_program(entry)):
            assert [word for word in telling if word.encode() in kept] == [], entry.signature.label


def test_flags_that_the_compiler_does_not_know_are_told_in_its_words(tmp_path, logs, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")
    with pytest.raises(BuildFailed, match=r"process ended with 1\. .* says: ERROR: Unknown .* flag 'no_such_flag'"):
        Workers(SLICE, tmp_path, 1)


def test_without_the_compiler_the_command_that_installs_it_is_told(monkeypatch, tmp_path):
    check_compiler()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        BadInput, match=r'pip install "dflash-aot\[tpu\]", or in a clone: pip install -c constraints.txt'
    ):
        check_compiler()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ("one\n\ntwo  \n", "two"),
        ("F0101 a check\n*** Check failure stack trace: ***\n    @  0x1  f()\n", "F0101 a check"),
        (
            "noise\n*** SIGSEGV received\nPC: @ 0x1 f()\n   @ 0x2\nE0101 1 a.cc:1] RAW: dumping\n",
            "*** SIGSEGV received",
        ),
        ("Traceback\n  File x\nValueError: of Python\n", "ValueError: of Python"),
    ],
)
def test_last_words_are_those_that_tell(log, words):
    assert find_last_words(log) == words
