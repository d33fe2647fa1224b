"""Where a checkpoint is looked for, and what is said when it is not there."""

import os
import subprocess
import sys

import pytest

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.checkpoint_location import locate_checkpoint


def test_a_directory_is_taken_as_it_is(tmp_path):
    assert locate_checkpoint(str(tmp_path), "target") == tmp_path


def test_a_directory_that_looks_like_a_hub_id_is_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert locate_checkpoint("models/mine", "draft").resolve() == tmp_path / "models" / "mine"


def test_the_home_directory_may_be_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert locate_checkpoint("~/model", "target") == tmp_path / "model"


def test_the_home_of_nobody_is_refused():
    with pytest.raises(BadCheckpoint, match="--target ~no-such-user/model: no such directory"):
        locate_checkpoint("~no-such-user/model", "target")


def test_a_file_is_refused_with_what_is_needed(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("")
    with pytest.raises(BadCheckpoint, match=f"--draft {path} is a file: give the directory that holds config.json"):
        locate_checkpoint(str(path), "draft")


@pytest.mark.parametrize("reference", ["/no/such/place", "./missing", "../missing", "missing", "a/b/c", "mödel/x"])
def test_a_missing_directory_is_refused(tmp_path, monkeypatch, reference):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadCheckpoint, match=f"--target {reference}: no such directory"):
        locate_checkpoint(reference, "target")


@pytest.mark.parametrize("hub_id", ["no-such-owner/no-such-model", "z-lab/Qwen3-4B--b16.", "a/b--c"])
def test_a_hub_id_that_is_not_in_the_cache_is_refused_with_the_download(tmp_path, monkeypatch, hub_id):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadCheckpoint) as refused:
        locate_checkpoint(hub_id, "draft")
    assert str(refused.value).startswith(f"--draft {hub_id} is neither a directory nor in the local Hugging Face cache")
    assert str(refused.value).endswith(f"hf download {hub_id}")


def test_a_hub_id_in_the_cache_is_found_without_a_network(tmp_path):
    snapshot = tmp_path / "models--some-owner--some-model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    references = tmp_path / "models--some-owner--some-model" / "refs"
    references.mkdir()
    (references / "main").write_text("0" * 40)
    module = "dflash_aot.cache.model_config.checkpoint_location"
    locate = f"from {module} import *; print(locate_checkpoint('some-owner/some-model', 'target'))"
    found = subprocess.run(
        [sys.executable, "-c", locate],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(snapshot)
