"""The keys of hybrid targets (Qwen3.5, Qwen3.6): Gated DeltaNet layers between layers with full attention."""

from functools import partial

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import (
    MAX_HEAD_DIM,
    GatedDeltaNet,
    Target,
    read_decoder,
    read_dense_mlp,
)
from dflash_aot.cache.model_config.config_file import TEXT_SECTION, ConfigFile
from dflash_aot.cache.model_config.rope import read_partial_rope

LINEAR, FULL = "linear_attention", "full_attention"
DEFAULT_INTERVAL = 4  # every fourth layer has full attention
DEFAULT_ROTARY_FACTOR = 0.25
MAX_KERNEL = 64  # far beyond any model
MAX_HEADS = 1 << 16


def read_hybrid(config: ConfigFile, nested: bool) -> Target:
    """Reads a hybrid target's facts; `nested`: the text model's keys are in `text_config`. Raises BadCheckpoint."""
    if nested and not config.has(TEXT_SECTION):
        raise BadCheckpoint(f"{config.where(TEXT_SECTION)} is missing: expected the keys of the text model")
    text = config.section(TEXT_SECTION) if nested else config
    _refuse_other_computations(text)
    decoder = read_decoder(
        text,
        read_dense_mlp(text),
        normed=True,
        head_dim=text.positive("head_dim"),
        gated=True,
        read_rope=partial(read_partial_rope, default=DEFAULT_ROTARY_FACTOR),
        unit_offset=True,
    )
    tied = (config if config.has("tie_word_embeddings") else text).require("tie_word_embeddings", bool)
    return Target(decoder, tied, _read_gated_delta(text, decoder.layers))


def _refuse_other_computations(text: ConfigFile) -> None:
    if text.optional("attn_output_gate", bool) is False:
        raise text.refusal("attn_output_gate", False, "only attention with an output gate is supported")
    if (gate := text.optional("output_gate_type", str)) not in (None, "silu", "swish"):
        raise text.refusal("output_gate_type", gate, "supported are 'silu' and 'swish', which are the same")
    if (dtype := text.optional("mamba_ssm_dtype", str)) not in (None, "float32"):
        raise text.refusal("mamba_ssm_dtype", dtype, "the recurrent state is always float32")


def _read_gated_delta(text: ConfigFile, layers: int) -> GatedDeltaNet:
    sizes = GatedDeltaNet(
        key_heads=text.positive("linear_num_key_heads", most=MAX_HEADS),
        value_heads=text.positive("linear_num_value_heads", most=MAX_HEADS),
        key_dim=text.positive("linear_key_head_dim", most=MAX_HEAD_DIM),
        value_dim=text.positive("linear_value_head_dim", most=MAX_HEAD_DIM),
        kernel=text.positive("linear_conv_kernel_dim", most=MAX_KERNEL),
        layers=tuple(layer for layer, kind in enumerate(_read_layer_types(text, layers)) if kind == LINEAR),
    )
    if sizes.value_heads % sizes.key_heads:
        raise text.refusal(
            "linear_num_value_heads", sizes.value_heads, f"not a multiple of {sizes.key_heads} key heads"
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
        raise text.refusal(key, found, f"a hybrid of {layers} layers without {missing[0]} is not supported")
    return kinds
