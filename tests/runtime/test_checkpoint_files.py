"""Files of a checkpoint that are no regular files, or too large: every reader refuses them at once."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
from tokenizers import models

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.files.checkpoint_files import MAX_FILE_BYTES, read_checkpoint_object, read_tokenizer_files
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.runtime.text.chat_template import read_chat_template, render_chat
from dflash_aot.runtime.text.tokenizer import Tokenizer
from dflash_aot.runtime.weights.checkpoint_pair import read_end_tokens
from dflash_aot.runtime.weights.safetensors_reader import CheckpointTensors


class Reader(NamedTuple):
    """A function that reads a file of a directory."""

    file: str
    read: Callable[[Path], object]


READERS = (
    Reader("config.json", read_config),
    Reader("config.json", lambda directory: read_end_tokens(directory, 9)),
    Reader("generation_config.json", lambda directory: read_end_tokens(directory, 9)),
    Reader("tokenizer.json", Tokenizer.open),
    Reader("chat_template.jinja", read_chat_template),
    Reader("tokenizer_config.json", read_chat_template),
    Reader("model.safetensors", CheckpointTensors),
    Reader("model.safetensors.index.json", CheckpointTensors),
    *(
        Reader(name, lambda directory: render_chat(directory, [{"role": "user", "content": "a"}]))
        for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json")
    ),
)


def make_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("reader", READERS, ids=[f"{reader.file}-{at}" for at, reader in enumerate(READERS)])
def test_other_kinds_of_files_are_refused(checkpoint, reader):
    """A fifo without a writer blocks whoever opens it, and /dev/zero never ends."""
    path = checkpoint / reader.file
    for make, kind in ((os.mkfifo, "a fifo"), (make_endless_device, "a device"), (os.mkdir, "a directory")):
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(BadCheckpoint, match=f"{path}: {kind}, where a file should be"):
            reader.read(checkpoint)


def test_file_beyond_its_limit_is_not_read(tmp_path):
    for number, reader in enumerate(reader for reader in READERS if reader.file in MAX_FILE_BYTES):
        checkpoint = tmp_path / str(number)
        checkpoint.mkdir()
        tokenizers.Tokenizer(models.BPE()).save(str(checkpoint / "tokenizer.json"))
        with open(checkpoint / reader.file, "wb") as file:
            file.truncate(1 << 40)  # a hole: takes no space
        words = f"{1 << 40} bytes, where at most {MAX_FILE_BYTES[reader.file]} are read"
        with pytest.raises(BadCheckpoint, match=words):
            reader.read(checkpoint)


def test_links_of_a_cache_are_followed(tmp_path):
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    assert read_checkpoint_object(tmp_path / "config.json") == {}
    read_tokenizer_files(tmp_path)


def test_missing_and_dangling_files_are_absent(tmp_path):
    (tmp_path / "config.json").symlink_to("nowhere")
    assert read_checkpoint_object(tmp_path / "config.json") is None
    assert read_checkpoint_object(tmp_path / "generation_config.json") is None


def test_tokens_that_no_text_has_are_refused(checkpoint):
    """A token of 50 MB would take 4 GB of memory and half a minute."""
    path = checkpoint / "tokenizer.json"
    plain = json.loads(path.read_text())
    for tokens, refused in [
        (["a" * 1_000_000], False),
        (["a" * 1_100_000], True),
        (['"\\' * 300_000], True),
        ([f"{number}{'a' * 20_000}" for number in range(5)], True),
        (["a" * 16_000, *map(str, range(1000))], False),
    ]:
        plain["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
        path.write_text(json.dumps(plain))
        if refused:
            with pytest.raises(BadCheckpoint, match=r"tokenizer.json holds \d texts of up to \d+ bytes, where at most"):
                Tokenizer.open(checkpoint)
        else:
            assert Tokenizer.open(checkpoint).encode(tokens[-1]) is not None
    plain["added_tokens"] = [{"content": f"{number:04}" * 4000} for number in range(80)]
    path.write_text(json.dumps(plain))
    with pytest.raises(
        BadCheckpoint, match=r"tokenizer.json holds \d+ added tokens with \d+ characters together: at most"
    ):
        Tokenizer.open(checkpoint)
