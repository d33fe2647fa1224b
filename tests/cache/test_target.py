"""Targets: facts of published configs, and refusals."""

import json
from pathlib import Path

import pytest

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import (
    CAUSAL,
    AttentionShape,
    ClampedActivation,
    Decoder,
    DenseMlp,
    GatedDeltaNet,
    MixtureOfExperts,
    Scaling,
    SlidingLayers,
    SlidingWindow,
    Target,
)
from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.rope import Llama3Scaling, ProportionalScaling, Rope
from dflash_aot.cache.model_config.target import read_target

PATH = Path("qwen3-4b/config.json")
FILE = f"{PATH}: "
MOE = "Qwen3-30B-A3B"
LLAMA = "Llama-3.1-8B"
LLAMA_ROPE = Rope(500000.0, 128, Llama3Scaling(8.0, 1.0, 4.0, 8192))

# layers, hidden, MLP width, heads, tied
DENSE = {"Qwen3-0.6B": (28, 1024, 3072, 16, True), "Qwen3-8B": (36, 4096, 12288, 32, False)}


def test_published_qwen3_is_read(read_published_target):
    for name in DENSE:
        layers, hidden, width, heads, tied = DENSE[name]
        attention = AttentionShape(heads, kv_heads=8, head_dim=128, normed=True, biased=False)
        decoder = Decoder(layers, hidden, DenseMlp(width), attention, Rope(1e6, 128), 1e-6, 151936, positions=40960)
        assert read_published_target(name) == Target(decoder, tied)


def test_published_qwen3_moe_is_read(read_published_target):
    for name, theta, positions in [(MOE, 1e6, 40960), ("Qwen3-Coder-30B-A3B-Instruct", 1e7, 262144)]:
        experts = MixtureOfExperts(count=128, chosen=8, width=768, normalized=True)
        attention = AttentionShape(heads=32, kv_heads=4, head_dim=128, normed=True, biased=False)
        decoder = Decoder(48, 2048, experts, attention, Rope(theta, 128), 1e-6, 151936, positions)
        assert read_published_target(name) == Target(decoder, tied=False)


def test_published_llama_is_read(read_published_target):
    for name in [LLAMA, "Llama-3.1-8B-Instruct"]:
        attention = AttentionShape(heads=32, kv_heads=8, head_dim=128, normed=False, biased=False)
        decoder = Decoder(32, 4096, DenseMlp(14336), attention, LLAMA_ROPE, 1e-5, vocab=128256, positions=131072)
        assert read_published_target(name) == Target(decoder, tied=False)


def test_transformers_5_layout_gives_the_same_facts(read_published_target):
    rope = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}
    assert read_published_target("Qwen3-4B", **rope) == read_published_target("Qwen3-4B")
    experts = {"num_experts": None, "num_local_experts": 128}
    assert read_published_target(MOE, **experts) == read_published_target(MOE)
    assert read_published_target("Qwen3-4B", layer_types=["full_attention"] * 36) == read_published_target("Qwen3-4B")


def test_unsupported_target_is_refused(read_changed_target, refusal):
    for changes, words in [
        ({"architectures": None}, "architectures is missing; expected a list"),
        ({"use_sliding_window": True}, "use_sliding_window is True: only full_attention is supported"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 18}, "layer_types is 'sliding_attention'"),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, "layer_types is 'linear_attention'"),
        ({"layer_types": [[]]}, "layer_types is []: only full_attention is supported"),
        ({"attention_bias": 1}, "attention_bias is 1: expected true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is supported"),
        ({"head_dim": None}, "head_dim is missing; expected a whole number"),
        ({"head_dim": 127}, "head_dim is 127: rotary embedding needs an even width"),
        ({"head_dim": 1 << 20}, "head_dim is 1048576: expected at most 16384"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32: not a multiple of 5 kv heads"),
        ({"num_hidden_layers": (1 << 31) - 1}, "num_hidden_layers is 2147483647: expected at most 4096"),
        ({"hidden_size": "2560"}, "hidden_size is '2560': expected a whole number"),
        ({"hidden_size": 1 << 31}, "hidden_size is 2147483648: no count, width or token of a model reaches 2147483648"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0: expected a positive number"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps is 1e-300: expected 1e-30 to 1"),
    ]:
        assert refusal(read_changed_target, **changes).startswith(FILE + words)


