"""Reads a draft's `config.json`: dialects, refusals of relatives of DFlash, and checks against the target."""

from typing import Any

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import (
    UNLIMITED_WINDOW,
    Draft,
    SlidingWindow,
    Target,
    default_target_layer_ids,
    read_decoder,
    read_dense_mlp,
)
from dflash_aot.cache.model_config.config_file import (
    QWEN3_DEFAULTS,
    ConfigFile,
    read_sliding_layers,
    shorten_value,
)
from dflash_aot.cache.model_config.dflash2 import (
    ARCHITECTURE,
    CONVOLUTION_KEYS,
    SCALING_KEYS,
    SELECTOR_KEYS,
    find_place,
    is_dflash2,
    read_convolution,
    read_scaling,
    read_selector,
    refuse_unknown_keys,
    refuse_unknown_layer_keys,
)
from dflash_aot.cache.model_config.quantization import read_quantization
from dflash_aot.cache.model_config.speculators_draft import read_speculators
from dflash_aot.cache.model_config.target import FAMILIES, HYBRIDS

# -- relatives of DFlash, which draft in another way
#
# Each relative is refused by the key, value or architecture that names it.

# Keys of draft models of other kinds, some of which use DFlash's name.
UNSUPPORTED_KEYS = {
    "markov_rank": "DSpark",
    "markov_head_type": "DSpark",
    "enable_confidence_head": "DSpark",
    "confidence_head": "DSpark",
    "selector": "another form of DFlash2",
    "selector_config": "another form of DFlash2",
    "dflash2_dynamic_conv": "another form of DFlash2",
    "dflash2_candidate_selector": "another form of DFlash2",
    "dflash_context_residual": "DFlash with a context residual",
    "dflash_block_position_embedding": "DFlash with position embeddings in the block",
    "dflash_gated_layer_fusion": "DFlash with gated fusion of target layers",
    "shift_label": "a draft whose rows predict the next token",
    "sample_from_anchor": "a draft that samples its anchor",
    "attention_sink_bias": "DFlash with attention sinks",
    "add_swa_attention_sink_bias": "DFlash with attention sinks",
    "add_full_attention_sink_bias": "DFlash with attention sinks",
    "attention_value_scale": "DFlash with scaled values",
    "open_spec_config_version": "an Open Spec Config, a format of speculators",
}
# Values with which such a key changes nothing, in addition to false values.
NEUTRAL_VALUES: dict[str, Any] = {"attention_value_scale": 1}
PROJECTORS = {"domino": "Domino", "dspark": "DSpark", "lilicorr": "LiLiCorr"}
UNSUPPORTED_ARCHITECTURES = {
    "DSparkDraftModel": "DSpark",
    "DominoDraftModel": "Domino",
    "LiLiCorrDraftModel": "LiLiCorr",
}
MASK_EMBEDDING_FILE = "mask_embedding.pt"


def refuse_relatives(config: ConfigFile) -> None:
    """Raises BadCheckpoint for a draft that is neither DFlash nor DFlash2 in a supported form."""
    for name in config.optional("architectures", list) or []:
        if relative := UNSUPPORTED_ARCHITECTURES.get(name) if isinstance(name, str) else None:
            raise config.refusal(
                "architectures", name, f"this is {relative}, which is not supported"
            )
    second = is_dflash2(config)
    for place in (config, config.section("dflash_config")):
        _check_projector(place, second)
        for key, relative in UNSUPPORTED_KEYS.items():
            if (value := place.values.get(key)) and value != NEUTRAL_VALUES.get(key):
                raise place.refusal(key, value, f"this is {relative}, which is not supported")
        if place.values.get("is_neox_style") is False:
            raise place.refusal(
                "is_neox_style",
                False,
                "this is DFlash with interleaved RoPE, which is not supported",
            )
        for key in () if second else (*CONVOLUTION_KEYS, *SELECTOR_KEYS):
            if value := place.values.get(key):
                raise place.refusal(
                    key, value, f"a key of DFlash2, but architectures does not name {ARCHITECTURE}"
                )
    if (sidecar := config.path.parent / MASK_EMBEDDING_FILE).exists():
        raise BadCheckpoint(f"{sidecar}: a draft with its own mask embedding is not supported")


