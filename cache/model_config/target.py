"""Reads a target's `config.json`. To add an architecture, add an entry to FAMILIES.

The layers are shared (`compile.models`). A family whose layers compute something new also adds it there, under the
names of its checkpoint's tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import DenseMlp, MixtureOfExperts, Target, read_decoder, read_dense_mlp
from dflash_aot.cache.model_config.config_file import ConfigFile, shorten_value
from dflash_aot.cache.model_config.hybrid import read_hybrid
from dflash_aot.cache.model_config.quantization import read_quantization


@dataclass(frozen=True)
class Family:
    """How a target architecture differs from the common decoder.

    normed: per-head RMS norm of queries and keys.
    head_dim: reads the head width.
    mlp: reads the MLP.
    refused: keys that change the computation in an unsupported way when they are true, each with the reason.
    """

    normed: bool
    head_dim: Callable[[ConfigFile], int]
    mlp: Callable[[ConfigFile], DenseMlp | MixtureOfExperts] = read_dense_mlp
    refused: Mapping[str, str] = field(default_factory=dict)


def _named_head_dim(config: ConfigFile) -> int:
    return config.positive("head_dim")


def _head_dim_or_share(config: ConfigFile) -> int:
    """Reads `head_dim`, or divides the hidden width among the heads: Llama configs may leave `head_dim` out."""
    if config.has("head_dim"):
        return config.positive("head_dim")
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    if hidden % heads:
        raise config.refusal("hidden_size", hidden, f"not a multiple of {heads} heads, and head_dim is missing")
    return hidden // heads


def _read_experts(config: ConfigFile) -> MixtureOfExperts:
    """Reads a mixture of experts in every layer. transformers 5 calls `num_experts` `num_local_experts`."""
    if (step := config.optional("decoder_sparse_step", int)) not in (None, 1):
        raise config.refusal("decoder_sparse_step", step, "only models with experts in every layer are supported")
    if dense := config.optional("mlp_only_layers", list):
        raise config.refusal("mlp_only_layers", dense, "only models with experts in every layer are supported")
    count = config.positive("num_experts" if config.has("num_experts") else "num_local_experts")
    chosen = config.positive("num_experts_per_tok")
    if chosen > count:
        raise config.refusal("num_experts_per_tok", chosen, f"there are {count} experts")
    return MixtureOfExperts(
        count, chosen, config.positive("moe_intermediate_size"), config.require("norm_topk_prob", bool)
    )


REFUSE_SLIDING_WINDOW = {"use_sliding_window": "sliding-window targets are not supported"}
FAMILIES = {
    "Qwen3ForCausalLM": Family(normed=True, head_dim=_named_head_dim, refused=REFUSE_SLIDING_WINDOW),
    "Qwen3MoeForCausalLM": Family(
        normed=True, head_dim=_named_head_dim, mlp=_read_experts, refused=REFUSE_SLIDING_WINDOW
    ),
    "LlamaForCausalLM": Family(
        normed=False,
        head_dim=_head_dim_or_share,
        refused={"mlp_bias": "an MLP with biases is not supported"},
    ),
}
# Hybrids of gated-delta and attention layers; True where the config holds the text model's keys in a section.
HYBRIDS = {"Qwen3_5ForConditionalGeneration": True, "Qwen3_5ForCausalLM": False}
# Architectures that users are likely to try, with the reason why each is not supported.
UNSUPPORTED_TARGETS = {
    "Qwen3NextForCausalLM": "a hybrid with gated-delta layers whose projections are fused, and a mixture of experts",
    "Qwen3_5MoeForCausalLM": "a hybrid with gated-delta layers and a mixture of experts",
    "Qwen3_5MoeForConditionalGeneration": "a hybrid with gated-delta layers and a mixture of experts",
    "Qwen3VLForConditionalGeneration": "a model with image input",
    "Qwen2ForCausalLM": "Qwen2, whose projections have biases in part",
    "GptOssForCausalLM": "gpt-oss, with attention sinks and biased experts",
    "Gemma3ForCausalLM": "Gemma, with other norms and sliding windows",
}
UNSUPPORTED_LAYER_TYPES = {
    "linear_attention": "gated-delta layers are supported in Qwen3.5's architectures only",
    "sliding_attention": "sliding-window targets are not supported",
}


def read_target(config: ConfigFile) -> Target:
    """Reads a target's facts. Raises BadCheckpoint, also for weights in a format that cannot be loaded."""
    architecture = _choose_architecture(config)
    read_quantization(config)
    if architecture in HYBRIDS:
        return read_hybrid(config, nested=HYBRIDS[architecture])
    family = FAMILIES[architecture]
    for key, meaning in family.refused.items():
        if config.optional(key, bool):
            raise config.refusal(key, True, meaning)
    for kind in config.optional("layer_types", list) or ():
        if kind != "full_attention":
            known = UNSUPPORTED_LAYER_TYPES.get(kind) if isinstance(kind, str) else None
            raise config.refusal("layer_types", kind, known or "only full_attention is supported")
    decoder = read_decoder(config, family.mlp(config), family.normed, family.head_dim(config))
    return Target(decoder, tied=config.require("tie_word_embeddings", bool))


def _choose_architecture(config: ConfigFile) -> str:
    found = config.require("architectures", list)
    supported = (*FAMILIES, *HYBRIDS)
    known = [name for name in supported if name in found]
    if known:
        return known[0]
    if any(isinstance(name, str) and "DFlash" in name for name in found):
        hint = " This is a draft: are --target and --draft swapped?"
    else:
        hint = "".join(f" This is {meaning}." for name, meaning in UNSUPPORTED_TARGETS.items() if name in found)
    raise BadCheckpoint(
        f"{config.path}: architectures is {shorten_value(found)}; supported are {', '.join(supported)}.{hint}"
    )
