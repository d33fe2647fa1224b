"""Reads a target's `config.json`. To add an architecture, add its reader to FAMILIES.

All families share the layers in `compile.models`. What the layers of a new family compute in addition is declared in
`architecture` and implemented in `compile.models`, under the names of the checkpoint's tensors.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import msgspec

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import (
    CAUSAL,
    MAX_HEAD_DIM,
    MAX_LAYERS,
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
    check_attention,
    read_decoder,
    read_dense_mlp,
)
from dflash_aot.cache.model_config.config_file import TEXT_SECTION, ConfigFile, shorten_value
from dflash_aot.cache.model_config.draft_keys import name_architecture
from dflash_aot.cache.model_config.quantization import read_quantization
from dflash_aot.cache.model_config.rope import read_layer_rope, read_partial_rope

# -- hybrids (Qwen3.5, Qwen3.6): Gated DeltaNet layers between layers with full attention

LINEAR = "linear_attention"
FULL = "full_attention"
DEFAULT_INTERVAL = 4  # every fourth layer has full attention
DEFAULT_ROTARY_FACTOR = 0.25
MAX_KERNEL = 64  # far beyond any model
MAX_HEADS = 1 << 16


def read_hybrid(
    config: ConfigFile,
    nested: bool,
    mlp: Callable[[ConfigFile], DenseMlp | MixtureOfExperts] = read_dense_mlp,
) -> Target:
    """Reads a hybrid target's facts. Raises BadCheckpoint.

    `nested`: the text model's keys are in `text_config`. `mlp` reads the MLP.
    """
    text = _find_text(config, nested)
    _refuse_other_computations(text)
    decoder = read_decoder(
        text,
        mlp(text),
        normed=True,
        head_dim=text.positive("head_dim"),
        read_rope=partial(read_partial_rope, default=DEFAULT_ROTARY_FACTOR),
    )
    attention = msgspec.structs.replace(decoder.attention, gated=True)
    decoder = msgspec.structs.replace(decoder, attention=attention, norm="unit_offset")
    tied = (config if config.has("tie_word_embeddings") else text).require(
        "tie_word_embeddings", bool
    )
    return Target(decoder, tied, _read_gated_delta(text, decoder.layers))


def _find_text(config: ConfigFile, nested: bool) -> ConfigFile:
    if nested and not config.has(TEXT_SECTION):
        raise BadCheckpoint(
            f"{config.where(TEXT_SECTION)} is missing: expected the keys of the text model"
        )
    return config.section(TEXT_SECTION) if nested else config


def _refuse_other_computations(text: ConfigFile) -> None:
    if text.optional("attn_output_gate", bool) is False:
        raise text.refusal(
            "attn_output_gate", False, "only attention with an output gate is supported"
        )
    if (gate := text.optional("output_gate_type", str)) not in (None, "silu", "swish"):
        raise text.refusal(
            "output_gate_type", gate, "supported are 'silu' and 'swish', which are the same"
        )
    if (dtype := text.optional("mamba_ssm_dtype", str)) not in (None, "float32"):
        raise text.refusal("mamba_ssm_dtype", dtype, "the recurrent state is always float32")


def _read_gated_delta(text: ConfigFile, layers: int) -> GatedDeltaNet:
    sizes = GatedDeltaNet(
        key_heads=text.positive("linear_num_key_heads", most=MAX_HEADS),
        value_heads=text.positive("linear_num_value_heads", most=MAX_HEADS),
        key_dim=text.positive("linear_key_head_dim", most=MAX_HEAD_DIM),
        value_dim=text.positive("linear_value_head_dim", most=MAX_HEAD_DIM),
        kernel=text.positive("linear_conv_kernel_dim", most=MAX_KERNEL),
        layers=tuple(
            layer for layer, kind in enumerate(_read_layer_types(text, layers)) if kind == LINEAR
        ),
    )
    if sizes.value_heads % sizes.key_heads:
        raise text.refusal(
            "linear_num_value_heads",
            sizes.value_heads,
            f"not a multiple of {sizes.key_heads} key heads",
        )
    if sizes.kernel < 2:
        raise text.refusal("linear_conv_kernel_dim", sizes.kernel, "expected at least 2")
    return sizes


def _read_layer_types(text: ConfigFile, layers: int) -> list[str]:
    """Returns the kind of each layer: `layer_types`, otherwise every `full_attention_interval`-th is full."""
    kinds = text.optional("layer_types", list)
    if kinds is None:
        interval = text.positive("full_attention_interval", default=DEFAULT_INTERVAL)
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
        key = "full_attention_interval"
    else:
        key = "layer_types"
    found = text.values.get(key, DEFAULT_INTERVAL)
    if len(kinds) != layers or any(kind not in (LINEAR, FULL) for kind in kinds):
        raise text.refusal(key, found, f"expected {layers} items, {LINEAR} or {FULL}")
    if missing := [kind for kind in (LINEAR, FULL) if kind not in kinds]:
        raise text.refusal(
            key, found, f"a hybrid of {layers} layers without {missing[0]} is not supported"
        )
    return kinds


# -- families


def read_dense(
    config: ConfigFile,
    normed: bool,
    head_dim: Callable[[ConfigFile], int],
    mlp: Callable[[ConfigFile], DenseMlp | MixtureOfExperts] = read_dense_mlp,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Target:
    """Reads a target whose layers all have full attention. Raises BadCheckpoint.

    Args:
        config: the target's.
        normed: per-head RMS norm of queries and keys.
        head_dim: reads the head width.
        mlp: reads the MLP.
        refused: keys that change the computation in an unsupported way when they are true, each with the reason.
    """
    for key, meaning in refused.items():
        if config.optional(key, bool):
            raise config.refusal(key, True, meaning)
    for kind in config.optional("layer_types", list) or ():
        if kind != FULL:
            raise config.refusal("layer_types", kind, f"only {FULL} is supported")
    decoder = read_decoder(config, mlp(config), normed, head_dim(config))
    return Target(decoder, tied=config.require("tie_word_embeddings", bool))


def _named_head_dim(config: ConfigFile) -> int:
    return config.positive("head_dim")


def _head_dim_or_share(config: ConfigFile) -> int:
    """Reads `head_dim`, or divides the hidden width among the heads: Llama configs may leave `head_dim` out."""
    if config.has("head_dim"):
        return config.positive("head_dim")
    hidden = config.positive("hidden_size")
    heads = config.positive("num_attention_heads")
    if hidden % heads:
        raise config.refusal(
            "hidden_size", hidden, f"not a multiple of {heads} heads, and head_dim is missing"
        )
    return hidden // heads


def _read_choice(config: ConfigFile, key: str, other: str) -> tuple[int, int]:
    """Returns how many experts there are, by `key` or without it by `other`, and how many each token chooses."""
    count = config.positive(key if config.has(key) else other)
    chosen = config.positive("num_experts_per_tok")
    if chosen > count:
        raise config.refusal("num_experts_per_tok", chosen, f"there are {count} experts")
    return count, chosen


def _read_experts(config: ConfigFile, shares: bool = False) -> MixtureOfExperts:
    """Reads a mixture of experts in every layer. transformers 5 calls `num_experts` `num_local_experts`.

    With `shares` there is a shared expert too, and `norm_topk_prob` is true where it is missing.
    """
    if (step := config.optional("decoder_sparse_step", int)) not in (None, 1):
        raise config.refusal(
            "decoder_sparse_step", step, "only models with experts in every layer are supported"
        )
    if dense := config.optional("mlp_only_layers", list):
        raise config.refusal(
            "mlp_only_layers", dense, "only models with experts in every layer are supported"
        )
    count, chosen = _read_choice(config, "num_experts", "num_local_experts")
    width = config.positive("moe_intermediate_size")
    if not shares:
        return MixtureOfExperts(count, chosen, width, config.require("norm_topk_prob", bool))
    if config.optional("norm_topk_prob", bool) is False:
        raise config.refusal("norm_topk_prob", False, "these experts' shares always sum to one")
    shared = config.positive("shared_expert_intermediate_size")
    return MixtureOfExperts(count, chosen, width, normalized=True, shared=shared)


# -- gpt-oss: every second layer has a sliding window, all have sinks, and experts with biases

SLIDING = "sliding_attention"
DEFAULT_LIMIT = 7.0
DEFAULT_SLOPE = 1.702


def read_gpt_oss(config: ConfigFile) -> Target:
    """Reads the facts of a gpt-oss target. Raises BadCheckpoint."""
    if config.optional("attention_bias", bool) is False:
        raise config.refusal("attention_bias", False, "gpt-oss's projections have biases")
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        raise BadCheckpoint(
            f"{config.where('rope_parameters')} is missing: write out YaRN's numbers, which transformers would assume"
        )
    count, chosen = _read_choice(config, "num_local_experts", "num_experts")
    activation = ClampedActivation(
        limit=config.positive_number("swiglu_limit", default=DEFAULT_LIMIT),
        slope=config.positive_number("swiglu_alpha", default=DEFAULT_SLOPE),
    )
    width = config.positive("intermediate_size")
    experts = MixtureOfExperts(count, chosen, width, normalized=True, clamped=activation)
    decoder = read_decoder(config, experts, normed=False, head_dim=config.positive("head_dim"))
    attention = msgspec.structs.replace(decoder.attention, biased=True, sinks=True)
    return Target(
        msgspec.structs.replace(decoder, attention=attention, norm="float32"),
        tied=config.require("tie_word_embeddings", bool),
        windows=_read_alternating_windows(config, decoder.layers),
    )


def _read_alternating_windows(config: ConfigFile, layers: int) -> tuple[SlidingWindow, ...]:
    """Returns the window of each layer, by `layer_types`; without that key the first of two layers slides."""
    kinds = config.optional("layer_types", list)
    if kinds is None:
        kinds = [(SLIDING, FULL)[at % 2] for at in range(layers)]
    _check_layer_types(config, kinds, layers)
    window = SlidingWindow(config.positive("sliding_window"), causal=True)
    return tuple(window if kind == SLIDING else CAUSAL for kind in kinds)


def _check_layer_types(config: ConfigFile, kinds: list[str], layers: int) -> None:
    if len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise config.refusal("layer_types", kinds, f"expected {layers} items, {SLIDING} or {FULL}")


# -- Gemma 4: sliding and full layers with heads of different widths, norms around every part

CAP = "final_logit_softcapping"
GELU = "gelu_pytorch_tanh"
UNIFIED = "Gemma4Unified"  # the classes of the 12B model, which never have per-layer inputs


def read_gemma(config: ConfigFile, nested: bool) -> Target:
    """Reads the facts of a Gemma 4 target; `nested` as in `read_hybrid`. Raises BadCheckpoint."""
    text = _find_text(config, nested)
    _refuse_other_gemmas(text, is_unified=UNIFIED in str(config.values.get("architectures")))
    layers = text.positive("num_hidden_layers", most=MAX_LAYERS)
    kinds = text.require("layer_types", list)
    _check_layer_types(text, kinds, layers)
    if SLIDING not in kinds or kinds[-1] != FULL:
        raise text.refusal(
            "layer_types", kinds, f"expected {SLIDING} in some layer, and {FULL} in the last"
        )
    full = _read_full_attention(text, kinds)
    attention = _make_gemma_attention(
        text, text.positive("num_key_value_heads"), text.positive("head_dim")
    )
    sliding = SlidingLayers(
        attention=attention,
        rope=read_layer_rope(text, SLIDING, attention.head_dim),
        window=text.positive("sliding_window"),
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING),
    )
    hidden = text.positive("hidden_size")
    decoder = Decoder(
        layers=layers,
        hidden=hidden,
        mlp=_read_gemma_mlp(text),
        attention=full,
        rope=read_layer_rope(text, FULL, full.head_dim),
        epsilon=text.number_within("rms_norm_eps", 1e-30, 1.0),
        vocab=text.positive("vocab_size"),
        positions=text.positive("max_position_embeddings"),
        norm="float32",
        sandwiched=True,
        scaled_layers=True,
    )
    named = config if config.has("tie_word_embeddings") else text
    cap = text.positive_number(CAP) if text.has(CAP) else None
    scaling = Scaling(embedding=math.sqrt(hidden), cap=cap)
    tied = named.optional("tie_word_embeddings", bool) is not False
    return Target(decoder, tied, sliding=sliding, scaling=scaling)


def _refuse_other_gemmas(text: ConfigFile, is_unified: bool) -> None:
    """Refuses keys that change the computation. Where a key is missing, transformers' default counts."""
    small = "the per-layer inputs of Gemma 4 E2B and E4B are not supported"
    key = "hidden_size_per_layer_input"
    if key not in text.values and not is_unified:
        raise BadCheckpoint(f"{text.where(key)} is missing, which means 256: {small}")
    if width := text.optional(key, int):
        raise text.refusal(key, width, small)
    if shared := text.optional("num_kv_shared_layers", int):
        raise text.refusal(
            "num_kv_shared_layers",
            shared,
            "layers that share keys and values (Gemma 4 E2B, E4B) are not supported",
        )
    if (activation := text.optional("hidden_activation", str)) not in (None, GELU):
        raise text.refusal("hidden_activation", activation, f"only '{GELU}' is supported")
    if text.optional("attention_bias", bool):
        raise text.refusal("attention_bias", True, "Gemma 4's projections have no biases")
    if text.has("rope_scaling"):
        reason = "Gemma 4's rotary embedding is in rope_parameters"
        raise text.refusal("rope_scaling", text.values["rope_scaling"], reason)
    # With "vision" image tokens see later ones; text is causal.
    direction = text.optional("use_bidirectional_attention", str)
    if direction not in (None, "vision"):
        raise text.refusal(
            "use_bidirectional_attention", direction, "only causal text is supported"
        )


