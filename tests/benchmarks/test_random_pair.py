"""Random pairs: the same weights every time, readable by this project and by transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_aot.benchmarks.contenders import ensure_pair
from dflash_aot.cache.errors import BadInput


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


@pytest.mark.parametrize("name", ["embedded", ""])
def test_unknown_name_is_refused(name, tmp_path):
    with pytest.raises(BadInput, match="is not a random pair"):
        ensure_pair(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_transformers_reads_the_target(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny["target"], dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.arange(8)[None]).logits
    assert logits.shape == (1, 8, 512) and 0.1 < float(logits.std()) < 10  # neither zero nor exploding
