"""Reads a draft's `config.json` in either dialect, and checks that the draft was trained for the target."""

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import Draft, Target
from dflash_aot.cache.model_config.config_file import ConfigFile, shorten_value
from dflash_aot.cache.model_config.dflash2 import ARCHITECTURE
from dflash_aot.cache.model_config.draft_relatives import refuse_relatives
from dflash_aot.cache.model_config.quantization import read_quantization
from dflash_aot.cache.model_config.speculators_draft import read_speculators
from dflash_aot.cache.model_config.target import FAMILIES, HYBRIDS
from dflash_aot.cache.model_config.zlab_draft import read_zlab


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
            raise _refuse_fact(config, key, own, f"the target has {expected}: this draft was trained for another one")
    if draft.block < 2:
        raise _refuse_fact(config, "block_size", draft.block, "a block holds the anchor and at least one drafted token")
    if draft.block > draft.decoder.positions:
        raise _refuse_fact(config, "block_size", draft.block, f"the draft has only {draft.decoder.positions} positions")
    if not 0 <= draft.mask_token < target.decoder.vocab:
        raise _refuse_fact(
            config, "mask_token_id", draft.mask_token, f"the target's vocabulary has {target.decoder.vocab} tokens"
        )
    _check_target_layer_ids(config, target.decoder.layers, draft)


def _check_target_layer_ids(config: ConfigFile, layers: int, draft: Draft) -> None:
    """Checks the layer ids. Messages count as the file does: speculators from the embedding, z-lab from layer 0."""
    key, offset = ("aux_hidden_state_layer_ids", 1) if draft.dialect == "speculators" else ("target_layer_ids", 0)
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
