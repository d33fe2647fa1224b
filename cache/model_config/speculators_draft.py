"""The draft dialects of vLLM's speculators library: `speculators_config` to version 0.9.0, and Open Spec Config."""

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.files.checkpoint_files import list_tensor_names
from dflash_aot.cache.model_config.architecture import (
    Decoder,
    Draft,
    DraftHeads,
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
    ANCHOR_KEY,
    KEYS_OF_METHODS,
    Method,
    check_keys,
    check_layer_keys,
    find_method,
    read_confidence_head,
    read_convolution,
    read_markov_head,
    read_own_vocab,
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
    method = find_method(config)
    second = method == "dflash2"
    for key, place in (
        ("speculators_model_type", config),
        ("algorithm", config.section("speculators_config")),
    ):
        if place.has(key) and (kind := place.require(key, str)) not in KEYS_OF_METHODS:
            raise place.refusal(
                key, kind, f"only {', '.join(KEYS_OF_METHODS)} drafts are supported"
            )
        if place.has(key) and place.values[key] != method:
            raise place.refusal(
                key, place.values[key], f"another key of this config says that it is {method}"
            )
    layers = _fill_defaults(config)
    check_keys(config, (*OWN_KEYS, *KEYS_OF_METHODS[method]), method)
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
    return Draft(
        decoder=decoder,
        block=block,
        mask_token=config.integer("mask_token_id"),
        # This dialect counts the embedding's output as hidden state 0.
        target_layer_ids=tuple(layer - 1 for layer in layer_ids),
        target_hidden=config.positive("target_hidden_size", default=decoder.hidden),
        windows=_read_windows(config, layers, decoder.layers, second),
        dialect="speculators",
        convolution=read_convolution([config], decoder.hidden, block, DEFAULT_KERNEL, DEFAULT_GROUP)
        if second
        else None,
        heads=_read_heads(config, decoder, block, method),
    )


def _read_heads(config: ConfigFile, decoder: Decoder, block: int, method: Method) -> DraftHeads:
    """Reads which rows of a block draft, and how. Raises BadCheckpoint."""
    vocab = config.positive("draft_vocab_size", default=DEFAULT_VOCAB)
    if vocab > decoder.vocab:
        raise config.refusal(
            "draft_vocab_size", vocab, f"the target's vocabulary has {decoder.vocab}"
        )
    if method == "dflash":
        return DraftHeads(vocab, k=_read_k(config, block))
    if method == "dflash2":
        if vocab != decoder.vocab:
            raise config.refusal(
                "draft_vocab_size",
                vocab,
                f"DFlash2 needs the whole vocabulary of {decoder.vocab} tokens",
            )
        selector = read_selector([config], decoder.vocab, DEFAULT_RANK, DEFAULT_CANDIDATES)
        return DraftHeads(vocab, k=_read_k(config, block), selector=selector)
    tensors = list_tensor_names(config.path.parent)
    markov = read_markov_head([config], decoder.vocab, DEFAULT_RANK, "vanilla")
    if markov is None and any(name.startswith("markov_head.") for name in tensors):
        raise config.refusal("markov_rank", 0, "but markov_head.* is among the tensors")
    predicts_next = _read_anchor_sampling(config, block)
    most = block if predicts_next else block - 1
    suggested = _read_speculative_tokens(config)
    if suggested is not None and suggested > most:
        raise _list_methods(config)[0].refusal(
            "speculative_tokens", suggested, f"a block drafts at most {most} tokens"
        )
    return DraftHeads(
        vocab,
        predicts_next,
        k=suggested,
        markov=markov,
        confidence=read_confidence_head([config], tensors, decoder.hidden, markov, default=True),
    )


def _read_anchor_sampling(config: ConfigFile, block: int) -> bool:
    """Whether the anchor's row drafts. Files without the key tell it by their K. Raises BadCheckpoint."""
    anchored = config.optional(ANCHOR_KEY, bool)
    if anchored is not None:
        return anchored
    suggested = _read_speculative_tokens(config)
    if suggested not in (block, block - 1):
        raise BadCheckpoint(
            f"{config.where(ANCHOR_KEY)} is missing, and speculative_tokens tells nothing either: with {block} every "
            f"row of the block drafts, with {block - 1} every row but the anchor's; found {suggested}. Write "
            f"{ANCHOR_KEY} into the file as the draft was trained"
        )
    return suggested == block


def _read_speculative_tokens(config: ConfigFile) -> int | None:
    """K of the first proposal method, None if the file has none. Raises BadCheckpoint."""
    methods = _list_methods(config)
    if not methods or not methods[0].has("speculative_tokens"):
        return None
    return methods[0].positive("speculative_tokens")


def find_ambiguity(config: ConfigFile) -> str | None:
    """A warning about a valid draft that other programs read in another way; None for other drafts."""
    if not is_speculators(config):
        return None
    layers = _fill_defaults(config)
    sliding = read_sliding_layers(layers, layers.positive("num_hidden_layers"))
    if find_method(config) != "dflash" or config.has(NON_CAUSAL) or not any(sliding):
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
    return min(_read_speculative_tokens(config) or block - 1, block - 1)


def _list_methods(config: ConfigFile) -> list[ConfigFile]:
    """Returns the proposal methods. Raises BadCheckpoint if one is not an object."""
    key = "speculators_config.proposal_methods"
    methods = config.section("speculators_config").optional("proposal_methods", list) or []
    if not all(isinstance(method, dict) for method in methods):
        raise config.refusal(key, methods, "expected a list of objects")
    return [
        ConfigFile(config.path, method, f"{key}[{index}].") for index, method in enumerate(methods)
    ]


# -- Open Spec Config, which the library writes after version 0.9.0: one schema for several trainers
#
# The layers' keys are at the top. github.com/open-spec-config/open-spec-config

OPEN_SPEC = "open_spec_config_version"
OPEN_SPEC_VERSION = "0.0.0"
OPEN_SPEC_ARCHITECTURES = ["DflashDraftModel"]  # with a small f
START_KEY = "target_layer_start_idx"
SPECULATIVE_KEYS = (
    "method",
    "speculative_tokens",
    "target_layer_ids",
    START_KEY,
    "draft_vocab_size",
    "verifier",
)
# In `speculative_config`, or in its `dflash_config` by an older schema of the same version.
ROW_KEYS = ("mask_token_id", ANCHOR_KEY, NON_CAUSAL)
ORIGIN_KEYS = ("training_framework", "training_framework_version")
NESTED = "dflash_config"
NESTED_KEYS = (NESTED, "speculative_library", "speculative_library_version")


def read_open_spec(config: ConfigFile) -> Draft:
    """Reads the facts of a DFlash draft from an Open Spec Config. Raises BadCheckpoint."""
    if (version := config.values[OPEN_SPEC]) != OPEN_SPEC_VERSION:
        raise config.refusal(OPEN_SPEC, version, f"only version {OPEN_SPEC_VERSION} is supported")
    section = config.section("speculative_config")
    rows = _check_open_spec_keys(config, section)
    decoder = read_decoder(
        config, read_dense_mlp(config), normed=True, head_dim=config.positive("head_dim")
    )
    predicts_next = rows.require(ANCHOR_KEY, bool)
    k = section.positive("speculative_tokens")
    causal = ConfigFile(config.path, {NON_CAUSAL: rows.require(NON_CAUSAL, bool)})
    return Draft(
        decoder=decoder,
        block=k if predicts_next else k + 1,
        mask_token=rows.integer("mask_token_id"),
        target_layer_ids=_read_counted_layers(section),
        target_hidden=config.positive("target_hidden_size", default=decoder.hidden),
        windows=_read_windows(causal, config, decoder.layers, second=False),
        dialect="open-spec",
        heads=DraftHeads(_read_open_spec_vocab(config, section, decoder.vocab), predicts_next, k),
    )


def _check_open_spec_keys(config: ConfigFile, section: ConfigFile) -> ConfigFile:
    """Checks all keys; returns the object with ROW_KEYS. Raises BadCheckpoint."""
    names = config.require("architectures", list)
    if names != OPEN_SPEC_ARCHITECTURES:
        raise config.refusal("architectures", names, f"expected {OPEN_SPEC_ARCHITECTURES}")
    if (method := section.require("method", str)) != "dflash":
        raise section.refusal("method", method, "only dflash drafts are supported")
    nested = section.has(NESTED)
    keys = (*SPECULATIVE_KEYS, *(NESTED_KEYS if nested else (*ROW_KEYS, *ORIGIN_KEYS)))
    rows = section.section(NESTED) if nested else section
    for place, allowed in ((section, keys), *(((rows, ROW_KEYS),) if nested else ())):
        for key, value in place.values.items():
            if key not in allowed:
                raise place.refusal(key, value, f"expected {', '.join(allowed)}")
            if value is None:
                raise place.refusal(key, value, "this object has no nulls")
    own = (OPEN_SPEC, "speculative_config", "speculators_metadata", "target_hidden_size")
    check_layer_keys(config, own)
    return rows


def _read_counted_layers(section: ConfigFile) -> tuple[int, ...]:
    """The layers from 0, of ids that count from the embedding's output (start 1) or from the first layer (start 0)."""
    start = section.integer(START_KEY)
    if start not in (0, 1):
        raise section.refusal(START_KEY, start, "expected 0 or 1")
    found = section.optional_integers("target_layer_ids")
    if found is None:
        raise BadCheckpoint(
            f"{section.where('target_layer_ids')} is missing; expected a list of whole numbers"
        )
    return tuple(layer - start for layer in found)


def _read_open_spec_vocab(config: ConfigFile, section: ConfigFile, vocab: int) -> int | None:
    """Tokens of the draft's own embedding and head, None if it uses the target's. Raises BadCheckpoint."""
    tensors = list_tensor_names(config.path.parent)
    kept = section.positive("draft_vocab_size", default=vocab)
    if kept > vocab:
        raise section.refusal("draft_vocab_size", kept, f"the target's vocabulary has {vocab}")
    if kept == vocab:
        return read_own_vocab(config, tensors, vocab)
    if tensors and not {"d2t", "lm_head.weight"} <= {*tensors}:
        raise section.refusal("draft_vocab_size", kept, "but d2t or lm_head.weight is missing")
    return kept