def _check_projector(place: ConfigFile, second: bool) -> None:
    """`projector_type` names the kind of draft, and exporters write it for DFlash and DFlash2 too."""
    value = place.values.get("projector_type")
    if not value or value == "dflash" or (second and value == "dflash2"):
        return
    if relative := PROJECTORS.get(value) if isinstance(value, str) else None:
        raise place.refusal("projector_type", value, f"this is {relative}, which is not supported")
    raise place.refusal("projector_type", value, f"expected {'dflash2' if second else 'dflash'}")


# -- the dialect of z-lab, DFlash's authors: `DFlashDraftModel` or `DFlash2DraftModel` with a `dflash_config`

WINDOW_DEFAULTS = {key: QWEN3_DEFAULTS[key] for key in ("max_window_layers", "sliding_window")}
# Keys of DFlash2 drafts, each read from `dflash_config` or, if it is not there, from the top level.
OWN_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    *CONVOLUTION_KEYS,
    *SELECTOR_KEYS,
    *SCALING_KEYS,
)


def read_zlab(config: ConfigFile, target: Target) -> Draft:
    """Reads a draft's facts. Its layers are Qwen3's, whatever `model_type` says. Raises BadCheckpoint."""
    inner = config.section("dflash_config")
    if second := is_dflash2(config):
        refuse_unknown_keys(inner, {*OWN_KEYS, *UNSUPPORTED_KEYS, "causal", "projector_type"})
        refuse_unknown_layer_keys(
            config,
            {
                *OWN_KEYS,
                *UNSUPPORTED_KEYS,
                "dflash_config",
                "is_causal",
                "num_target_layers",
                "projector_type",
            },
        )
    decoder = read_decoder(
        config, read_dense_mlp(config), normed=True, head_dim=config.positive("head_dim")
    )
    places = (inner, config)
    layer_ids = find_place(places, "target_layer_ids").optional_integers("target_layer_ids")
    block = _either(config, inner, "block_size")
    return Draft(
        decoder=decoder,
        block=block,
        mask_token=_either(inner, config, "mask_token_id"),
        target_layer_ids=default_target_layer_ids(target.decoder.layers, decoder.layers)
        if layer_ids is None
        else layer_ids,
        target_hidden=target.decoder.hidden,
        windows=_read_windows(config, inner, decoder.layers, second),
        scaling=read_scaling(places),
        convolution=read_convolution(places, decoder.hidden, block) if second else None,
        selector=read_selector(places, decoder.vocab) if second else None,
    )


def _either(first: ConfigFile, second: ConfigFile, key: str) -> int:
    """Reads a number that newer and older checkpoints keep in different places; if in both, the numbers must agree."""
    found = {place.where(key): place.integer(key) for place in (first, second) if place.has(key)}
    if not found:
        raise BadCheckpoint(f"{first.path}: {key} is missing, both at the top and in dflash_config")
    if len(set(found.values())) > 1:
        raise BadCheckpoint(" but ".join(f"{where} is {value}" for where, value in found.items()))
    return next(iter(found.values()))


def _read_windows(
    config: ConfigFile, inner: ConfigFile, layers: int, second: bool
) -> tuple[SlidingWindow | None, ...]:
    """Returns the window of each layer.

    A sliding layer is causal inside the block unless `is_causal` is false; without that key `dflash_config.causal`
    decides, which vLLM reads. `is_causal: true` makes full layers causal inside the block too. By transformers'
    Qwen3Config no layer has a window without `use_sliding_window`: DFlash2 configs (`second`) that contradict
    themselves so are refused. With it, absent keys have the defaults of that class. `dflash_config.use_swa` of a draft
    whose `layer_types` has no sliding layer makes all of them slide, not causal inside the block by themselves, and
    `dflash_config.swa_window_size` comes before `sliding_window`, as vLLM reads both.
    """
    if windowed := config.optional("use_sliding_window", bool):
        config = ConfigFile(config.path, {**WINDOW_DEFAULTS, **config.values})
    sliding = read_sliding_layers(config, layers)
    everywhere = not any(sliding) and bool(inner.optional("use_swa", bool))
    flags = [place.optional(key, bool) for place, key in ((config, "is_causal"), (inner, "causal"))]
    causal = next((flag for flag in flags if flag is not None), not everywhere)
    full = SlidingWindow(UNLIMITED_WINDOW, causal=True) if flags[0] else None
    if not any(sliding) and not everywhere:
        return (full,) * layers
    if second and not windowed:
        raise config.refusal(
            "use_sliding_window", windowed, "but layer_types has sliding_attention"
        )
    place, key = (
        (inner, "swa_window_size") if inner.has("swa_window_size") else (config, "sliding_window")
    )
    window = SlidingWindow(place.positive(key), causal)
    return tuple(window if slides or everywhere else full for slides in sliding)


