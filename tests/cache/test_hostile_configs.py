"""Damaged configs: the readers return facts or raise BadCheckpoint, nothing else."""

import collections
import copy
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dflash_aot.cache.errors import BadCheckpoint, DflashError
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.speculators_draft import find_ambiguity, is_speculators, read_verifier
from dflash_aot.cache.model_config.target import read_target

FILE = Path("hostile/config.json")
ABSENT = object()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0}
NUMBERS = [0, 1, -1, 2, 3, 2**31 - 2, 2**31, 2**63, 10**400, -(10**400), 0.5, 1.0, -0.0, 1e-320, 1e-9, 1e15, 1e308]
NASTY = [None, True, False, *NUMBERS, float("nan"), float("inf"), float("-inf"), "", "x", "\ud800", "0", [], {}]
NESTED = [[[]], [None], [{}], [1, "x"], {"x": {}}, {"rope_theta": 1}, ["sliding_attention"] * 5, [[1, [2, [3]]]]]
VALUES = [*NASTY, *NESTED, YARN, {**YARN, "rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}]
KEYS = """
rope_parameters rope_scaling rope_theta rope_type factor mscale mscale_all_dim beta_slow truncate attention_factor
original_max_position_embeddings partial_rotary_factor sliding_window use_sliding_window layer_types is_causal causal
max_window_layers block_size mask_token_id target_layer_ids draft_vocab_size target_hidden_size proposal_methods
num_target_layers head_dim mlp_bias num_local_experts mlp_only_layers model_type conv_kernel_size selector_top_k
output_multiplier final_logit_softcapping projector_type verifier quantization_config weight_block_size
modules_to_not_convert strategy ignore
""".split()  # noqa: SIM905  a list would take a line for each


def containers(value):
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def check_facts(facts):
    """Checks that facts survive encoding, and that their frequencies are angles within float32."""
    assert msgspec.json.decode(msgspec.json.encode(facts), type=type(facts)) == facts
    rope = facts.decoder.rope
    frequencies = np.array([*rope.inverse_frequencies(), rope.attention_factor], np.float32)
    assert len(frequencies) == rope.head_dim // 2 + 1
    assert np.isfinite(frequencies).all() and (frequencies > 0).all()
    if isinstance(facts, Draft):
        assert len(facts.windows) == facts.decoder.layers
        assert 1 <= facts.default_k <= facts.max_k <= facts.block
        assert min(facts.target_layer_ids) >= 0


def outcome(read, config):
    try:
        facts = read(ConfigFile(FILE, config))
    except DflashError as error:
        assert str(error).startswith(str(FILE)) and len(str(error)) < 3000, error
        str(error).encode()  # it can be printed
        return "refused"
    assert isinstance(facts, Target | Draft)
    check_facts(facts)
    return "read"


PAIRS = {
    "Qwen3-30B-A3B": None,
    "Llama-3.1-8B": None,
    "Qwen3-8B-FP8": None,
    "Llama-3.1-8B-Instruct-quantized.w8a8": None,
    "Qwen3-4B-DFlash-b16": "Qwen3-4B",
    "speculators-tiny/draft": "qwen3-tiny-tied/target",
    "dflash2-tiny/draft": "dflash2-tiny/target",
    "dflash2-tiny-speculators/draft_sliding": "dflash2-tiny/target",
}


@pytest.fixture
def reader(read_published_target):
    def choose(name):
        if (target := PAIRS[name]) is None:
            return read_target
        facts = read_published_target(target)

        def read(config):
            if is_speculators(config):
                read_verifier(config)
            draft = read_draft(config, facts)
            find_ambiguity(config)
            return draft

        return read

    return choose


@pytest.mark.parametrize("name", PAIRS)
def test_damaged_config_is_read_or_refused(published, reader, name):
    """Every value under every key, some under other keys at the top, and without each key."""
    read, counts = reader(name), collections.Counter()
    assert outcome(read, published(name)) == "read"
    for index, place in enumerate(containers(published(name))):
        keys = list(place) if isinstance(place, dict) else range(len(place))
        for key in [*keys, *(KEYS if index == 0 else ())]:
            for value in [ABSENT, *VALUES] if key in keys else VALUES[::6]:
                config = published(name)
                damaged = list(containers(config))[index]
                if value is not ABSENT:
                    damaged[key] = copy.deepcopy(value)
                else:
                    del damaged[key]
                counts[outcome(read, config)] += 1
    assert min(counts["read"], counts["refused"]) > 25, counts


@pytest.mark.parametrize(("key", "opening"), [("hidden_size", "["), ("layer_types", "["), ("rope_scaling", '{"x": ')])
def test_deeply_nested_value_is_read_or_refused(write_config, published, key, opening):
    target = read_target(ConfigFile(FILE, published("Qwen3-4B")))
    config = json.dumps({**published("Qwen3-4B-DFlash-b16"), key: "HERE"})
    for depth in (3, *range(700, 1000, 5), 100_000):
        nested = opening * depth + "1" + ("]" if opening == "[" else "}") * depth
        directory = write_config(config.replace('"HERE"', nested))
        try:
            read_draft(read_config(directory), target)
        except DflashError as error:
            assert len(str(error)) < 3000
    with pytest.raises(BadCheckpoint, match="is not JSON: maximum recursion depth exceeded"):
        read_config(directory)
