"""Builds of a small pair: complete, incremental, resumable, and honest about what failed."""

import shutil
import signal
import subprocess
import sys

import jax
import msgspec
import pytest

from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.compile.pipeline.build_target import attach
from dflash_aot.compile.pipeline.compilation_manager import build
from dflash_aot.compile.pipeline.threads import Threads
from dflash_aot.compile.programs.program_source import TracedPrograms
from dflash_aot.compile.programs.programs import Programs

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
STALLING_BUILDER = """
import sys
from pathlib import Path
import msgspec
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.bundle.store import Store
from dflash_aot.compile.pipeline.build_target import attach
from dflash_aot.compile.pipeline.compilation_manager import build
from dflash_aot.compile.programs.programs import Programs
from dflash_aot.compile.programs.program_source import TracedPrograms
from dflash_aot.compile.pipeline.threads import Threads

target, draft = msgspec.json.decode(sys.stdin.readline(), type=tuple[Target, Draft])

def stall(progress):
    if progress.compiled:
        print(progress.label, flush=True)
    if progress.done == 3:
        sys.stdin.readline()

store, grid = Store(Path(sys.argv[1])), parse_grid(sys.argv[2], draft.block)
source = TracedPrograms(Programs(target, draft, "float32"), grid, "cpu")
with store.open_for_building(), Threads(attach("cpu", None, None), store, 1) as threads:
    build(source, threads, store, stall)
"""


@pytest.fixture(scope="module")
def build_in(small_pair):
    """A bundle directory and what may differ → the report, and everything that was said on the way."""
    machine = attach("cpu", None, None)

    def run(bundle, buckets=BUCKETS, programs=Programs, jobs=1):
        store, said = Store(bundle), []
        source = TracedPrograms(programs(*small_pair, "float32"), parse_grid(buckets, small_pair[1].block), "cpu")
        with store.open_for_building(), Threads(machine, store, jobs) as threads:
            report = build(source, threads, store, said.append)
        return report, said

    return run


@pytest.fixture(scope="module")
def first(build_in, tmp_path_factory):
    """A complete build: its directory, report and progress. Only to be read."""
    bundle = tmp_path_factory.mktemp("first")
    return bundle, *build_in(bundle)


@pytest.fixture
def copied(first, tmp_path):
    """The complete build, somewhere else."""
    return shutil.copytree(first[0], tmp_path / "bundle")


def labels(report, keys):
    return [entry.signature.label for entry in report.entries if entry.key in keys]


def recorded(bundle):
    return len(list((bundle / "entries").iterdir()))


class BrokenPrograms(Programs):
    """One program that cannot be traced, and one that can but not compiled."""

    def draft(self, *_, **__):
        raise ValueError("no draft today\nand more that nobody reads")

    def kv_write(self, arrays):
        unknown = jax.ffi.ffi_call("tpu_custom_call", jax.typeof(arrays["draft_k"]))
        return {**super().kv_write(arrays), "draft_k": unknown(arrays["draft_k"])}


def test_a_first_build_compiles_every_program_of_the_grid(first):
    _, report, _ = first
    assert [entry.signature.label for entry in report.entries] == LABELS
    assert labels(report, report.compiled) == LABELS


def test_a_build_says_what_it_is_at_and_what_is_done(first):
    _, _, said = first
    assert [p.label for p in said if p.entry is None] == LABELS
    finished = [p for p in said if p.entry is not None]
    assert [p.label for p in finished] == [p.entry.signature.label for p in finished] == LABELS
    assert [p.done for p in finished] == [1, 2, 3, 4, 5, 6, 7]
    assert {p.total for p in said} == {len(LABELS)}


def test_every_executable_is_kept_with_what_it_cost(first):
    bundle, report, _ = first
    for entry in report.entries:
        assert len(Store(bundle).read_executable(entry)) == entry.serialized_bytes > entry.bytes > 0
        assert entry.seconds > 0
        assert entry.memory.arguments > 0
    assert not (bundle / "manifest.json").exists()  # that is published by who knows the rest of it


def test_every_executable_writes_its_state_in_place(first, small_pair):
    _, report, _ = first
    known = Programs(*small_pair, "float32").arrays_by_name(parse_grid(BUCKETS, 4))
    for entry in report.entries:
        state_bytes = sum(known[name].bytes for name in entry.signature.donated)
        assert entry.memory.aliased == state_bytes, entry.signature.label


def test_the_same_build_elsewhere_compiles_nothing(copied, build_in, first):
    again, said = build_in(copied)
    assert again.compiled == frozenset()
    assert again.entries == first[1].entries
    assert not any(progress.compiled for progress in said)


def test_a_new_bucket_compiles_only_what_it_adds(copied, build_in):
    report, _ = build_in(copied, "batch=1 length=32 k=0,1,3 prefill=16")
    expected = ["draft batch=1 length=32 k=1", "verify batch=1 length=32 k=1", "kv_write rows=1 width=2"]
    assert labels(report, report.compiled) == expected
    assert len(report.entries) == len(LABELS) + 3


def test_a_damaged_executable_is_compiled_again(copied, build_in, first):
    _, report, _ = first
    damaged = report.entries[4]
    path = copied / "executables" / damaged.sha256
    path.write_bytes(path.read_bytes()[:-1])
    again, _ = build_in(copied)
    assert again.compiled == {damaged.key}
    assert all(Store(copied).read_executable(entry) for entry in again.entries)


def test_every_failure_is_reported_and_all_else_is_built(tmp_path, build_in, first):
    with pytest.raises(BuildFailed) as failed:
        build_in(tmp_path, programs=BrokenPrograms, jobs=2)
    summary, *lines = str(failed.value).splitlines()
    assert summary == "4 of 7 executables could not be built, the others are kept:"
    reasons = dict(line.strip().split(": ", 1) for line in lines)
    assert reasons.pop("draft batch=1 length=32 k=3") == "ValueError: no draft today"
    assert sorted(reasons) == ["kv_write rows=1 width=1", "kv_write rows=1 width=16", "kv_write rows=1 width=4"]
    assert all("tpu_custom_call" in reason for reason in reasons.values())
    assert not (tmp_path / "manifest.json").exists()
    report, _ = build_in(tmp_path, jobs=2)
    assert labels(report, report.compiled) == ["draft batch=1 length=32 k=3", *LABELS[4:]]
    assert [entry.key for entry in report.entries] == [entry.key for entry in first[1].entries]


def test_a_killed_build_goes_on_where_it_was(tmp_path, small_pair, build_in):
    command = [sys.executable, "-c", STALLING_BUILDER, str(tmp_path), BUCKETS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as builder:
        try:
            builder.stdin.write(msgspec.json.encode(small_pair) + b"\n")
            builder.stdin.flush()
            built = [builder.stdout.readline().decode().strip() for _ in range(3)]
        finally:
            builder.send_signal(signal.SIGKILL)
    assert built == LABELS[:3]
    assert recorded(tmp_path) == 3
    report, _ = build_in(tmp_path)
    assert labels(report, report.compiled) == LABELS[3:]
