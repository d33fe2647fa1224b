"""Relatives of DFlash that draft in another way: each is refused by the key, value or architecture that names it."""

from typing import Any

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.dflash2 import ARCHITECTURE, CONVOLUTION_KEYS, SELECTOR_KEYS, is_dflash2

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
NEUTRAL_VALUES: dict[str, Any] = {"attention_value_scale": 1}  # at which such a key changes nothing, besides false ones
PROJECTORS = {"domino": "Domino", "dspark": "DSpark", "lilicorr": "LiLiCorr"}
UNSUPPORTED_ARCHITECTURES = {
    "DSparkDraftModel": "DSpark",
    "DominoDraftModel": "Domino",
    "LiLiCorrDraftModel": "LiLiCorr",
}
MASK_EMBEDDING_FILE = "mask_embedding.pt"


def refuse_relatives(config: ConfigFile) -> None:
    """Raises BadCheckpoint for a draft that is no DFlash or DFlash2 of a form that runs here."""
    for name in config.optional("architectures", list) or []:
        if relative := UNSUPPORTED_ARCHITECTURES.get(name) if isinstance(name, str) else None:
            raise config.refusal("architectures", name, f"this is {relative}, which is not supported")
    second = is_dflash2(config)
    for place in (config, config.section("dflash_config")):
        _check_projector(place, second)
        for key, relative in UNSUPPORTED_KEYS.items():
            if (value := place.values.get(key)) and value != NEUTRAL_VALUES.get(key):
                raise place.refusal(key, value, f"this is {relative}, which is not supported")
        if place.values.get("is_neox_style") is False:
            raise place.refusal("is_neox_style", False, "this is DFlash with interleaved RoPE, which is not supported")
        for key in () if second else (*CONVOLUTION_KEYS, *SELECTOR_KEYS):
            if value := place.values.get(key):
                raise place.refusal(key, value, f"a key of DFlash2, but architectures does not name {ARCHITECTURE}")
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