def test_unsupported_mixture_of_experts_is_refused(read_published_target, refusal):
    for changes, words in [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2: only models with experts in every layer are supported"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]: only models with experts in every layer are supported"),
        ({"num_experts": None}, "num_local_experts is missing; expected a whole number"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing; expected a whole number"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129: there are 128 experts"),
        ({"use_sliding_window": True}, "use_sliding_window is True: only full_attention is supported"),
    ]:
        assert refusal(read_published_target, MOE, **changes) == FILE + words


def test_unsupported_llama_is_refused(read_published_target, refusal):
    for changes, words in [
        ({"mlp_bias": True}, "mlp_bias is True: an MLP with biases is not supported"),
        ({"num_attention_heads": 24}, "hidden_size is 4096: not a multiple of 24 heads, and head_dim is missing"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing; expected a whole number"),
    ]:
        assert refusal(read_published_target, LLAMA, **changes) == FILE + words


def test_other_architecture_is_refused_with_a_hint(read_changed_target, refusal):
    for architecture, hint in [
        ("MistralForCausalLM", ""),
        ("DFlashSpeculator", " This is a draft: are --target and --draft swapped?"),
    ]:
        runs = "supported are Qwen3ForCausalLM, Qwen3MoeForCausalLM, LlamaForCausalLM, GptOssForCausalLM, "
        runs += "Gemma4ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration, Gemma4ForCausalLM, "
        runs += "Gemma4UnifiedForCausalLM, "
        runs += "Qwen3_5ForConditionalGeneration, Qwen3_5ForCausalLM, Qwen3NextForCausalLM, "
        runs += "Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeForCausalLM."
        message = refusal(read_changed_target, architectures=[architecture])
        assert message == f"{FILE}architectures is ['{architecture}']; {runs}{hint}"


# hidden, MLP width, layers, heads, kv heads, value heads, tied
PUBLISHED = {"Qwen3.5-0.8B": (1024, 3584, 24, 8, 2, 16, True), "Qwen3.5-27B": (5120, 17408, 64, 24, 4, 48, False)}


def test_published_hybrid_is_read(read_published_target):
    for name in PUBLISHED:
        hidden, width, layers, heads, kv_heads, value_heads, tied = PUBLISHED[name]
        attention = AttentionShape(heads, kv_heads, head_dim=256, normed=True, biased=False, gated=True)
        rope = Rope(1e7, 64)  # a quarter of a head
        decoder = Decoder(layers, hidden, DenseMlp(width), attention, rope, 1e-6, 248320, 262144, norm="unit_offset")
        linear = tuple(layer for layer in range(layers) if layer % 4 != 3)
        recurrent = GatedDeltaNet(16, value_heads, key_dim=128, value_dim=128, kernel=4, layers=linear)
        assert read_published_target(name) == Target(decoder, tied, recurrent)


def test_hybrid_with_experts_is_read(golden_directory, refusal, read_published_target):
    published = read_published_target("Qwen3.6-35B-A3B")
    assert published.decoder.mlp == MixtureOfExperts(count=256, chosen=8, width=512, normalized=True, shared=512)
    assert (published.attention_layers, published.tied) == (tuple(range(3, 40, 4)), False)
    config = read_config(golden_directory / "qwen35moe-tiny" / "target")

    def read(**changes) -> Target:
        text = {**config.values["text_config"], "intermediate_size": 999, "mlp_only_layers": [], **changes}
        return read_target(ConfigFile(config.path, {**config.values, "text_config": text}))

    assert read().decoder.mlp == MixtureOfExperts(count=12, chosen=3, width=24, normalized=True, shared=40)
    assert read().recurrent.layers == (0, 1, 2, 4)
    for changes, words in [
        ({"num_experts_per_tok": 13}, "num_experts_per_tok is 13: there are 12 experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False: these experts' shares always sum to one"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers is [1]: only models with experts in every layer are supported"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
    ]:
        assert words in refusal(read, **changes)


def test_gpt_oss_is_read(golden_directory, refusal):
    config = read_config(golden_directory / "gptoss-tiny" / "target")

    def read(**changes) -> Target:
        return read_target(ConfigFile(config.path, {**config.values, **changes}))

    facts = read(swiglu_limit=None, sliding_window=128, layer_types=None, attention_bias=None)
    attention = AttentionShape(8, 2, 16, normed=False, biased=True, sinks=True)
    experts = MixtureOfExperts(8, 3, 64, normalized=True, clamped=ClampedActivation(7.0, 1.702))
    assert (facts.decoder.attention, facts.decoder.mlp) == (attention, experts)
    assert facts.windows == (SlidingWindow(128, causal=True), CAUSAL) * 2
    assert not facts.decoder.rope.scaling.truncated
    assert facts.decoder.norm == "float32"
    for changes, words in [
        ({"rope_scaling": None}, "rope_parameters is missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9: there are 8 experts"),
        ({"attention_bias": False}, "attention_bias is False: gpt-oss's projections have biases"),
        ({"layer_types": ["full_attention"]}, "expected 4 items, sliding_attention or full_attention"),
    ]:
        assert words in refusal(read, **changes)


def test_gemma_is_read(golden_directory, refusal):
    directory = golden_directory / "gemma4-tiny"
    config = read_config(directory / "target_text")

    def read(**changes) -> Target:
        return read_target(ConfigFile(config.path, {**config.values, **changes}))

    facts = read()
    assert facts == read_target(read_config(directory / "target"))
    full = AttentionShape(4, 1, head_dim=32, keys_as_values=True, normed_values=True, scaled=False)
    assert facts.decoder.attention == full
    assert facts.decoder.rope == Rope(1e6, 32, ProportionalScaling(turning=4, factor=1.0))
    assert facts.decoder.mlp == DenseMlp(112, activation="gelu")
    sliding = AttentionShape(4, 2, head_dim=16, normed_values=True, scaled=False)
    assert facts.sliding == SlidingLayers(sliding, Rope(1e4, 16), window=12, layers=(0, 1, 3, 4))
    assert facts.scaling == Scaling(embedding=48**0.5, cap=12.0)
    experts = read_target(read_config(directory / "target_moe")).decoder.mlp
    assert experts == MixtureOfExperts(8, 3, 24, normalized=True, activation="gelu", dense=64)
    own = {
        key: value for key, value in config.values.items() if key not in ("model_type", "hidden_size_per_layer_input")
    }
    unified = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": own}
    assert read(**unified) == facts
    # as transformers 5.24 saves it
    saved = {"global_head_dim": None, "num_global_key_value_heads": None}
    sizes = {"head_dim": 32, "num_key_value_heads": 1}
    # with as many digits as the largest number of a layer
    assert read(**saved, per_layer_config={"02": sizes, "05": sizes}) == facts
    assert read(global_head_dim=64, per_layer_config={"2": sizes, "5": sizes}) == facts
    for changes, words in [
        (saved, "global_head_dim is missing"),
        ({"hidden_size_per_layer_input": 256}, "the per-layer inputs of Gemma 4 E2B and E4B are not supported"),
        ({"num_kv_shared_layers": 20}, "layers that share keys and values (Gemma 4 E2B, E4B) are not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu': only 'gelu_pytorch_tanh' is supported"),
        ({"use_bidirectional_attention": "all"}, "only causal text is supported"),
        ({"attention_bias": True}, "Gemma 4's projections have no biases"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "and full_attention in the last"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"rope_parameters": None}, "rope_parameters.sliding_attention is missing"),
        ({"per_layer_config": {"2": sizes}}, "layer 5: layers of one type must have the same sizes"),
        ({"per_layer_config": {"0": sizes}}, "layer 0: layers of one type must have the same sizes"),
        (
            {"per_layer_config": {"2": 32, "5": 32}},
            "expected head_dim and num_key_value_heads by the number of a layer",
        ),
        ({"per_layer_config": {"a": sizes}}, "expected head_dim and num_key_value_heads by the number of a layer"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "Gemma 4's rotary embedding is in rope_parameters"),
        ({"num_global_key_value_heads": 3}, "num_attention_heads is 4: not a multiple of 3 kv heads"),
        ({"enable_moe_block": True, "num_experts": 8, "top_k_experts": 9}, "top_k_experts is 9: there are 8 experts"),
    ]:
        assert words in refusal(read, **changes)


@pytest.fixture(scope="module")
def text(golden_directory):
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
