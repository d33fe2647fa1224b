"""Random pairs are always the same, whole, and what both sides of a comparison can read."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_aot.benchmarks.random_pair import ensure_pair, split
from dflash_aot.cache.bundle.weight_recipe import Placement
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target


def read_all(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def tiny(shelf) -> dict[str, Path]:
    return ensure_pair("tiny", shelf)


def test_a_pair_is_the_same_wherever_it_is_written(tiny, tmp_path):
    again = ensure_pair("tiny", tmp_path)
    assert all(read_all(tiny[role]) == read_all(again[role]) for role in ("target", "draft"))


def test_a_pair_that_is_there_is_not_written_again(tiny, shelf):
    before = {path: path.stat().st_mtime_ns for path in shelf.rglob("*")}
    assert ensure_pair("tiny", shelf) == tiny
    assert {path: path.stat().st_mtime_ns for path in shelf.rglob("*")} == before


def test_a_longer_block_is_another_draft_of_the_same_target(tiny, shelf):
    longer = ensure_pair("tiny-block256", shelf)
    target = read_target(read_config(longer["target"]))
    assert longer["target"] == tiny["target"] and longer["draft"] != tiny["draft"]
    assert read_draft(read_config(longer["draft"]), target).block == 256
    assert read_draft(read_config(tiny["draft"]), target).block == 16


@pytest.mark.parametrize("name", ["embedded", "tiny-block", "tiny-block0", "tiny-blockade", "-block16", ""])
def test_another_name_is_refused(name, tmp_path):
    with pytest.raises(BadInput, match="no such random pair"):
        ensure_pair(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_transformers_reads_the_target(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny["target"], dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.arange(8)[None]).logits
    assert logits.shape == (1, 8, 512) and 0.1 < float(logits.std()) < 10  # neither dead nor blown up


def test_weights_are_split_by_bytes():
    placements = [Placement(name, (size,), (0,), (size,)) for name, size in [("a", 2), ("b", 1), ("c", 4), ("d", 1)]]
    parts = [[one.tensor for one in part] for part in split(placements, 12)]
    assert parts == [["a", "b"], ["c"], ["d"]]  # c alone is more than 12 bytes


def test_an_index_names_every_tensor_once(tiny):
    index = json.loads((tiny["target"] / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.embed_tokens.weight" in index and set(index.values()) == {"model-00000.safetensors"}
