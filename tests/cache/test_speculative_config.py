"""vLLM's speculative_config: supported and refused keys."""

import json

import pytest
from msgspec import structs

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import DraftHeads
from dflash_aot.cache.model_config.speculative_config import (
    SpeculativeConfig,
    check_k_ranges,
    choose_k,
    parse_speculative_config,
)

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


def test_unsupported_key_or_value_is_refused_by_name():
    for text, words in [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds a list, expected an object"),
        ('{"method": "eagle3"}', "method is 'eagle3'; only 'dflash' is supported"),
        ('{"model": ""}', "model is ''; expected a text"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0; expected a whole number of at least 1"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens is True; expected a whole number"),
        ('{"draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size is 2; only 1 is"),
        ('{"quantization": "fp8"}', "quantization is a key of vLLM that is not supported here"),
        ('{"num_spec_tokens": 7}', "unknown key 'num_spec_tokens'; supported are method, model"),
    ]:
        with pytest.raises(BadInput) as refused:
            parse_speculative_config(text)
        assert str(refused.value).startswith("--speculative_config") and words in str(refused.value)


def parse_ranges(ranges: object, most: int | None = None) -> SpeculativeConfig:
    keys = {"num_speculative_tokens_per_batch_size": ranges, "num_speculative_tokens": most}
    return parse_speculative_config(json.dumps(keys))


def test_k_by_batch_size_is_parsed():
    config = parse_ranges([[1, 4, 15], [5, 5, 7], [6, 64, 0]], 15)
    assert config.num_speculative_tokens_per_batch_size == ((1, 4, 15), (5, 5, 7), (6, 64, 0))
    assert parse_ranges(None).num_speculative_tokens_per_batch_size is None
    assert check_k_ranges([(1, 1, 0)], "k") == ((1, 1, 0),)


def test_invalid_ranges_of_batch_sizes_are_refused():
    for ranges, words in [
        ([], "is []; expected ranges [first, last, K] of requests in the round"),
        ({"1-4": 7}, "is {'1-4': 7}; expected ranges"),
        ([[1, 4]], "has [1, 4]; expected ranges"),
        ([[1, 4, True]], "has [1, 4, True]; expected ranges"),
        ([[0, 4, 7]], "has [0, 4, 7]: first of at least 1"),
        ([[1, 4, -1]], "has [1, 4, -1]: first of at least 1, last of at least first, K of at least 0"),
        ([[2, 4, 7]], "starts at 2 requests in the round: the first range must start at 1"),
        ([[1, 4, 7], [4, 8, 3]], "has [4, 8, 3] after [1, 4, 7]: ranges must ascend without overlap"),
        ([[1, 4, 7], [5, 8, 3], [1, 2, 0]], "has [1, 2, 0] after [5, 8, 3]: ranges must ascend"),
        ([[1, 4, 7], [9, 16, 3]], "no K for 5 to 8 requests in the round. vLLM takes the K before: write [1, 8, 7]"),
    ]:
        with pytest.raises(BadInput) as refused:
            parse_ranges(ranges)
        assert str(refused.value).startswith("--speculative_config: num_speculative_tokens_per_batch_size ")
        assert words in str(refused.value)


def test_ranges_above_num_speculative_tokens_are_refused():
    with pytest.raises(BadInput, match="has K = 8, 9, more than num_speculative_tokens = 7, .* write 7"):
        parse_ranges([[1, 1, 9], [2, 2, 8], [3, 9, 7]], 7)


def test_largest_k_of_ranges_is_that_of_the_grid(draft):
    assert choose_k(parse_ranges([[1, 1, 9], [2, 2, 0]]), draft) == 9
    assert choose_k(parse_ranges([[1, 1, 9], [2, 2, 0]], 12), draft) == 12
    assert choose_k(parse_ranges([[1, 1, 0]]), draft) == 0


def test_every_k_larger_than_a_block_is_named(draft):
    with pytest.raises(
        BadInput, match=r"per_batch_size \(--speculative_config\) is 16, 20, but the draft's block_size is 16"
    ):
        choose_k(parse_ranges([[1, 1, 20], [2, 2, 16], [3, 3, 15]]), draft)
    with pytest.raises(BadInput, match="is 16, but the draft's block_size is 16: .* 15 drafted"):
        choose_k(SpeculativeConfig(num_speculative_tokens=16), draft)


def test_k_is_the_override_or_the_default(draft):
    assert choose_k(SpeculativeConfig(), draft) == draft.block - 1
    assert choose_k(SpeculativeConfig(), structs.replace(draft, heads=DraftHeads(k=5))) == 5
    assert choose_k(SpeculativeConfig(num_speculative_tokens=3), structs.replace(draft, heads=DraftHeads(k=5))) == 3