# -- drafts of either dialect, and their checks against the target


def read_draft(config: ConfigFile, target: Target) -> Draft:
    """Reads a draft's facts and checks them against the target.

    Raises BadCheckpoint, also for weights in a format that cannot be loaded.
    """
    refuse_relatives(config)
    read_quantization(config)
    draft = read_speculators(config) if is_speculators(config) else _read_as_zlab(config, target)
    _check_pair(config, target, draft)
    return draft


def is_speculators(config: ConfigFile) -> bool:
    """Whether a config is in the dialect of vLLM's speculators library."""
    return config.has("speculators_config") or config.has("speculators_model_type")


def _read_as_zlab(config: ConfigFile, target: Target) -> Draft:
    found = config.optional("architectures", list) or []
    names = [name for name in found if isinstance(name, str)]
    if not (config.has("dflash_config") or any("DFlash" in name for name in names)):
        is_target = any(name in (*FAMILIES, *HYBRIDS) for name in names)
        hint = " This is a target: are --target and --draft swapped?" * is_target
        raise BadCheckpoint(
            f"{config.path}: architectures is {shorten_value(found)}; supported for drafts is "
            f"DFlashDraftModel and {ARCHITECTURE}, in z-lab's format (dflash_config) and in speculators' "
            f"(speculators_config).{hint}"
        )
    return read_zlab(config, target)


def _check_pair(config: ConfigFile, target: Target, draft: Draft) -> None:
    """Checks that widths and vocabulary of the draft match the target. Raises BadCheckpoint."""
    borrows = draft.vocab is None
    for key, own, expected in (
        ("hidden_size", draft.decoder.hidden if borrows else None, target.decoder.hidden),
        ("target_hidden_size", draft.target_hidden, target.decoder.hidden),
        ("vocab_size", draft.decoder.vocab, target.decoder.vocab),
        ("num_target_layers", config.optional("num_target_layers", int), target.decoder.layers),
    ):
        if own is not None and own != expected:
            raise _refuse_fact(
                config,
                key,
                own,
                f"the target has {expected}: this draft was trained for another one",
            )
    if draft.block < 2:
        raise _refuse_fact(
            config,
            "block_size",
            draft.block,
            "a block holds the anchor and at least one drafted token",
        )
    if draft.block > draft.decoder.positions:
        raise _refuse_fact(
            config,
            "block_size",
            draft.block,
            f"the draft has only {draft.decoder.positions} positions",
        )
    if not 0 <= draft.mask_token < target.decoder.vocab:
        raise _refuse_fact(
            config,
            "mask_token_id",
            draft.mask_token,
            f"the target's vocabulary has {target.decoder.vocab} tokens",
        )
    _check_target_layer_ids(config, target.decoder.layers, draft)


def _check_target_layer_ids(config: ConfigFile, layers: int, draft: Draft) -> None:
    """Checks the layer ids. Messages count as the file does: speculators from the embedding, z-lab from layer 0."""
    key, offset = (
        ("aux_hidden_state_layer_ids", 1)
        if draft.dialect == "speculators"
        else ("target_layer_ids", 0)
    )
    found = [layer + offset for layer in draft.target_layer_ids]
    for layer in draft.target_layer_ids:
        if not 0 <= layer < layers:
            raise _refuse_fact(
                config,
                key,
                found,
                f"in this file's count the target has layers {offset} to {layers - 1 + offset}",
            )
        if layer == layers - 1:
            raise _refuse_fact(
                config,
                key,
                found,
                "the last layer is ambiguous: the reference reads it after the final norm, servers before it",
            )
    if not draft.target_layer_ids or len(set(draft.target_layer_ids)) < len(draft.target_layer_ids):
        raise _refuse_fact(config, key, found, "expected at least one layer, and none twice")


def _refuse_fact(config: ConfigFile, key: str, found: object, reason: str) -> BadCheckpoint:
    """Returns an error that names the place of `key`: in one of the sections, or at the top."""
    sections = (config.section(name) for name in ("dflash_config", "transformer_layer_config"))
    place = next((section for section in sections if section.has(key)), config)
    return place.refusal(key, found, reason)
