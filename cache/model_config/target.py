"""Targets: one description per published architecture. A new one is an entry of FAMILIES.

The layers themselves are shared (`compile.layers`): a family whose layers compute something that is not there yet
also adds that there, under the names of its checkpoint's tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import DenseMlp, MixtureOfExperts, Target, read_decoder, read_dense_mlp
from dflash_aot.cache.model_config.config_file import ConfigFile, shorten_value


@dataclass(frozen=True)
class Family:
    """What sets an architecture apart from the decoder that all of them are.

    normed: per-head RMS norm of queries and keys. head_dim: where its width stands. mlp: what follows attention.
    refused: keys that would make it compute something else when they are set, and what they would mean.
    """

    normed: bool
    head_dim: Callable[[ConfigFile], int]
    mlp: Callable[[ConfigFile], DenseMlp | MixtureOfExperts] = read_dense_mlp
    refused: Mapping[str, str] = field(default_factory=dict)


def _named_head_dim(config: ConfigFile) -> int:
    return config.positive("head_dim")


def _head_dim_or_share(config: ConfigFile) -> int:
    """Llama's config leaves it out where heads share the hidden width equally, and older transformers always."""
    if config.has("head_dim"):
        return config.positive("head_dim")
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    if hidden % heads:
        raise config.refusal("hidden_size", hidden, f"not a multiple of {heads} heads, and head_dim is missing")
    return hidden // heads


def _read_experts(config: ConfigFile) -> MixtureOfExperts:
    """Every layer routed. `num_local_experts` is what transformers 5 calls `num_experts`."""
    if (step := config.optional("decoder_sparse_step", int)) not in (None, 1):
        raise config.refusal("decoder_sparse_step", step, "only models with experts in every layer run")
    if dense := config.optional("mlp_only_layers", list):
        raise config.refusal("mlp_only_layers", dense, "only models with experts in every layer run")
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
# What people try, and what it is.
UNSUPPORTED_TARGETS = {
    "Qwen3NextForCausalLM": "a hybrid with gated-delta layers, whose state cannot be taken back after a rejection",
    "Qwen3_5ForCausalLM": "a hybrid with gated-delta layers, whose state cannot be taken back after a rejection",
    "Qwen3_5ForConditionalGeneration": "a hybrid with gated-delta layers, and it sees images",
    "Qwen3_5MoeForCausalLM": "a hybrid with gated-delta layers, whose state cannot be taken back after a rejection",
    "Qwen3_5MoeForConditionalGeneration": "a hybrid with gated-delta layers, and it sees images",
    "Qwen3VLForConditionalGeneration": "a model that sees images",
    "Qwen2ForCausalLM": "Qwen2, whose projections have biases in part",
    "GptOssForCausalLM": "gpt-oss, with attention sinks and biased experts",
    "Gemma3ForCausalLM": "Gemma, with other norms and sliding windows",
}
UNSUPPORTED_LAYER_TYPES = {
    "linear_attention": "gated-delta hybrids are not supported",
    "sliding_attention": "sliding-window targets are not supported",
}


def read_target(config: ConfigFile) -> Target:
    """A target's `config.json`. Raises BadCheckpoint."""
    family = FAMILIES[_choose_architecture(config)]
    for key, meaning in family.refused.items():
        if config.optional(key, bool):
            raise config.refusal(key, True, meaning)
    for kind in config.optional("layer_types", list) or ():
        if kind != "full_attention":
            known = UNSUPPORTED_LAYER_TYPES.get(kind) if isinstance(kind, str) else None
            raise config.refusal("layer_types", kind, known or "full attention is what runs")
    decoder = read_decoder(config, family.mlp(config), family.normed, family.head_dim(config))
    return Target(decoder, tied=config.require("tie_word_embeddings", bool))


def _choose_architecture(config: ConfigFile) -> str:
    found = config.require("architectures", list)
    known = [name for name in FAMILIES if name in found]
    if known:
        return known[0]
    if any(isinstance(name, str) and "DFlash" in name for name in found):
        hint = " This is a draft: are --target and --draft the wrong way round?"
    else:
        hint = "".join(f" This is {meaning}." for name, meaning in UNSUPPORTED_TARGETS.items() if name in found)
    raise BadCheckpoint(
        f"{config.path}: architectures is {shorten_value(found)}; as a target this runs {', '.join(FAMILIES)}.{hint}"
    )
