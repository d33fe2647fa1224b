"""Hybrid targets (Qwen3.5): facts of both config layouts and of published sizes, and refusals."""

import json

import pytest

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import AttentionShape, Decoder, DenseMlp, GatedDeltaNet, Target
from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.cache.model_config.target import read_target

# hidden, MLP width, layers, heads, kv heads, value heads, tied
PUBLISHED = {
    "Qwen3.5-0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "Qwen3.5-27B": (5120, 17408, 64, 24, 4, 48, False),
}


def test_published_hybrid_is_read(read_published_target):
    for name in PUBLISHED:
        hidden, width, layers, heads, kv_heads, value_heads, tied = PUBLISHED[name]
        attention = AttentionShape(heads, kv_heads, head_dim=256, normed=True, biased=False, gated=True)
        rope = Rope(1e7, 64)  # a quarter of a head
        decoder = Decoder(layers, hidden, DenseMlp(width), attention, rope, 1e-6, 248320, 262144, unit_offset=True)
        linear = tuple(layer for layer in range(layers) if layer % 4 != 3)
        recurrent = GatedDeltaNet(16, value_heads, key_dim=128, value_dim=128, kernel=4, layers=linear)
        assert read_published_target(name) == Target(decoder, tied, recurrent)


@pytest.fixture(scope="module")
def text(golden_directory):
    """The text-only layout of the golden target."""
    return read_config(golden_directory / "qwen35-tiny" / "target_text")


@pytest.fixture(scope="module")
def read_changed(text):
    def read(**changes) -> Target:
        return read_target(ConfigFile(text.path, {**text.values, **changes}))

    return read


def test_both_layouts_have_the_same_facts(golden_directory, read_changed):
    nested = read_target(read_config(golden_directory / "qwen35-tiny" / "target"))
    assert nested == read_changed()
    assert (nested.attention_layers, nested.recurrent.layers) == ((3, 7), (0, 1, 2, 4, 5, 6))


def test_nested_config_takes_its_own_tie_word_embeddings(golden_directory):
    config = read_config(golden_directory / "qwen35-tiny" / "target")
    values = json.loads(json.dumps(config.values))
    values["text_config"]["tie_word_embeddings"] = False
    assert read_target(ConfigFile(config.path, values)).tied
    del values["tie_word_embeddings"]
    assert not read_target(ConfigFile(config.path, values)).tied
    del values["text_config"]
    with pytest.raises(BadCheckpoint, match=r"text_config is missing: expected the keys of the text model"):
        read_target(ConfigFile(config.path, values))


def test_without_layer_types_the_interval_decides(read_changed):
    assert read_changed(layer_types=None, full_attention_interval=None).attention_layers == (3, 7)
    assert read_changed(layer_types=None, full_attention_interval=2).attention_layers == (1, 3, 5, 7)


def test_rotary_factor_is_read_in_either_place(read_changed, text):
    rope = {key: value for key, value in text.values["rope_parameters"].items() if key != "partial_rotary_factor"}
    assert read_changed(partial_rotary_factor=None).decoder.rope.head_dim == 8
    assert read_changed(rope_parameters=rope, partial_rotary_factor=0.5).decoder.rope.head_dim == 16
    assert read_changed(rope_parameters=rope, partial_rotary_factor=None).decoder.rope.head_dim == 8


def test_unsupported_hybrid_is_refused(read_changed, refusal, text):
    for changes, words in [
        ({"attn_output_gate": False}, "attn_output_gate is False: only attention with an output gate is supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid': supported are 'silu' and 'swish'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16': the recurrent state is always float32"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3: not a multiple of 2 key heads"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads is missing; expected a whole number"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1: expected at least 2"),
        ({"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim is 65: expected at most 64"),
        ({"layer_types": ["full_attention"] * 7}, "expected 8 items, linear_attention or full_attention"),
        ({"layer_types": ["full_attention"] * 8}, "a hybrid of 8 layers without linear_attention is not supported"),
        ({"layer_types": None, "full_attention_interval": 9}, "full_attention_interval is 9: a hybrid of 8 layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: but "),
    ]:
        message = refusal(read_changed, **changes)
        assert message.startswith(f"{text.path}: ")
        assert words in message
