"""Drafts: dialects, unsupported relatives of DFlash, and checks against the target."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dflash_aot.cache.model_config.architecture import default_target_layer_ids
from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target

FILE = "dflash-b16/config.json: "
OTHER_TARGET = ": this draft was trained for another one"
AMBIGUOUS = "the last layer is ambiguous: the reference reads it after the final norm, servers before it"
LAYER_IDS = "dflash_config.target_layer_ids"
DIALECTS = (
    "supported for drafts is DFlashDraftModel, DFlash2DraftModel, Qwen3DSparkModel, DSparkDraftModel, in z-lab's "
    "format (dflash_config) and in speculators' (speculators_config)."
)


def test_draft_with_only_a_dflash_config_is_read(read_changed_draft):
    for architectures in [None, []]:
        assert read_changed_draft(architectures=architectures) == read_changed_draft()


def test_other_architectures_are_refused(read_changed_draft, refusal):
    swapped = " This is a target: are --target and --draft swapped?"
    for architectures, found, hint in [
        ([{}, None], "[{}, None]", ""),
        (["AnyName"], "['AnyName']", ""),
        (["DFlashDraftModel", "AnyName"], "['DFlashDraftModel', 'AnyName']", ""),
        (["Qwen3ForCausalLM"], "['Qwen3ForCausalLM']", swapped),
    ]:
        for section in ({}, {"dflash_config": None}):  # a dflash_config makes no DFlash draft of another model
            message = refusal(read_changed_draft, architectures=architectures, **section)
            assert message == f"{FILE}architectures is {found}; {DIALECTS}{hint}"
    message = refusal(read_changed_draft, architectures=None, dflash_config=None)
    assert message == f"{FILE}architectures is []; {DIALECTS}"


def test_relative_of_dflash_is_refused_by_its_architecture(read_changed_draft, read_changed_speculators, refusal):
    for name, relative in [
        ("Qwen35DSparkModel", "another form of DSpark"),
        ("Gemma4DSparkModel", "another form of DSpark"),
        ("DominoDraftModel", "Domino"),
        ("LiLiCorrDraftModel", "LiLiCorr"),
        ("Qwen3XPressModel", "XPress"),
        ("LlamaForCausalLMEagle3", "EAGLE"),
        ("MuseGlimmerAssistantModel", "the assistant of Muse-Glimmer in transformers' format"),
        ("Gemma4AssistantForCausalLM", "an assistant model in transformers' format"),
        ("Gemma4DFlashModel", "a model with Gemma's layers"),
        ("Glm4MoeForCausalLMNextN", "a head for multi-token prediction"),
        ("Glm4MoeDFlash", "a model with GLM's layers"),
        ("MiniMaxM2DFlashModel", "a model with MiniMax's layers"),
        ("KimiK25DFlash", "a model with Kimi's layers"),
        ("GptOssDFlashModel", "a model with gpt-oss's layers"),
        ("DFlashLagunaForCausalLM", "a model with Laguna's layers"),
        ("Qwen3DFlash2DraftModel", "another form of DFlash2"),
        ("DFlashLinearDraftModel", "another form of DFlash"),
    ]:
        words = f"{FILE}architectures is '{name}': this is {relative}, which is not supported"
        assert refusal(read_changed_draft, architectures=["DFlashDraftModel", name]) == words
        if "DFlash" not in name:
            assert refusal(read_changed_speculators, architectures=[name]) == words


RELATIVES = [
    ("projector_type", "domino", "Domino"),
    ("projector_type", "dspark", "DSpark under the name of another draft"),
    ("markov_rank", 256, "DSpark under the name of another draft"),
    ("enable_confidence_head", True, "DSpark under the name of another draft"),
    ("confidence_head", {"width": 8}, "DSpark under the name of another draft"),
    ("selector", "greedy", "another form of DFlash2"),
    ("selector_config", {"rank": 256}, "another form of DFlash2"),
    ("dflash2_dynamic_conv", True, "another form of DFlash2"),
    ("dflash_context_residual", True, "DFlash with a context residual"),
    ("dflash_block_position_embedding", True, "DFlash with position embeddings in the block"),
    ("dflash_gated_layer_fusion", True, "DFlash with gated fusion of target layers"),
    ("shift_label", True, "a draft whose rows predict the next token"),
    ("sample_from_anchor", True, "a draft that samples its anchor"),
    ("attention_sink_bias", True, "DFlash with attention sinks"),
    ("attention_value_scale", 0.5, "DFlash with scaled values"),
    ("is_neox_style", False, "DFlash with interleaved RoPE"),
    ("rope_is_neox_style", False, "DFlash with interleaved RoPE"),
    ("rope_interleave", True, "DFlash with interleaved RoPE"),
    ("use_gemma_norm", True, "a draft whose norms multiply by 1 + weight"),
    ("use_qk_norm", False, "a draft without RMS norms of queries and keys"),
    ("mlp_bias", True, "a draft with biases in its MLPs"),
    ("num_experts", 8, "a draft with a mixture of experts"),
    ("attention_mode", "mla", "a draft with attention of another kind than 'gqa'"),
    ("kv_lora_rank", 32, "a draft with latent attention (mla)"),
]


def test_relative_of_dflash_is_refused_by_its_keys(read_changed_draft, read_changed_speculators, refusal):
    for key, value, relative in RELATIVES:
        words = f"{key} is {value!r}: this is {relative}, which is not supported"
        assert refusal(read_changed_draft, **{key: value}) == FILE + words
        assert refusal(read_changed_draft, {key: value}) == f"{FILE}dflash_config.{words}"
        assert refusal(read_changed_speculators, **{key: value}) == FILE + words
        assert refusal(read_changed_speculators, {key: value}) == f"{FILE}transformer_layer_config.{words}"


def test_unset_key_of_a_relative_is_ignored(read_changed_draft, read_changed_speculators):
    for unset in [
        {"projector_type": "dflash", "shift_label": False, "sample_from_anchor": False},
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head": None, "selector": ""},
        {"attention_sink_bias": False, "attention_value_scale": 1.0, "is_neox_style": True},
        {
            "num_experts": 0,
            "use_qk_norm": True,
            "attention_mode": "gqa",
            "has_own_embed_tokens": False,
            "mlp_bias": None,
        },
        {"num_anchors": 512, "loss_decay_gamma": 7.0, "backbone_rotary_base": 5e6, "_commit_hash": "a", "dtype": "x"},
        {"dflash2_dynamic_conv": False, "dflash2_candidate_selector": False, "dflash_context_residual": False},
    ]:
        assert read_changed_draft(**unset) == read_changed_draft()
        assert read_changed_draft(unset) == read_changed_draft()
        assert read_changed_speculators(**unset) == read_changed_speculators()


def test_unknown_key_is_refused_in_every_object(read_changed_draft, read_changed_speculators, refusal):
    unknown = "unknown in a draft's config, where it may change the computation"
    taps = "not read under this name, but as target_layer_ids (in dflash_config)"
    layers = "transformer_layer_config."
    verifier = {"speculators_config": {"verifier": {"lora": "a"}}}
    for read, inner, changes, words in [
        (read_changed_draft, {"norm_scale": 2}, {}, f"dflash_config.norm_scale is 2: {unknown}"),
        (read_changed_draft, {}, {"norm_scale": 2}, f"norm_scale is 2: {unknown}"),
        (read_changed_draft, {"target_layers": [1]}, {}, f"dflash_config.target_layers is [1]: {taps}"),
        (read_changed_draft, {}, {"layer_ids": [1]}, f"layer_ids is [1]: {taps}"),
        (read_changed_draft, {}, {"v_head_dim": 64}, "v_head_dim is 64: expected the value of head_dim"),
        (read_changed_draft, {}, {"causal": True}, f"causal is True: {unknown}"),
        (read_changed_draft, {}, {"rope_scaling": {"weird": 1}}, f"rope_scaling.weird is 1: {unknown}"),
        (read_changed_speculators, {}, {"norm_scale": 2}, f"norm_scale is 2: {unknown}"),
        (read_changed_speculators, {"norm_scale": 2}, {}, f"{layers}norm_scale is 2: {unknown}"),
        (read_changed_speculators, {}, verifier, f"speculators_config.verifier.lora is 'a': {unknown}"),
    ]:
        assert refusal(read, inner, **changes) == FILE + words
    assert read_changed_draft(v_head_dim=128, draft_vocab_size=151936) == read_changed_draft()


def test_mask_embedding_file_is_refused(write_config, published, refusal):
    directory = write_config(published("Qwen3-4B-DFlash-b16"))
    target = read_target(ConfigFile(Path("config.json"), published("Qwen3-4B")))
    assert read_draft(read_config(directory), target).block == 16
    sidecar = directory / "mask_embedding.pt"
    sidecar.touch()
    message = refusal(read_draft, read_config(directory), target)
    assert message == f"{sidecar}: a draft with its own mask embedding is not supported"


def test_tensors_of_another_draft_are_refused_before_a_build(write_config, published, refusal, read_published_target):
    target, tensor = read_published_target("Qwen3-4B"), np.zeros((2, 2), np.float32)
    directory = write_config(published("Qwen3-4B-DFlash-b16"))
    known = dict.fromkeys(("fc.weight", "layers.0.self_attn.rotary_emb.inv_freq", "verifier_norm.weight"), tensor)
    save_file(known, directory / "model.safetensors")
    assert read_draft(read_config(directory), target).block == 16
    save_file({**known, "markov_head.markov_w1.weight": tensor}, directory / "model.safetensors")
    words = f"{directory}: ['markov_head.markov_w1.weight']: tensors that this draft has no place for"
    assert refusal(read_draft, read_config(directory), target).startswith(words)
    index = {"weight_map": {"fc.weight": "a", "confidence_head.proj.weight": "b"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "['confidence_head.proj.weight']" in refusal(read_draft, read_config(directory), target)
    (directory / "model.safetensors.index.json").write_text("[]")  # reported when it is loaded
    assert refusal(read_draft, read_config(directory), target).endswith("holds a list, expected an object")


def test_draft_trained_for_another_target_is_refused(read_changed_draft, refusal):
    for changes, words in [
        ({"hidden_size": 4096}, f"hidden_size is 4096: the target has 2560{OTHER_TARGET}"),
        ({"vocab_size": 32000}, f"vocab_size is 32000: the target has 151936{OTHER_TARGET}"),
        ({"num_target_layers": 28}, f"num_target_layers is 28: the target has 36{OTHER_TARGET}"),
        ({"block_size": 1}, "block_size is 1: a block holds the anchor and at least one drafted token"),
        ({"block_size": 40961}, "block_size is 40961: the draft has only 40960 positions"),
    ]:
        assert refusal(read_changed_draft, **changes) == FILE + words


def test_dflash_config_for_another_target_is_refused(read_changed_draft, refusal):
    for inner, words in [
        ({"target_layer_ids": [1, 36]}, f"{LAYER_IDS} is [1, 36]: in this file's count the target has layers 0 to 35"),
        ({"target_layer_ids": [3, 35]}, f"{LAYER_IDS} is [3, 35]: {AMBIGUOUS}"),
        ({"target_layer_ids": [3, 3]}, f"{LAYER_IDS} is [3, 3]: expected at least one layer, and none twice"),
        ({"target_layer_ids": []}, f"{LAYER_IDS} is []: expected at least one layer, and none twice"),
        ({"mask_token_id": 151936}, "dflash_config.mask_token_id is 151936: the target's vocabulary has 151936 tokens"),
    ]:
        assert refusal(read_changed_draft, inner) == FILE + words


def test_default_layer_ids_outside_a_small_target_are_refused(published, read_changed_target, refusal):
    config = published("Qwen3-4B-DFlash-b16")
    config = {**config, "dflash_config": {"mask_token_id": 151669}, "num_target_layers": 2}
    small = read_changed_target(num_hidden_layers=2)
    message = refusal(read_draft, ConfigFile(Path("dflash-b16/config.json"), config), small)
    assert message == f"{FILE}target_layer_ids is [1, 0, 0, 0, -1]: {AMBIGUOUS}"


def test_default_target_layer_ids_are_spread_evenly():
    for layers, layer_ids in [
        ((36, 5), (1, 9, 17, 25, 33)),
        ((32, 5), (1, 8, 15, 22, 29)),
        ((28, 5), (1, 7, 13, 19, 25)),
        ((6, 2), (1, 3)),
        ((7, 3), (1, 2, 4)),  # 1 + 1.5 rounds to even, as Python does
        ((36, 1), (18,)),
        ((7, 1), (3,)),
    ]:
        assert default_target_layer_ids(*layers) == layer_ids
