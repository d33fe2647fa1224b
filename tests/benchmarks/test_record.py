"""Records: written and read unchanged, with their machine, commit and faults."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import msgspec
import pytest
from msgspec import structs

from dflash_aot.benchmarks import record as record_module
from dflash_aot.benchmarks.machine import count_cores, read_machine
from dflash_aot.benchmarks.record import RECORD_SCHEMA, Record, read_record, setting, take_record, write_record
from dflash_aot.benchmarks.tables import Findings
from dflash_aot.cache.errors import BadInput, EngineFailed

SAMPLES = [{"way": "ours", "repeat": 0, "seconds": 0.1, "token_ids": [1, 2]}, {"way": "théirs", "accepted": None}]


@pytest.fixture
def record() -> Record:
    site = read_machine(0.5)
    return Record(
        RECORD_SCHEMA, "toy", "dflash-bench toy", "", "2026-01-01T00:00:00+00:00", 1.5, site, {"k": 7}, SAMPLES, ""
    )


def test_written_record_is_read_unchanged(record, tmp_path):
    for samples in (SAMPLES, SAMPLES[:1], []):
        one = structs.replace(record, samples=samples)
        write_record(one, tmp_path / "toy.json")
        assert read_record(tmp_path / "toy.json") == one


def test_each_sample_is_one_line(record, tmp_path):
    write_record(record, tmp_path / "toy.json")
    lines = (tmp_path / "toy.json").read_text().splitlines()
    assert [json.loads(line.strip().rstrip(",")) for line in lines if '"way"' in line] == SAMPLES


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": RECORD_SCHEMA + 1}, f"schema {RECORD_SCHEMA + 1}"),
        ({"colour": "blue"}, "colour"),
        ({"samples": {}}, "array"),
        ({"seconds": "long"}, "float"),
        ({"environment": {}}, "processor"),
    ],
)
def test_file_that_is_not_a_record_is_refused(record, tmp_path, change, complaint):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps({**msgspec.to_builtins(record), **change}))
    with pytest.raises(BadInput, match=complaint) as refused:
        read_record(path)
    assert str(path) in str(refused.value)


def test_machine_with_an_unknown_field_is_refused(record, tmp_path):
    facts = msgspec.to_builtins(record)
    facts["environment"]["weather"] = "fine"
    (tmp_path / "toy.json").write_text(json.dumps(facts))
    with pytest.raises(BadInput, match="weather"):
        read_record(tmp_path / "toy.json")


def test_missing_file_and_invalid_json_are_refused(tmp_path):
    (tmp_path / "broken.json").write_bytes(b"\xff{")
    for name in ("broken.json", "missing.json"):
        with pytest.raises(BadInput, match=name):
            read_record(tmp_path / name)


def test_machine_facts_are_those_of_this_machine():
    site = read_machine(0.25)
    assert site.cores == count_cores() >= 1
    assert site.memory_bytes > 1 << 28 and site.processor and site.load[0] == 0.25
    assert site.python == sys.version.split()[0]
    assert {"jax", "jaxlib", "torch", "transformers", "numpy"} == set(site.versions)
    assert site.versions["jax"] == jax.__version__


# -- the commit


@pytest.fixture
def git(tmp_path):
    """Runs in a repository that holds a copy of the rooms' one file that asks."""
    root = tmp_path / "checkout"
    for room in record_module.ROOMS:
        (root / room).mkdir(parents=True)
    shutil.copy(record_module.__file__, root / "benchmarks/record.py")
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")

    def run(*arguments: str) -> str:
        command = ["git", "-C", str(root), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "--quiet")
    run("add", ".")
    run("commit", "--quiet", "--message", "all")
    return run


def told_commit(path: Path) -> str:
    source = f"import runpy; print(runpy.run_path({str(path)!r})['read_commit']())"
    return subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True).stdout.strip()


def test_commit_is_that_of_the_running_sources(git, tmp_path):
    source = tmp_path / "checkout/benchmarks/record.py"
    head = git("rev-parse", "HEAD")
    assert told_commit(source) == head
    (tmp_path / "checkout/results.json").write_text("{}")
    assert told_commit(source) == head  # nothing that ran
    (tmp_path / "checkout/compile/new.py").write_text("")
    assert told_commit(source) == f"{head}-dirty"


def test_installed_copy_in_another_repository_has_no_commit(git, tmp_path):
    installed = tmp_path / "checkout/venv/dflash_aot/benchmarks/record.py"
    installed.parent.mkdir(parents=True)
    shutil.copy(record_module.__file__, installed)
    assert told_commit(installed) == ""


@dataclass(frozen=True)
class Steps:
    """How far a toy counts, and where it fails."""

    steps: int = setting(3, "how far")
    broken: int = setting(9, "where it breaks")


class Toy:
    """Counts, and finds fault with a two."""

    Settings = Steps

    def measure(self, settings, scratch, note):
        for step in range(settings.steps):
            if step == settings.broken:
                raise EngineFailed("the toy broke")
            note(f"step {step}")
            yield {"way": "toy", "step": step}

    def find_fault(self, samples):
        return "a two" if any(sample["step"] == 2 for sample in samples) else ""

    def make_findings(self, record):
        return Findings()


def take(settings: Steps) -> tuple[Record, Exception | None, list[str]]:
    notes: list[str] = []
    record, error = take_record("toy", Toy(), settings, "dflash-bench toy", Path("nowhere"), notes.append)
    return record, error, notes


def test_record_has_every_sample_and_how_it_was_taken():
    record, error, notes = take(Steps(steps=2))
    assert error is None and record.void == ""
    assert record.samples == [{"way": "toy", "step": 0}, {"way": "toy", "step": 1}]
    assert notes == ["step 0", "step 1"]
    assert (record.benchmark, record.command, record.settings) == ("toy", "dflash-bench toy", {"steps": 2, "broken": 9})
    assert record.started.endswith("+00:00") and record.seconds >= 0


def test_samples_with_a_fault_make_a_void_record():
    record, error, _ = take(Steps(steps=3))
    assert error is None and record.void == "a two" and len(record.samples) == 3


def test_samples_before_an_error_are_kept_in_a_void_record():
    record, error, _ = take(Steps(steps=3, broken=1))
    assert isinstance(error, EngineFailed)
    assert record.samples == [{"way": "toy", "step": 0}] and "the toy broke" in record.void
