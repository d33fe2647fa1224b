"""Records of benchmarks that are refused; what is written is read in the tests of dflash-bench."""

import json

import msgspec
import pytest

from dflash_aot.benchmarks.record import RECORD_SCHEMA, read_record
from dflash_aot.cache.errors import BadInput


def test_file_that_is_not_a_record_is_refused(make_record, tmp_path):
    path = tmp_path / "toy.json"
    valid = msgspec.to_builtins(make_record([]))
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