def _read_full_attention(text: ConfigFile, kinds: Sequence[str]) -> AttentionShape:
    """Reads the attention of full layers; `kinds` are the layers' types.

    Files that transformers 5.24 has saved have its sizes in `per_layer_config`, which counts before the global keys.
    """
    shares = bool(text.optional("attention_k_eq_v", bool))
    if text.has("per_layer_config"):
        entry = _find_override(text, kinds)
        kv_heads = entry.positive(
            "num_key_value_heads", default=text.positive("num_key_value_heads")
        )
        head_dim = entry.positive("head_dim", default=text.positive("head_dim"))
    else:
        own = shares and text.has("num_global_key_value_heads")
        kv_heads = text.positive("num_global_key_value_heads" if own else "num_key_value_heads")
        head_dim = text.positive("global_head_dim")
    shape = _make_gemma_attention(text, kv_heads, head_dim)
    return msgspec.structs.replace(shape, keys_as_values=shares)


def _find_override(text: ConfigFile, kinds: Sequence[str]) -> ConfigFile:
    """The entry of `per_layer_config` that all full layers share. Its keys are layers, with or without leading zeros.

    Raises BadCheckpoint for entries of sliding layers, unequal entries, and keys that are not understood.
    """
    key = "per_layer_config"
    entries = text.require(key, dict)
    by_layer = {int(name): name for name in entries if re.fullmatch(r"\d{1,5}", name, re.ASCII)}
    full = kinds.index(FULL)
    found = entries.get(by_layer.get(full)) or {}
    for layer in range(len(kinds)):
        own = entries.get(by_layer.get(layer)) or {}
        if own != (found if kinds[layer] == FULL else {}):
            raise text.refusal(
                key, entries, f"layer {layer}: layers of one type must have the same sizes"
            )
    sizes = {"head_dim", "num_key_value_heads"}
    unread = not isinstance(found, dict) or set(found) - sizes
    if unread or len(by_layer) < len(entries) or any(at >= len(kinds) for at in by_layer):
        raise text.refusal(
            key, entries, "expected head_dim and num_key_value_heads by the number of a layer"
        )
    return text.section(key).section(by_layer.get(full, ""))


