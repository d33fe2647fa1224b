"""What transformers' Qwen3Config takes for absent keys: the layers of all drafts are Qwen3's.

Tests compare both parts with that class.
"""

from typing import Any

from dflash_aot.cache.model_config.config_file import ConfigFile

QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "rope_theta": 10000.0,
}
KINDS = ("full_attention", "sliding_attention")


def read_sliding_layers(config: ConfigFile, layers: int) -> list[bool]:
    """Returns whether each layer has a sliding window, by `layer_types`.

    Without that key, layers from `max_window_layers` on have one if `use_sliding_window` is true and `sliding_window`
    is not null. Raises BadCheckpoint.
    """
    kinds = config.optional("layer_types", list)
    if kinds is None:
        windowed = config.optional("use_sliding_window", bool) and config.has("sliding_window")
        first = config.integer("max_window_layers") if windowed else layers
        return [index >= first for index in range(layers)]
    if len(kinds) != layers or any(kind not in KINDS for kind in kinds):
        raise config.refusal("layer_types", kinds, f"expected {layers} items, full_attention or sliding_attention")
    return [kind == "sliding_attention" for kind in kinds]
