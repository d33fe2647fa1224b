"""Records: written and read unchanged, with their machine, commit and faults."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dflash_aot.benchmarks import record as record_module
from dflash_aot.benchmarks.record import RECORD_SCHEMA, Record, read_machine, read_record, write_record
from dflash_aot.cache.errors import BadInput

SAMPLES = [{"way": "ours", "repeat": 0, "seconds": 0.1, "token_ids": [1, 2]}, {"way": "théirs", "accepted": None}]


@pytest.fixture
def record() -> Record:
    return Record(RECORD_SCHEMA, "toy", "", "", "", 1.5, read_machine(0.5), {"k": 7}, SAMPLES, "")


def test_written_record_is_read_unchanged_and_has_a_line_for_each_sample(record, tmp_path):
    path = tmp_path / "toy.json"
    write_record(record, path)
    assert read_record(path) == record
    lines = path.read_text().splitlines()
    assert [json.loads(line.strip().rstrip(",")) for line in lines if '"way"' in line] == SAMPLES


def test_file_that_is_not_a_record_is_refused(record, tmp_path):
    path = tmp_path / "toy.json"
    valid = msgspec.to_builtins(record)
    for text, complaint in (
        (json.dumps(valid | {"schema": RECORD_SCHEMA + 1}), f"schema {RECORD_SCHEMA + 1}"),
        (json.dumps(valid | {"colour": "blue"}), "colour"),
        (json.dumps(valid | {"environment": {}}), "processor"),
        ("{", "toy.json"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=complaint) as refused:
            read_record(path)
        assert str(path) in str(refused.value)
    with pytest.raises(BadInput, match="missing"):
        read_record(tmp_path / "missing.json")


# -- the commit


def told_commit(path: Path) -> str:
    source = f"import runpy; print(runpy.run_path({str(path)!r})['read_commit']())"
    return subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True).stdout.strip()


def test_commit_is_that_of_the_running_sources(tmp_path):
    root = tmp_path / "checkout"
    for room in record_module.ROOMS:
        (root / room).mkdir(parents=True)
    source = Path(shutil.copy(record_module.__file__, root / "benchmarks/record.py"))
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    head = git("rev-parse", "HEAD")
    assert told_commit(source) == head
    (root / "results.json").write_text("{}")
    assert told_commit(source) == head  # nothing that ran
    (root / "compile/new.py").write_text("")
    assert told_commit(source) == f"{head}-dirty"
    installed = root / "venv/dflash_aot/benchmarks/record.py"
    installed.parent.mkdir(parents=True)
    shutil.copy(record_module.__file__, installed)
    assert told_commit(installed) == ""  # an installed copy in some repository