def _make_gemma_attention(text: ConfigFile, kv_heads: int, head_dim: int) -> AttentionShape:
    shape = AttentionShape(
        heads=text.positive("num_attention_heads"),
        kv_heads=kv_heads,
        head_dim=head_dim,
        normed_values=True,
        scaled=False,
    )
    check_attention(text, shape, "head_dim")
    return shape


def _read_gemma_mlp(text: ConfigFile) -> DenseMlp | MixtureOfExperts:
    width = text.positive("intermediate_size")
    if not text.optional("enable_moe_block", bool):
        return DenseMlp(width, activation="gelu")
    count = text.positive("num_experts")
    chosen = text.positive("top_k_experts")
    if chosen > count:
        raise text.refusal("top_k_experts", chosen, f"there are {count} experts")
    return MixtureOfExperts(
        count=count,
        chosen=chosen,
        width=text.positive("moe_intermediate_size"),
        normalized=True,
        activation="gelu",
        dense=width,
    )


# -- the readers of all families

# Qwen3-Next: the hybrid of Qwen3.5 with experts. Its checkpoints fuse projections, see `safetensors_reader`.
FUSED_HYBRID = "Qwen3NextForCausalLM"
REFUSE_SLIDING_WINDOW = {"use_sliding_window": f"only {FULL} is supported"}
# The reader of each architecture.
FAMILIES: Mapping[str, Callable[[ConfigFile], Target]] = {
    "Qwen3ForCausalLM": partial(
        read_dense, normed=True, head_dim=_named_head_dim, refused=REFUSE_SLIDING_WINDOW
    ),
    "Qwen3MoeForCausalLM": partial(
        read_dense,
        normed=True,
        head_dim=_named_head_dim,
        mlp=_read_experts,
        refused=REFUSE_SLIDING_WINDOW,
    ),
    "LlamaForCausalLM": partial(
        read_dense,
        normed=False,
        head_dim=_head_dim_or_share,
        refused={"mlp_bias": "an MLP with biases is not supported"},
    ),
    "GptOssForCausalLM": read_gpt_oss,
    "Gemma4ForConditionalGeneration": partial(read_gemma, nested=True),
    "Gemma4UnifiedForConditionalGeneration": partial(read_gemma, nested=True),
    "Gemma4ForCausalLM": partial(read_gemma, nested=False),
    "Gemma4UnifiedForCausalLM": partial(read_gemma, nested=False),
    "Qwen3_5ForConditionalGeneration": partial(read_hybrid, nested=True),
    "Qwen3_5ForCausalLM": partial(read_hybrid, nested=False),
    FUSED_HYBRID: partial(read_hybrid, nested=False, mlp=partial(_read_experts, shares=True)),
    "Qwen3_5MoeForConditionalGeneration": partial(
        read_hybrid, nested=True, mlp=partial(_read_experts, shares=True)
    ),
    "Qwen3_5MoeForCausalLM": partial(
        read_hybrid, nested=False, mlp=partial(_read_experts, shares=True)
    ),
}
# Architectures that users are likely to try, with the reason why each is not supported.
UNSUPPORTED_TARGETS = {
    "Qwen3VLForConditionalGeneration": "a model with image input",
    "Qwen2ForCausalLM": "Qwen2, in which only some projections have biases",
    "Gemma3ForCausalLM": "Gemma, with other norms and sliding windows",
}


def read_target(config: ConfigFile) -> Target:
    """Reads a target's facts. Raises BadCheckpoint, also for weights in a format that cannot be loaded."""
    architecture = _choose_architecture(config)
    read_quantization(config)
    return FAMILIES[architecture](config)


def _choose_architecture(config: ConfigFile) -> str:
    found = config.require("architectures", list)
    known = [name for name in FAMILIES if name in found]
    if known:
        return known[0]
    if any(isinstance(name, str) and "DFlash" in name for name in found):
        hint = " This is a draft: are --target and --draft swapped?"
    else:
        names = [name for name in found if isinstance(name, str)]
        known_kinds = [UNSUPPORTED_TARGETS.get(name) or name_architecture(name) for name in names]
        hint = "".join(f" This is {kind}." for kind in known_kinds if kind)
    raise BadCheckpoint(
        f"{config.path}: architectures is {shorten_value(found)}; supported are {', '.join(FAMILIES)}.{hint}"
    )
