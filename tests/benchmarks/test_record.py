"""Records: written and read unchanged, with their machine, commit and faults."""

import json

import msgspec
import pytest

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
