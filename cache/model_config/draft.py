"""Drafts: which dialect a `config.json` speaks, what it says, and whether it was made for the target."""

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.config_file import ConfigFile, shorten_value
from dflash_aot.cache.model_config.speculators_draft import read_speculators
from dflash_aot.cache.model_config.target import FAMILIES
from dflash_aot.cache.model_config.zlab_draft import read_zlab

# Drafts of other kinds, some under DFlash's own name, by the keys that give them away.
UNSUPPORTED_KEYS = {
    "projector_type": "Domino",
    "markov_rank": "DSpark",
    "markov_head_type": "DSpark",
    "enable_confidence_head": "DSpark",
    "confidence_head": "DSpark",
    "conv_kernel_size": "DFlash2",
    "selector": "DFlash2",
    "selector_config": "DFlash2",
    "dflash2_dynamic_conv": "DFlash2",
    "dflash2_candidate_selector": "DFlash2",
    "dflash_context_residual": "DFlash with a context residual",
    "dflash_block_position_embedding": "DFlash with position embeddings in the block",
    "dflash_gated_layer_fusion": "DFlash with gated fusion of its taps",
    "shift_label": "a draft whose rows predict the token after their own",
    "sample_from_anchor": "a draft that samples its anchor",
}
ACCEPTED_VALUES = {"projector_type": "dflash"}  # what such a key says of a draft that is none of them
UNSUPPORTED_ARCHITECTURES = {"DFlash2DraftModel": "DFlash2", "DSparkDraftModel": "DSpark", "DominoDraftModel": "Domino"}
MASK_EMBEDDING_FILE = "mask_embedding.pt"


def read_draft(config: ConfigFile, target: Target) -> Draft:
    """A draft's `config.json`, checked against the target that it is to draft for. Raises BadCheckpoint."""
    _refuse_relatives(config)
    draft = read_speculators(config) if is_speculators(config) else _read_as_zlab(config, target)
    _check_pair(config, target, draft)
    return draft


def is_speculators(config: ConfigFile) -> bool:
    return config.has("speculators_config") or config.has("speculators_model_type")


def _read_as_zlab(config: ConfigFile, target: Target) -> Draft:
    found = config.optional("architectures", list) or []
    names = [name for name in found if isinstance(name, str)]
    if not (config.has("dflash_config") or any("DFlash" in name for name in names)):
        hint = " This is a target: are --target and --draft the wrong way round?" * any(n in FAMILIES for n in names)
        raise BadCheckpoint(
            f"{config.path}: architectures is {shorten_value(found)}; supported for drafts is "
            f"DFlashDraftModel, in z-lab's format (dflash_config) and in speculators' (speculators_config).{hint}"
        )
    return read_zlab(config, target)


def _refuse_relatives(config: ConfigFile) -> None:
    """Relatives of DFlash that draft in another way."""
    for name in config.optional("architectures", list) or []:
        if relative := UNSUPPORTED_ARCHITECTURES.get(name) if isinstance(name, str) else None:
            raise config.refusal("architectures", name, f"this is {relative}, which is not supported")
    for place in (config, config.section("dflash_config")):
        for key, relative in UNSUPPORTED_KEYS.items():
            if (value := place.values.get(key)) and value != ACCEPTED_VALUES.get(key):
                raise place.refusal(key, value, f"this is {relative}, which is not supported")
    if (sidecar := config.path.parent / MASK_EMBEDDING_FILE).exists():
        raise BadCheckpoint(f"{sidecar}: a draft with a mask embedding of its own is not supported")


def _check_pair(config: ConfigFile, target: Target, draft: Draft) -> None:
    """The draft listens to the target's features, and borrows its embedding and head or maps onto them."""
    borrows = draft.vocab is None
    for key, own, expected in (
        ("hidden_size", draft.decoder.hidden if borrows else None, target.decoder.hidden),
        ("target_hidden_size", draft.target_hidden, target.decoder.hidden),
        ("vocab_size", draft.decoder.vocab, target.decoder.vocab),
        ("num_target_layers", config.optional("num_target_layers", int), target.decoder.layers),
    ):
        if own is not None and own != expected:
            raise _refuse_fact(config, key, own, f"the target has {expected}: this draft was trained for another one")
    if draft.block < 2:
        raise _refuse_fact(config, "block_size", draft.block, "a block is the anchor and at least one drafted token")
    if draft.block > draft.decoder.positions:
        raise _refuse_fact(config, "block_size", draft.block, f"the draft has {draft.decoder.positions} positions")
    if not 0 <= draft.mask_token < target.decoder.vocab:
        raise _refuse_fact(
            config, "mask_token_id", draft.mask_token, f"the target's vocabulary has {target.decoder.vocab} tokens"
        )
    _check_taps(config, target.decoder.layers, draft)


def _check_taps(config: ConfigFile, layers: int, draft: Draft) -> None:
    """In the numbers that the file uses: speculators counts from the embedding, z-lab from the first layer."""
    key, offset = ("aux_hidden_state_layer_ids", 1) if draft.dialect == "speculators" else ("target_layer_ids", 0)
    found = [tap + offset for tap in draft.target_layer_ids]
    for tap in draft.target_layer_ids:
        if not 0 <= tap < layers:
            raise _refuse_fact(
                config,
                key,
                found,
                f"the target has layers {offset} to {layers - 1 + offset} in this file's count",
            )
        if tap == layers - 1:
            raise _refuse_fact(
                config,
                key,
                found,
                "a tap on the last layer is ambiguous: the reference reads it after the final norm, servers before it",
            )
    if not draft.target_layer_ids or len(set(draft.target_layer_ids)) < len(draft.target_layer_ids):
        raise _refuse_fact(config, key, found, "at least one tap, each once")


def _refuse_fact(config: ConfigFile, key: str, found: object, reason: str) -> BadCheckpoint:
    """A refusal that names the place where `key` stands: in one of the sections, or at the top."""
    sections = (config.section(name) for name in ("dflash_config", "transformer_layer_config"))
    place = next((section for section in sections if section.has(key)), config)
    return place.refusal(key, found, reason)
