"""Records: written and read unchanged, with their machine, commit and faults."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from dflash_aot.benchmarks import record as record_module
from dflash_aot.benchmarks.record import RECORD_SCHEMA, Record, read_machine, read_record, write_record
from dflash_aot.cache.errors import BadInput

SAMPLES = [{"way": "ours", "repeat": 0, "seconds": 0.1, "token_ids": [1, 2]}, {"way": "théirs", "accepted": None}]


@pytest.fixture
def record() -> Record:
    site = read_machine(0.5)
    return Record(
        RECORD_SCHEMA, "toy", "dflash-bench toy", "", "2026-01-01T00:00:00+00:00", 1.5, site, {"k": 7}, SAMPLES, ""
    )


def test_written_record_is_read_unchanged_and_has_a_line_for_each_sample(record, tmp_path):
    path = tmp_path / "toy.json"
    for samples in ([], SAMPLES[:1], SAMPLES):
        one = structs.replace(record, samples=samples)
        write_record(one, path)
        assert read_record(path) == one
    lines = path.read_text().splitlines()
    assert [json.loads(line.strip().rstrip(",")) for line in lines if '"way"' in line] == SAMPLES


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": RECORD_SCHEMA + 1}, f"schema {RECORD_SCHEMA + 1}"),
        ({"colour": "blue"}, "colour"),
        ({"samples": {}}, "array"),
        ({"seconds": "long"}, "float"),
        ({"environment": {}}, "processor"),
        ({"environment": {**msgspec.to_builtins(read_machine(0.0)), "weather": "fine"}}, "weather"),
    ],
)
def test_file_that_is_not_a_record_is_refused(record, tmp_path, change, complaint):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps({**msgspec.to_builtins(record), **change}))
    with pytest.raises(BadInput, match=complaint) as refused:
        read_record(path)
    assert str(path) in str(refused.value)


def test_missing_file_and_invalid_json_are_refused(tmp_path):
    (tmp_path / "broken.json").write_bytes(b"\xff{")
    for name in ("broken.json", "missing.json"):
        with pytest.raises(BadInput, match=name):
            read_record(tmp_path / name)


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
    installed = tmp_path / "checkout/venv/dflash_aot/benchmarks/record.py"
    installed.parent.mkdir(parents=True)
    shutil.copy(record_module.__file__, installed)
    assert told_commit(installed) == ""  # an installed copy in some repository
