"""vLLM's speculative_config: supported and refused keys."""

import json

import pytest
from msgspec import structs

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.speculative_config import SpeculativeConfig, choose_k, parse_speculative_config

PUBLISHED = {
    "method": "dflash",
    "model": "z-lab/Qwen3-4B-DFlash-b16",
    "num_speculative_tokens": 15,
    "draft_tensor_parallel_size": 1,
}


@pytest.fixture
def draft(read_changed_draft):
    return read_changed_draft()


def test_configs_of_vllm_are_parsed():
    assert parse_speculative_config(json.dumps(PUBLISHED)) == SpeculativeConfig(**PUBLISHED)
    assert parse_speculative_config("{}") == SpeculativeConfig()
    assert parse_speculative_config('{"method": null}') == SpeculativeConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds a list, expected an object"),
        ('{"method": "eagle3"}', "method is 'eagle3'; only 'dflash' is supported"),
        ('{"method": 1}', "method is 1; expected a text"),
        ('{"model": ""}', "model is ''; expected a text"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0; expected a whole number of at least 1"),
        ('{"num_speculative_tokens": "7"}', "num_speculative_tokens is '7'; expected a whole number"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens is True; expected a whole number"),
        ('{"draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size is 2; only 1 is"),
        ('{"quantization": "fp8"}', "quantization is a key of vLLM that is not supported here"),
        (
            '{"num_spec_tokens": 7}',
            "unknown key 'num_spec_tokens'; supported are method, model, num_speculative_tokens",
        ),
    ],
    ids=lambda value: value[:30],
)
def test_unsupported_key_or_value_is_refused_by_name(text, words):
    with pytest.raises(BadInput) as refused:
        parse_speculative_config(text)
    assert str(refused.value).startswith("--speculative_config") and words in str(refused.value)


def test_k_is_the_override_or_the_default_of_the_draft(draft):
    assert choose_k(SpeculativeConfig(), draft) == draft.block - 1
    assert choose_k(SpeculativeConfig(), structs.replace(draft, k=5)) == 5
    assert choose_k(SpeculativeConfig(num_speculative_tokens=3), structs.replace(draft, k=5)) == 3


def test_k_larger_than_a_block_is_refused(draft):
    with pytest.raises(BadInput, match="num_speculative_tokens is 16, but the draft's block_size is 16: .* 15 drafted"):
        choose_k(SpeculativeConfig(num_speculative_tokens=16), draft)
