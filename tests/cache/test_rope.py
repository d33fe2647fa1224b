"""Rotary embeddings: frequencies equal those of transformers; refused scalings."""

import copy
from pathlib import Path

import numpy as np
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.rope import read_rope

FILE = Path("model/config.json")
POSITIONS = 40960
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10240}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": LINEAR,
    "llama3": LLAMA3,
    "llama3, small": {**LLAMA3, "original_max_position_embeddings": 64, "factor": 2.5},
    "yarn": YARN,
    "yarn as older files name it": {**YARN, "rope_type": None, "type": "yarn"},
    "yarn, attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "mscale": 0.707},
    "yarn, both mscales": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn, mscales and attention_factor": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5, "attention_factor": 1.5},
    "yarn, betas": {**YARN, "beta_fast": 64, "beta_slow": 2.5},
    "yarn, equal betas": {**YARN, "beta_fast": 7.0, "beta_slow": 7.0, "truncate": False},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, original absent": {"rope_type": "yarn", "factor": 4.0},
    "yarn, original null": {**YARN, "original_max_position_embeddings": 2048, "factor": None},
    "yarn, shrinking": {**YARN, "factor": 0.5},
}


def read(**values):
    return read_rope(ConfigFile(FILE, values), 128, POSITIONS)


def embed(**values):
    embedding = Qwen3RotaryEmbedding(
        Qwen3Config(head_dim=128, max_position_embeddings=POSITIONS, **copy.deepcopy(values))
    )
    return embedding.inv_freq.numpy(), embedding.attention_scaling


def without_nulls(scaling):
    return {key: value for key, value in scaling.items() if not (key == "rope_type" and value is None)}


def test_frequencies_equal_those_of_transformers():
    for scaling in SCALINGS.values():
        theta = 1000000
        for values in (
            {"rope_parameters": {**scaling, "rope_theta": theta}},
            {"rope_parameters": scaling, "rope_theta": theta},
            {"rope_scaling": scaling or None, "rope_theta": theta},
        ):
            rope = read(**values)
            theirs = {key: without_nulls(value) if isinstance(value, dict) else value for key, value in values.items()}
            frequencies, attention_factor = embed(**theirs)
            np.testing.assert_allclose(rope.inverse_frequencies(), frequencies, rtol=1e-5)
            np.testing.assert_allclose(rope.attention_factor, attention_factor, rtol=1e-5)


def test_original_positions_at_the_top_take_precedence():
    for scaling in [YARN, LLAMA3]:
        values = {"rope_scaling": scaling, "rope_theta": 10000.0, "original_max_position_embeddings": 512}
        frequencies, _ = embed(**values)
        np.testing.assert_allclose(read(**values).inverse_frequencies(), frequencies, rtol=1e-5)
        assert read(**values).scaling.original_positions == 512


def test_rope_parameters_take_precedence_over_rope_theta():
    assert read(rope_parameters={"rope_theta": 500.0}, rope_theta=1e6).theta == 500.0
    assert read(rope_parameters={}, rope_theta=1e6).theta == 1e6
    assert read(rope_parameters={"rope_theta": 500.0}).theta == 500.0


def test_rope_settings_may_be_repeated_in_both_keys():
    both = {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": YARN}
    assert read(**both) == read(rope_theta=1e6, rope_scaling=YARN)


def test_contradicting_rope_keys_are_refused(refusal):
    message = refusal(read, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=LINEAR)
    found = "{'factor': 4.0, 'rope_type': 'linear'}"
    assert message == f"{FILE}: rope_scaling is {found}: rope_parameters has another scaling"


def test_invalid_scaling_is_refused_with_place_and_value(refusal):
    for changes, words in [
        ({"rope_type": "dynamic"}, "rope_type is 'dynamic': supported are default, linear,"),
        ({"rope_type": None, "type": "su"}, "type is 'su': supported are"),
        ({"rope_type": None}, "rope_type is missing, but factor is set"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: only the rotation of whole heads"),
        ({"full_attention": {}}, "full_attention is {}: only one rotary embedding for all layers is supported"),
        ({"rope_type": "linear", "factor": None}, "factor is None: expected a positive number"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0: expected a positive number"),
        ({"rope_type": "linear", "factor": 1e300}, "factor is 1e+300: expected 1e-09 to 1e+15"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan: expected a positive number"),
        ({"rope_type": "linear", "factor": 10**400}, "factor is 100000000000000000...000000000000000000"),
        ({"rope_type": "llama3", "low_freq_factor": None}, "low_freq_factor is None: expected a positive number"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings is missing"),
        ({"rope_type": "llama3", "low_freq_factor": 4.0}, "low_freq_factor is 4.0: expected less than"),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": None}, "factor is missing, and"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"rope_type": "yarn", "beta_fast": 0.5}, "beta_fast is 0.5: expected no less than beta_slow, which is 1.0"),
        ({"rope_type": "yarn", "attention_factor": 0.0}, "attention_factor is 0.0: expected a positive number"),
        ({"rope_type": "yarn", "mscale": "1"}, "mscale is '1': expected a positive number"),
        ({"rope_type": "yarn", "truncate": 1}, "truncate is 1: expected true or false"),
    ]:
        for place in ["rope_scaling", "rope_parameters"]:
            section = {**LLAMA3, **changes}
            message = refusal(read, rope_theta=1e6, **{place: section})
            assert message.startswith(f"{FILE}: {place}.{words}")


def test_base_of_one_or_less_is_refused(refusal):
    for theta in [1, 0.5]:
        for scaling in [{"rope_type": "default"}, YARN]:
            words = "expected more than 1, so that frequencies decrease"
            top = refusal(read, rope_theta=theta, rope_scaling=scaling)
            inner = refusal(read, rope_parameters={**scaling, "rope_theta": theta})
            assert top == f"{FILE}: rope_theta is {float(theta)}: {words}"
            assert inner == f"{FILE}: rope_parameters.rope_theta is {float(theta)}: {words}"


def test_invalid_base_is_refused_with_place_and_value(refusal):
    for values, words in [
        ({}, "rope_theta is None: expected a positive number"),
        ({"rope_theta": True}, "rope_theta is True: expected a positive number"),
        ({"rope_theta": 1e300}, "rope_theta is 1e+300: expected 1e-09 to 1e+15"),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25: only the rotation of"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta is 0: expected a positive number"),
        ({"rope_parameters": []}, "rope_parameters is []: expected an object"),
        ({"rope_scaling": 4.0}, "rope_scaling is 4.0: expected an object"),
    ]:
        assert refusal(read, **values).startswith(f"{FILE}: {words}")


def test_rotary_factor_of_one_is_accepted():
    assert read(rope_theta=1e6, partial_rotary_factor=1.0) == read(rope_theta=1e6)
