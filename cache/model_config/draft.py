"""Reads a draft's `config.json`: dialects, refusals of relatives of DFlash, and checks against the target."""

import re

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.files.checkpoint_files import list_tensor_names
from dflash_aot.cache.model_config.architecture import (
    UNLIMITED_WINDOW,
    Decoder,
    Draft,
    DraftHeads,
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
from dflash_aot.cache.model_config.draft_keys import (
    ANCHOR_KEY,
    DFLASH,
    DFLASH2,
    DFLASH2_NAMES,
    DSPARK_NAMES,
    KEYS_OF_METHODS,
    OWN_TABLES,
    SCALING_KEYS,
    Method,
    check_keys,
    check_layer_keys,
    find_method,
    find_place,
    name_architecture,
    read_confidence_head,
    read_convolution,
    read_markov_head,
    read_own_vocab,
    read_scaling,
    read_selector,
)
from dflash_aot.cache.model_config.quantization import read_quantization
from dflash_aot.cache.model_config.speculators_draft import (
    OPEN_SPEC,
    START_KEY,
    is_speculators,
    read_open_spec,
    read_speculators,
)
from dflash_aot.cache.model_config.target import FAMILIES
from dflash_aot.cache.model_config.tensor_names import is_ignored

# -- the dialect of z-lab, DFlash's authors: `DFlashDraftModel` or `DFlash2DraftModel` with a `dflash_config`
#
# DeepSpec and SpecForge write DSpark drafts in this dialect.

WINDOW_DEFAULTS = {key: QWEN3_DEFAULTS[key] for key in ("max_window_layers", "sliding_window")}
# Keys that are read from `dflash_config` or, if they are not there, from the top level.
OWN_KEYS = ("block_size", "mask_token_id", "target_layer_ids")
INNER_KEYS = ("causal", "use_swa", "swa_window_size")  # of `dflash_config` only
TOP_KEYS = ("dflash_config", "is_causal", "target_hidden_size")
# Keys with which hand-written DSpark configs repeat others, for vLLM.
REPEATED = {
    "dspark_block_size": "block_size",
    "dspark_markov_rank": "markov_rank",
    "dspark_noise_token_id": "mask_token_id",
    "dspark_target_layer_ids": "target_layer_ids",
    "n_predict": "block_size",
}
# First parts of the names of tensors.
MODULES = ("fc", "hidden_norm", "norm", "layers", "candidate_selector", "embed_tokens", "lm_head")
DEEPSPEC = DSPARK_NAMES[0]  # always stores an embedding and a head


def read_zlab(config: ConfigFile, target: Target) -> Draft:
    """Reads a draft's facts. Its layers are Qwen3's, whatever `model_type` says. Raises BadCheckpoint."""
    inner = config.section("dflash_config")
    method = find_method(config)
    # No DSpark draft has scalars, and whether they would scale the bias too is not settled.
    scaling = () if method == "dspark" else SCALING_KEYS
    own_keys = (*OWN_KEYS, *scaling, *KEYS_OF_METHODS[method])
    check_keys(inner, (*own_keys, *INNER_KEYS), method)
    repeated = REPEATED if method == "dspark" else ()
    check_layer_keys(config, (*own_keys, *TOP_KEYS, *OWN_TABLES, *repeated), method)
    second = method == "dflash2"
    decoder = read_decoder(
        config, read_dense_mlp(config), normed=True, head_dim=config.positive("head_dim")
    )
    places = (inner, config)
    layer_ids = find_place(places, "target_layer_ids").optional_integers("target_layer_ids")
    block = _either(config, inner, "block_size")
    for key in repeated:
        _check_repeated(config, inner, key)
    heads = _read_heads(config, inner, decoder, method)
    _refuse_other_tensors(config, heads)
    return Draft(
        decoder=decoder,
        block=block,
        mask_token=_either(inner, config, "mask_token_id"),
        target_layer_ids=default_target_layer_ids(target.decoder.layers, decoder.layers)
        if layer_ids is None
        else layer_ids,
        target_hidden=config.positive("target_hidden_size", default=target.decoder.hidden),
        windows=_read_windows(config, inner, decoder.layers, second),
        scaling=read_scaling(places),
        convolution=read_convolution(places, decoder.hidden, block) if second else None,
        heads=heads,
    )


def _check_repeated(config: ConfigFile, inner: ConfigFile, key: str) -> None:
    """Raises BadCheckpoint if a key of REPEATED contradicts the key that it repeats."""
    place = find_place((inner, config), REPEATED[key])
    expected = place.values.get(REPEATED[key])
    if config.has(key) and config.values[key] != expected:
        found = shorten_value(expected)
        raise config.refusal(
            key, config.values[key], f"but {place.where(REPEATED[key])} is {found}"
        )


def _read_heads(
    config: ConfigFile, inner: ConfigFile, decoder: Decoder, method: Method
) -> DraftHeads:
    """Reads which rows of a block draft, and how. Raises BadCheckpoint."""
    places = (inner, config)
    tensors = list_tensor_names(config.path.parent)
    vocab = read_own_vocab(config, tensors, decoder.vocab)
    if method == "dflash2":
        return DraftHeads(vocab, selector=read_selector(places, decoder.vocab))
    if method == "dflash":
        return DraftHeads(vocab)
    if not tensors and DEEPSPEC in (config.optional("architectures", list) or ()):
        vocab = decoder.vocab
    markov = read_markov_head(places, decoder.vocab)
    anchored = find_place(places, ANCHOR_KEY).optional(ANCHOR_KEY, bool)
    return DraftHeads(
        vocab,
        predicts_next=anchored is not False,
        markov=markov,
        confidence=read_confidence_head(places, tensors, decoder.hidden, markov, default=False),
    )


def _refuse_other_tensors(config: ConfigFile, heads: DraftHeads) -> None:
    """Raises BadCheckpoint for weights that this draft has no place for. No-op for a config without weights."""
    directory = config.path.parent
    modules = [*MODULES]
    modules += ["markov_head"] if heads.markov else []
    modules += ["confidence_head"] if heads.confidence else []
    names = sorted(
        name
        for name in list_tensor_names(directory)
        if name.partition(".")[0] not in modules and not is_ignored(name, "draft")
    )
    if names:
        raise BadCheckpoint(
            f"{directory}: {shorten_value(names)}: tensors that this draft has no place for by its {config.path.name}"
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

    Without other keys, sliding layers are causal inside the block and full layers are not. `is_causal` speaks of all
    layers; without that key `dflash_config.causal` does, as vLLM reads both. By transformers'
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
    flag = next((flag for flag in flags if flag is not None), None)
    causal = not everywhere if flag is None else flag
    full = SlidingWindow(UNLIMITED_WINDOW, causal=True) if flag else None
    if not any(sliding) and not everywhere:
        return (full,) * layers
    if second and any(sliding) and not windowed:
        raise config.refusal(
            "use_sliding_window", windowed, "but layer_types has sliding_attention"
        )
    place, key = (
        (inner, "swa_window_size") if inner.has("swa_window_size") else (config, "sliding_window")
    )
    window = SlidingWindow(place.positive(key), causal)
    return tuple(window if slides or everywhere else full for slides in sliding)


# -- drafts of either dialect, and their checks against the target

# Part of the name of a class of the speculators library, by method.
PARTS_OF_NAMES = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dflash|dspark"}
SECTIONS = ("dflash_config", "transformer_layer_config", "speculative_config")
MASK_EMBEDDING_FILE = "mask_embedding.pt"


def read_draft(config: ConfigFile, target: Target) -> Draft:
    """Reads a draft's facts and checks them against the target.

    Raises BadCheckpoint, also for weights in a format that cannot be loaded.
    """
    if config.has(OPEN_SPEC):
        draft = read_open_spec(config)
    else:
        _check_architectures(config)
        draft = read_speculators(config) if is_speculators(config) else read_zlab(config, target)
    if (sidecar := config.path.parent / MASK_EMBEDDING_FILE).exists():
        raise BadCheckpoint(f"{sidecar}: a draft with its own mask embedding is not supported")
    read_quantization(config)
    _check_pair(config, target, draft)
    return draft


def _check_architectures(config: ConfigFile) -> None:
    """Checks that `architectures` names a supported draft, or nothing where other keys do. Raises BadCheckpoint."""
    found = config.optional("architectures", list) or []
    if not found and (config.has("dflash_config") or is_speculators(config)):
        return
    for name in found:
        if not isinstance(name, str):
            raise _refuse_architectures(config)
        if name in FAMILIES:
            raise _refuse_architectures(
                config, " This is a target: are --target and --draft swapped?"
            )
        # The speculators library has had other names for its classes: there `speculators_model_type` decides.
        named = is_speculators(config) and re.search(
            PARTS_OF_NAMES[find_method(config)], name.lower()
        )
        if name not in (DFLASH, *DFLASH2_NAMES, *DSPARK_NAMES) and not named:
            kind = name_architecture(name)
            if kind is None:
                raise _refuse_architectures(config)
            raise config.refusal("architectures", name, f"this is {kind}, which is not supported")
    if not found:
        raise _refuse_architectures(config)


def _refuse_architectures(config: ConfigFile, hint: str = "") -> BadCheckpoint:
    found = config.optional("architectures", list) or []
    return BadCheckpoint(
        f"{config.path}: architectures is {shorten_value(found)}; supported for drafts is "
        f"{', '.join((DFLASH, DFLASH2, *DSPARK_NAMES))}, in z-lab's format (dflash_config) and in speculators' "
        f"(speculators_config).{hint}"
    )


def _check_pair(config: ConfigFile, target: Target, draft: Draft) -> None:
    """Checks that widths and vocabulary of the draft match the target. Raises BadCheckpoint."""
    borrows = draft.heads.vocab is None
    layers_place = find_place((config, config.section("dflash_config")), "num_target_layers")
    for key, own, expected in (
        ("hidden_size", draft.decoder.hidden if borrows else None, target.decoder.hidden),
        ("target_hidden_size", draft.target_hidden, target.decoder.hidden),
        ("vocab_size", draft.decoder.vocab, target.decoder.vocab),
        (
            "num_target_layers",
            layers_place.optional("num_target_layers", int),
            target.decoder.layers,
        ),
    ):
        if own is not None and own != expected:
            raise _refuse_fact(
                config,
                key,
                own,
                f"the target has {expected}: this draft was trained for another one",
            )
    if draft.max_k < 1:
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
    key = "target_layer_ids"
    offset = 0
    if draft.dialect == "speculators":
        key = "aux_hidden_state_layer_ids"
        offset = 1
    if draft.dialect == "open-spec":
        offset = config.section("speculative_config").integer(START_KEY)
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
    sections = (config.section(name) for name in SECTIONS)
    place = next((section for section in sections if section.has(key)), config)
    return place.refusal(key, found, reason)
