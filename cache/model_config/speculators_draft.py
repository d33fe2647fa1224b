"""The draft dialect of vLLM's speculators library, version 0.9.0 and current: `speculators_config`."""

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import (
    Draft,
    SlidingWindow,
    read_decoder,
    read_dense_mlp,
)
from dflash_aot.cache.model_config.config_file import (
    QWEN3_DEFAULTS,
    ConfigFile,
    read_sliding_layers,
)
from dflash_aot.cache.model_config.draft_keys import (
    DFLASH2_KEYS,
    check_keys,
    check_layer_keys,
    is_dflash2,
    read_convolution,
    read_selector,
)

NON_CAUSAL = "sliding_window_non_causal"
LAYERS_KEY = "transformer_layer_config"  # holds the differences from transformers' Qwen3Config()
# Defaults of the library's configs.
DEFAULT_VOCAB, DEFAULT_BLOCK = 32000, 8
DEFAULT_KERNEL = 2
DEFAULT_GROUP = 16
DEFAULT_RANK = 256
DEFAULT_CANDIDATES = 16
# Keys at the top.
OWN_KEYS = (
    "aux_hidden_state_layer_ids",
    "block_size",
    "compression_config",
    "draft_vocab_size",
    "mask_token_id",
    "quantization_config",
    NON_CAUSAL,
    "speculators_config",
    "speculators_model_type",
    "target_hidden_size",
    LAYERS_KEY,
)
# Keys of `speculators_config`, which says how the draft was made and is to be used, and of the objects inside.
METHOD_KEYS = ("algorithm", "default_proposal_method", "proposal_methods", "verifier")
PROPOSAL_KEYS = ("accept_tolerance", "proposal_type", "speculative_tokens", "verifier_accept_k")
# Older files repeat the verifier's sizes.
VERIFIER_KEYS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "name_or_path",
    "vocab_size",
)


def is_speculators(config: ConfigFile) -> bool:
    """Whether a config is in the dialect of vLLM's speculators library."""
    return config.has("speculators_config") or config.has("speculators_model_type")


def read_speculators(config: ConfigFile) -> Draft:
    """Reads a draft's facts. Raises BadCheckpoint."""
    second = is_dflash2(config)
    for key, place in (
        ("speculators_model_type", config),
        ("algorithm", config.section("speculators_config")),
    ):
        if place.has(key) and (kind := place.require(key, str)) not in ("dflash", "dflash2"):
            raise place.refusal(key, kind, "only dflash and dflash2 drafts are supported")
        if second and place.has(key) and place.values[key] != "dflash2":
            raise place.refusal(
                key, place.values[key], "another key of this config says that it is DFlash2"
            )
    layers = _fill_defaults(config)
    check_keys(config, (*OWN_KEYS, *DFLASH2_KEYS) if second else OWN_KEYS, second)
    check_layer_keys(layers)
    _check_method_keys(config)
    decoder = read_decoder(
        layers, read_dense_mlp(layers), normed=True, head_dim=layers.positive("head_dim")
    )
    layer_ids = config.optional_integers("aux_hidden_state_layer_ids")
    if layer_ids is None:
        raise BadCheckpoint(
            f"{config.where('aux_hidden_state_layer_ids')} is missing; expected a list of whole numbers"
        )
    block = config.positive("block_size", default=DEFAULT_BLOCK)
    vocab = config.positive("draft_vocab_size", default=DEFAULT_VOCAB)
    if vocab > decoder.vocab:
        raise config.refusal(
            "draft_vocab_size", vocab, f"the target's vocabulary has {decoder.vocab}"
        )
    if second and vocab != decoder.vocab:
        raise config.refusal(
            "draft_vocab_size",
            vocab,
            f"DFlash2 needs the whole vocabulary of {decoder.vocab} tokens",
        )
    return Draft(
        decoder=decoder,
        block=block,
        mask_token=config.integer("mask_token_id"),
        # This dialect counts the embedding's output as hidden state 0.
        target_layer_ids=tuple(layer - 1 for layer in layer_ids),
        target_hidden=config.positive("target_hidden_size", default=decoder.hidden),
        windows=_read_windows(config, layers, decoder.layers, second),
        dialect="speculators",
        vocab=vocab,
        k=_read_k(config, block),
        convolution=read_convolution([config], decoder.hidden, block, DEFAULT_KERNEL, DEFAULT_GROUP)
        if second
        else None,
        selector=read_selector([config], decoder.vocab, DEFAULT_RANK, DEFAULT_CANDIDATES)
        if second
        else None,
    )


