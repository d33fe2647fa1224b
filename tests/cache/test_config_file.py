"""Reading a `config.json` key by key."""

import pytest

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.config_file import read_config


def test_missing_file_is_refused_with_the_expected_layout(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"config\.json does not exist: expected a checkpoint directory"):
        read_config(tmp_path)


def test_content_other_than_an_object_is_refused(write_config, tmp_path):
    for content, words in [
        ("", "is not JSON: Expecting value"),
        ('{"hidden_size": 64', "is not JSON: Expecting ',' delimiter"),
        ("[1, 2]", "holds a list, expected an object"),
        ("null", "holds null, expected an object"),
        ('{"block_size": 8, "block_size": 8}', "is not JSON: block_size is there twice: remove one"),
    ]:
        with pytest.raises(BadCheckpoint, match=rf"config\.json {words}"):
            read_config(write_config(content))
    (tmp_path / "config.json").write_bytes(b'{"hidden_act": "\xff"}')
    with pytest.raises(BadCheckpoint, match="is not JSON: 'utf-8' codec can't decode"):
        read_config(tmp_path)


def test_null_counts_as_absent(write_config):
    config = read_config(write_config({"key": None}))
    assert not config.has("key")
    assert config.optional("key", int) is None
    assert config.optional_integers("key") is None
    assert config.section("key").values == {}
    with pytest.raises(BadCheckpoint, match="key is missing; expected a whole number"):
        config.require("key", int)
