"""Locations: checkpoint directories and hub ids, URLs, and URLs shown without secrets."""

import os
import shutil
import subprocess
import sys

import pytest

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.files.locations import choose_directory, hide_secrets, is_url, locate_checkpoint


def test_checkpoint_directory_is_returned_as_given_or_with_its_home(tmp_path, monkeypatch):
    assert locate_checkpoint(str(tmp_path), "target") == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert locate_checkpoint("~/model", "target") == tmp_path / "model"


def test_file_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("")
    with pytest.raises(BadCheckpoint, match=f"--draft {path} is a file: give the directory that holds config.json"):
        locate_checkpoint(str(path), "draft")


def test_missing_directory_is_refused(tmp_path, monkeypatch):
    for reference in [
        "/no/such/place",
        "./missing",
        "../missing",
        "missing",
        "a/b/c",
        "mödel/x",
        "~no-such-user/model",
    ]:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BadCheckpoint, match=f"--target {reference}: no such directory"):
            locate_checkpoint(reference, "target")


def test_hub_id_outside_the_hub_cache_is_refused(tmp_path, monkeypatch):
    for hub_id in ["no-such-owner/no-such-model", "z-lab/Qwen3-4B--b16.", "a/b--c", "a/b@refs/pr/1"]:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BadCheckpoint) as refused:
            locate_checkpoint(hub_id, "draft")
        assert str(refused.value).startswith(
            f"--draft {hub_id} is neither a directory nor in the local Hugging Face cache"
        )
        assert str(refused.value).endswith(f"hf download {hub_id.replace('@', ' --revision ')}")


def test_hub_id_is_located_in_the_hub_cache(tmp_path):
    snapshot = tmp_path / "models--some-owner--some-model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    references = tmp_path / "models--some-owner--some-model" / "refs"
    references.mkdir()
    (references / "main").write_text("0" * 40)
    (references / "v1").write_text("1" * 40)
    other = shutil.copytree(snapshot, snapshot.with_name("1" * 40))
    module = "dflash_aot.cache.files.locations"
    names = ["some-owner/some-model", "some-owner/some-model@v1", f"some-owner/some-model@{'1' * 40}"]
    locate = f"from {module} import *; print(*(locate_checkpoint(name, 'target') for name in {names}))"
    found = subprocess.run(
        [sys.executable, "-c", locate],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert found.stdout.split() == [str(snapshot), str(other), str(other)]


def test_is_url_tells_urls_from_paths():
    for path in ["", "bundle", "/a/b", "a:b", "./s3://bucket", "C:/bundle", "a b://c", "~/store"]:
        assert not is_url(path)
    for url in ["s3://bucket/a", "file:///a", "memory://", "simplecache::s3://bucket", "S3://b"]:
        assert is_url(url)


def test_link_that_leads_nowhere_is_no_directory(tmp_path):
    (tmp_path / "link").symlink_to("gone")
    for path in (tmp_path / "link", tmp_path / "link" / "bundle"):
        with pytest.raises(BadInput, match="link is a link to gone, which does not exist: remove the link"):
            choose_directory(str(path), "")
    (tmp_path / "gone").mkdir()
    assert choose_directory(str(tmp_path / "link"), "") == tmp_path / "link"


def test_hide_secrets_drops_users_passwords_and_queries():
    for text, shown in [
        ("s3://bucket/a b", "s3://bucket/a b"),
        ("s3://key:sec/ret@bucket", "s3://key:sec/ret@bucket"),  # no user: a bucket "key:sec", as URLs are read
        ("ftp://me:p@ss@host/a", "ftp://host/a"),
        ("https://token@host/a?sig=secret", "https://host/a"),
        ("cannot read 'https://me:pw@host/a?sig=secret', why?", "cannot read 'https://host/a', why?"),
        ("abfs://me:pw@account/a", "abfs://account/a"),
        ("simplecache::s3://me:pw@bucket?v=1 and ftp://a@b?c", "simplecache::s3://bucket and ftp://b"),
        ("https://host/?sig=://?secret", "https://host/"),
    ]:
        assert hide_secrets(text) == shown
