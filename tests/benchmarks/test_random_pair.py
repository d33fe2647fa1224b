"""Random pairs: the same weights every time, readable by this project and by transformers."""

from pathlib import Path

import pytest

from dflash_aot.benchmarks.contenders import ensure_pair


def read_all(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def tiny(shelf) -> dict[str, Path]:
    return ensure_pair("tiny", shelf)


def test_pair_has_the_same_weights_in_every_directory(tiny, tmp_path):
    again = ensure_pair("tiny", tmp_path)
    assert all(read_all(tiny[role]) == read_all(again[role]) for role in ("target", "draft"))
