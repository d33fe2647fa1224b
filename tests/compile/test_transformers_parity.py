"""Targets against the models of transformers, which save the checkpoints that are published."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from msgspec import structs

from dflash_aot.cache.model_config.architecture import DenseMlp, Draft

TOLERANCE = 1e-4
AUX_LAYERS = (0, 1)
CHUNK, STEPS = 16, 24
# heads · head_dim is not the hidden width, and two query heads share a kv head
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
# Scaling starts within the tokens of these tests.
PLAIN = {"rope_type": "default", "rope_theta": 5_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 5_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9, "swiglu_limit": 0.5}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 5_000.0, "partial_rotary_factor": 0.25},
}
GEMMA = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
    "global_head_dim": 24,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
}
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}
MODELS = {
    "qwen3 yarn biased": ("Qwen3", YARN, {"attention_bias": True}),
    "llama tied biased": ("Llama", LLAMA3, {"tie_word_embeddings": True, "attention_bias": True}),
    "gpt-oss": ("GptOss", {**YARN, "truncate": False}, {**GPT_OSS, "attn_implementation": "eager"}),
    "gemma": ("Gemma4", GEMMA_ROPE, {**GEMMA, "attention_k_eq_v": False}),
    "gemma experts": ("Gemma4", GEMMA_ROPE, {**GEMMA, **GEMMA_EXPERTS}),
    "moe": ("Qwen3Moe", PLAIN, {**EXPERTS, "norm_topk_prob": False}),
}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
# Their recurrent state is kept by programs only.
HYBRIDS = {
    "hybrid biased": ("Qwen3_5", PLAIN, {**LINEAR_ATTENTION, "attention_bias": True}),
    "hybrid experts": ("Qwen3_5Moe", PLAIN, {**LINEAR_ATTENTION, **EXPERTS, "shared_expert_intermediate_size": 40}),
}
HYBRIDS["hybrid fused"] = "Qwen3Next", *HYBRIDS["hybrid experts"][1:]
CONFIG_CLASSES = {"Gemma4": "Gemma4TextConfig", "Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}


@pytest.fixture(scope="module", params=[*MODELS, *HYBRIDS])
def theirs(request):
    family, rope, special = (MODELS | HYBRIDS)[request.param]
    config = getattr(transformers, CONFIG_CLASSES.get(family, f"{family}Config"))(
        **{**SHAPE, "rope_parameters": rope, **special}
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) / 4)
    return model


@pytest.fixture(scope="module")
def ours(theirs, load_target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    theirs.save_pretrained(directory)
    return load_target(directory)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(5).integers(0, 96, 150)


@pytest.fixture(scope="module")
def expected(theirs, tokens):
    with torch.no_grad():
        answer = theirs(torch.tensor(tokens)[None], output_hidden_states=True)
    features = np.concatenate([answer.hidden_states[layer + 1][0] for layer in AUX_LAYERS], axis=-1)
    return answer.logits[0].numpy(), features


@pytest.fixture(scope="module")
def rig(ours, make_rig):
    """Our programs. A pair needs a draft, but none of its weights are used."""
    decoder = structs.replace(ours.target.decoder, layers=1, mlp=DenseMlp(8))
    draft = Draft(
        decoder, block=4, mask_token=95, target_layer_ids=AUX_LAYERS, target_hidden=decoder.hidden, windows=(None,)
    )
    return make_rig(ours.paired(draft), f"batch=1 length=64 k=0 prefill={CHUNK}")


def test_decoding_token_by_token_equals_transformers(ours, rig, tokens, expected):
    logits, features = expected
    if not ours.target.recurrent:
        for found, wanted in zip(ours.read(tokens, AUX_LAYERS), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    chunk = {"tokens": tokens[None, :CHUNK], "slots": [0], "starts": [0], "counts": [CHUNK], "gives_first": [True]}
    arrays = rig.run(f"prefill prefill={CHUNK} length=64", rig.empty(), **chunk)
    np.testing.assert_allclose(arrays["features"][0], features[:CHUNK], rtol=0, atol=TOLERANCE)
    chosen = arrays["first"].tolist()
    for at in range(CHUNK, CHUNK + STEPS):
        arrays = rig.run(
            "verify batch=1 length=64 k=0", {**arrays, "anchors": jnp.asarray(tokens[at : at + 1])}, active=[True]
        )
        np.testing.assert_allclose(arrays["features"][0, 0], features[at], rtol=0, atol=TOLERANCE)
        chosen.append(int(arrays["verdict"][0, 1]))
    assert arrays["lengths"].tolist() == [CHUNK + STEPS]
    assert chosen == logits[CHUNK - 1 : CHUNK + STEPS].argmax(-1).tolist()