def find_ambiguity(config: ConfigFile) -> str | None:
    """A warning about a valid draft that other programs read in another way; None for other drafts."""
    if not is_speculators(config):
        return None
    layers = _fill_defaults(config)
    sliding = read_sliding_layers(layers, layers.positive("num_hidden_layers"))
    if is_dflash2(config) or config.has(NON_CAUSAL) or not any(sliding):
        return None
    return (
        f"{config.where(NON_CAUSAL)} is missing. The speculators library reads false, and so does this build: sliding "
        "layers are causal inside the block. vLLM reads true: they are not. The output is exact either way; if few "
        f"tokens are accepted, write {NON_CAUSAL}: true into the file and build again"
    )


def read_verifier(config: ConfigFile) -> str | None:
    """Returns the target that the draft names, None if it names none. Raises BadCheckpoint."""
    return (
        config.section("speculators_config").section("verifier").optional("name_or_path", str)
        or None
    )


def _fill_defaults(config: ConfigFile) -> ConfigFile:
    """Returns the layer config with the defaults of Qwen3Config filled in.

    Null values are not filled: Qwen3Config gives a meaning to two of them, and the others are refused as missing.
    """
    layers = config.section(LAYERS_KEY)
    if not config.has(LAYERS_KEY):
        raise BadCheckpoint(f"{config.where(LAYERS_KEY)} is missing; expected an object")
    if (kind := layers.optional("model_type", str)) not in (None, "qwen3"):
        raise layers.refusal("model_type", kind, "only qwen3 layers are supported")
    values = {**QWEN3_DEFAULTS, **layers.values}
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return ConfigFile(config.path, values, layers.prefix)


def _read_windows(
    config: ConfigFile, layers: ConfigFile, count: int, second: bool
) -> tuple[SlidingWindow | None, ...]:
    """Returns the window of each layer.

    Sliding layers are causal inside the block by default, and not causal in DFlash2 drafts (`second`).
    """
    sliding = read_sliding_layers(layers, count)
    if not any(sliding):
        return (None,) * count
    if not layers.optional("use_sliding_window", bool):
        raise layers.refusal(
            "layer_types",
            layers.values["layer_types"],
            "use_sliding_window is false, so that no layer has a window",
        )
    non_causal = config.optional(NON_CAUSAL, bool)
    causal = not (second if non_causal is None else non_causal)
    window = SlidingWindow(layers.positive("sliding_window"), causal, anchored=True)
    return tuple(window if slides else None for slides in sliding)


def _check_method_keys(config: ConfigFile) -> None:
    """Raises BadCheckpoint for unknown keys of `speculators_config`."""
    section = config.section("speculators_config")
    check_keys(section, METHOD_KEYS)
    check_keys(section.section("verifier"), VERIFIER_KEYS)
    for method in _list_methods(config):
        check_keys(method, PROPOSAL_KEYS)


def _read_k(config: ConfigFile, block: int) -> int:
    """Returns K of the first proposal method. Older files hold the block size, which is one too many."""
    methods = _list_methods(config)
    return (
        min(methods[0].positive("speculative_tokens", default=block - 1), block - 1)
        if methods
        else block - 1
    )


def _list_methods(config: ConfigFile) -> list[ConfigFile]:
    """Returns the proposal methods. Raises BadCheckpoint if one is not an object."""
    key = "speculators_config.proposal_methods"
    methods = config.section("speculators_config").optional("proposal_methods", list) or []
    if not all(isinstance(method, dict) for method in methods):
        raise config.refusal(key, methods, "expected a list of objects")
    return [
        ConfigFile(config.path, method, f"{key}[{index}].") for index, method in enumerate(methods)
    ]
