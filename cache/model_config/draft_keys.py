"""Keys of draft configs, in all dialects: which are read, which change nothing, which name another kind of draft.

One policy for every object of a draft's config: a key is either read, or changes nothing, or is refused by its name. A
draft that is read as another model drafts badly, and nothing else shows it. The readers of keys that only some drafts
have, those of DFlash2 and DSpark and the scalars of newer drafts, are here too.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import (
    BlockConvolution,
    CandidateSelector,
    ConfidenceHead,
    MarkovHead,
    Scaling,
)
from dflash_aot.cache.model_config.config_file import ConfigFile, shorten_value
from dflash_aot.cache.model_config.rope import ORIGINAL_POSITIONS, PARTIAL, ROPE_KEYS

# -- architectures

DFLASH = "DFlashDraftModel"
DFLASH2 = "DFlash2DraftModel"
# Other names of DFlash2's class: vLLM's for drafts whose layers all slide, and SGLang's.
DFLASH2_NAMES = (DFLASH2, "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
# DeepSpec's class, and the name in SpecForge's and speculators' files.
DSPARK_NAMES = ("Qwen3DSparkModel", "DSparkDraftModel")
Method = Literal[
    "dflash", "dflash2", "dspark"
]  # the kind of draft as the speculators library names it
# Parts of the names of other architectures, and what these are, in the order in which they are looked for.
OTHER_ARCHITECTURES = {
    "dspark": "another form of DSpark",
    "xpress": "XPress",
    "domino": "Domino",
    "lilicorr": "LiLiCorr",
    "eagle": "EAGLE",
    "medusa": "Medusa",
    "mtp": "a head for multi-token prediction",
    "nextn": "a head for multi-token prediction",
    "museglimmerassistant": "the assistant of Muse-Glimmer in transformers' format",
    "assistant": "an assistant model in transformers' format",
    "museglimmer": "a model with Muse-Glimmer's layers",
    "laguna": "a model with Laguna's layers",
    "gemma": "a model with Gemma's layers",
    "glm": "a model with GLM's layers",
    "minimax": "a model with MiniMax's layers",
    "kimi": "a model with Kimi's layers",
    "deepseek": "a model with DeepSeek's layers",
    "gptoss": "a model with gpt-oss's layers",
    "dflash2": "another form of DFlash2",
    "dflash": "another form of DFlash",
}


def name_architecture(name: str) -> str | None:
    """What an unsupported draft architecture is, by its name; None if the name tells nothing."""
    letters = re.sub("[^a-z0-9]", "", name.lower())
    return next((kind for part, kind in OTHER_ARCHITECTURES.items() if part in letters), None)


def find_method(config: ConfigFile) -> Method:
    """The method that a config names: by its architecture, or as the speculators library does. Raises BadCheckpoint."""
    algorithm = config.section("speculators_config").optional("algorithm", str)
    kind = config.optional("speculators_model_type", str)
    names = config.optional("architectures", list) or ()
    if any(name in names for name in DFLASH2_NAMES) or "dflash2" in (algorithm, kind):
        return "dflash2"
    if any(name in names for name in DSPARK_NAMES) or "dspark" in (algorithm, kind):
        return "dspark"
    return "dflash"


# -- keys that change nothing, whatever their value

# Written by transformers and by trainers: dropout, special tokens, how the checkpoint was made, generation. Keys that
# begin with an underscore change nothing either.
NEUTRAL_KEYS = frozenset(
    """
    add_cross_attention architectures attention_backend attention_dropout attn_implementation auto_map bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    hidden_dropout id2label image_token_id initial_context_length initializer_range is_decoder is_encoder_decoder
    label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate router_aux_loss_coef sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unsloth_version use_bfloat16 use_cache video_token_id vision_end_token_id
    vision_start_token_id
    backbone_rotary_base ce_loss_alpha gamma_warmup gamma_warmup_step l1_loss_alpha loss_decay_gamma loss_type
    num_anchors num_target_layers prefix_weight_base selector_loss_alpha selector_ramp_ratio selector_stop_gradient
    selector_warmup_ratio speculators_version training_framework training_framework_version
    """.split()  # noqa: SIM905  a list would take a line for each
)

# -- keys that change nothing at one value, and name another model at every other value


# Keys that announce a table of the draft's own, and its tensor.
OWN_TABLES: Mapping[str, str] = {
    "has_own_embed_tokens": "embed_tokens.weight",
    "has_embed_tokens": "embed_tokens.weight",
    "has_own_lm_head": "lm_head.weight",
    "has_lm_head": "lm_head.weight",
}


class NoOp(NamedTuple):
    """A key of a part that drafts here don't have.

    Attributes:
        part: what a draft with another value is.
        values: the values that change nothing, in addition to null; None for all false values.
    """

    part: str
    values: tuple[Any, ...] | None = None


_DSPARK = NoOp("DSpark under the name of another draft")
_OTHER_DFLASH2 = NoOp("another form of DFlash2")
_SINKS = NoOp("DFlash with attention sinks")
_ANCHOR = NoOp("a draft that samples its anchor")
_EXPERTS = NoOp("a draft with a mixture of experts")
_LATENT = NoOp("a draft with latent attention (mla)")
_INTERLEAVED = NoOp("DFlash with interleaved RoPE", (True,))
_PLAIN_HEADS = NoOp("a draft without RMS norms of queries and keys", (True,))
NO_OPS: Mapping[str, NoOp] = {
    "attention_mode": NoOp("a draft with attention of another kind than 'gqa'", ("gqa", "mha")),
    "kv_lora_rank": _LATENT,
    "q_lora_rank": _LATENT,
    "qk_nope_head_dim": _LATENT,
    "qk_rope_head_dim": _LATENT,
    "markov_rank": _DSPARK,
    "markov_head_type": _DSPARK,
    "enable_confidence_head": _DSPARK,
    "use_confidence_head": _DSPARK,
    "confidence_head": _DSPARK,
    "confidence_head_alpha": _DSPARK,
    "confidence_head_with_markov": _DSPARK,
    "dspark_config": _DSPARK,
    "selector": _OTHER_DFLASH2,
    "selector_config": _OTHER_DFLASH2,
    "dflash2_dynamic_conv": _OTHER_DFLASH2,
    "dflash2_candidate_selector": _OTHER_DFLASH2,
    "dflash_context_residual": NoOp("DFlash with a context residual"),
    "dflash_block_position_embedding": NoOp("DFlash with position embeddings in the block"),
    "dflash_gated_layer_fusion": NoOp("DFlash with gated fusion of target layers"),
    "shift_label": NoOp("a draft whose rows predict the next token"),
    "sample_from_anchor": _ANCHOR,
    "attention_sink_bias": _SINKS,
    "add_swa_attention_sink_bias": _SINKS,
    "add_full_attention_sink_bias": _SINKS,
    "attention_value_scale": NoOp("DFlash with scaled values", (False, 0, 1)),
    "is_neox_style": _INTERLEAVED,
    "rope_is_neox_style": _INTERLEAVED,
    "rope_interleave": NoOp(_INTERLEAVED.part),
    "rope_interleaved": NoOp(_INTERLEAVED.part),
    "use_gemma_norm": NoOp("a draft whose norms multiply by 1 + weight"),
    "use_qk_norm": _PLAIN_HEADS,
    "qk_norm": _PLAIN_HEADS,
    "mlp_bias": NoOp("a draft with biases in its MLPs"),
    "attention_output_gate": NoOp("a draft with gated attention"),
    "attn_output_gate": NoOp("a draft with gated attention"),
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "moe_intermediate_size": _EXPERTS,
    **dict.fromkeys(OWN_TABLES, NoOp("a key of z-lab's format, at the top")),
    "mask_embedding": NoOp("a draft with its own mask embedding"),
}
# Keys that change nothing where another key of the same object has the same value.
EQUALS = {"v_head_dim": "head_dim", "rotary_dim": "head_dim", "draft_vocab_size": "vocab_size"}
# Names that other programs read instead of a key that is read here.
OTHER_NAMES = {
    "target_layers": "target_layer_ids",
    "layer_ids": "target_layer_ids",
    "dspark_target_layer_ids": "target_layer_ids",
    "eagle_aux_hidden_state_layer_ids": "target_layer_ids",
    "dspark_noise_token_id": "mask_token_id",
    "dspark_block_size": "block_size",
}
PROJECTORS = {"domino": "Domino", "dspark": _DSPARK.part, "lilicorr": "LiLiCorr"}

# -- keys that are read

CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
SELECTOR_KEYS = ("selector_rank", "selector_top_k")
DFLASH2_KEYS = (*CONVOLUTION_KEYS, *SELECTOR_KEYS)
ANCHOR_KEY = "sample_from_anchor"
CONFIDENCE_KEY = "enable_confidence_head"
CONFIDENCE_WIDTH_KEY = "confidence_head_with_markov"
CONFIDENCE_LOSS_KEY = "confidence_head_alpha"
DSPARK_KEYS = (
    "markov_rank",
    "markov_head_type",
    CONFIDENCE_KEY,
    CONFIDENCE_WIDTH_KEY,
    CONFIDENCE_LOSS_KEY,
    ANCHOR_KEY,
)
KEYS_OF_METHODS: Mapping[Method, tuple[str, ...]] = {
    "dflash": (),
    "dflash2": DFLASH2_KEYS,
    "dspark": DSPARK_KEYS,
}
SCALING_KEYS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# Axes of image positions: the positions of text are the same on all axes.
MROPE_KEYS = ("mrope_interleaved", "mrope_section")
# Keys of a decoder's layers, which all dialects have.
LAYER_KEYS = frozenset(
    {
        "attention_bias",
        "compression_config",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "use_sliding_window",
        "vocab_size",
        ORIGINAL_POSITIONS,
        PARTIAL,
    }
)
# Far beyond any published draft (16 candidates of rank 256): every candidate takes a step of the selection.
MAX_CANDIDATES = 128
MAX_RANK = 1 << 14


def check_keys(place: ConfigFile, read: Collection[str], method: Method = "dflash") -> None:
    """Checks every key of an object: it is in `read`, or changes nothing. Raises BadCheckpoint naming key and value."""
    keys = [key for key in sorted(place.values, key=str) if place.has(key) and key not in read]
    _check_projector(place, method)
    for key in keys:
        if key in NO_OPS and not _changes_nothing(place, key):
            raise place.refusal(
                key, place.values[key], f"this is {NO_OPS[key].part}, which is not supported"
            )
    for key in keys:
        if not (key.startswith("_") or key in NEUTRAL_KEYS or _changes_nothing(place, key)):
            raise place.refusal(key, place.values[key], _explain_unknown(key))


def check_layer_keys(
    layers: ConfigFile, read: Collection[str] = (), method: Method = "dflash"
) -> None:
    """As `check_keys`, for an object with the keys of a decoder's layers and those in `read`."""
    check_keys(layers, {*LAYER_KEYS, *read}, method)
    for section in ("rope_parameters", "rope_scaling"):
        check_keys(layers.section(section), {*ROPE_KEYS, *MROPE_KEYS})


def _check_projector(place: ConfigFile, method: Method) -> None:
    """`projector_type` names the kind of draft. Exporters write "dflash" for DFlash2 too."""
    value = place.values.get("projector_type")
    if not value or value == method or (value == "dflash" and method == "dflash2"):
        return
    if relative := PROJECTORS.get(value) if isinstance(value, str) else None:
        raise place.refusal("projector_type", value, f"this is {relative}, which is not supported")
    raise place.refusal("projector_type", value, f"expected {method}")


def _changes_nothing(place: ConfigFile, key: str) -> bool:
    value = place.values[key]
    if key in NO_OPS:
        values = NO_OPS[key].values
        return not value if values is None else value in values
    if key in EQUALS:
        return value == place.values.get(EQUALS[key])
    return key == "projector_type"  # which is checked on its own


def _explain_unknown(key: str) -> str:
    if key in DFLASH2_KEYS:
        return f"a key of DFlash2, but architectures does not name {DFLASH2}"
    if key in OTHER_NAMES:
        return f"not read under this name, but as {OTHER_NAMES[key]} (in dflash_config)"
    if key in EQUALS:
        return f"expected the value of {EQUALS[key]}"
    return "unknown in a draft's config, where it may change the computation"


# -- readers of keys that only some drafts have


def find_place(places: Sequence[ConfigFile], key: str) -> ConfigFile:
    """Returns the first of `places` that has a key, otherwise the first.

    Raises BadCheckpoint if two places have different values.
    """
    found = [place for place in places if place.has(key)]
    if any(place.values[key] != found[0].values[key] for place in found[1:]):
        raise BadCheckpoint(
            " but ".join(
                f"{place.where(key)} is {shorten_value(place.values[key])}" for place in found
            )
        )
    return found[0] if found else places[0]


def read_convolution(
    places: Sequence[ConfigFile],
    hidden: int,
    block: int,
    kernel: int | None = None,
    group: int | None = None,
) -> BlockConvolution:
    """Reads the convolution. `kernel` and `group` are the dialect's defaults. Raises BadCheckpoint."""
    kernel_place, group_place = (find_place(places, key) for key in CONVOLUTION_KEYS)
    kernel = kernel_place.positive("conv_kernel_size", default=kernel)
    if kernel > block:
        raise kernel_place.refusal(
            "conv_kernel_size", kernel, f"longer than the block of {block} tokens"
        )
    group = group_place.positive("conv_group_size", default=group)
    if hidden % group:
        raise group_place.refusal(
            "conv_group_size", group, f"does not divide the hidden width of {hidden}"
        )
    return BlockConvolution(kernel, group)


def read_selector(
    places: Sequence[ConfigFile], vocab: int, rank: int | None = None, candidates: int | None = None
) -> CandidateSelector:
    """Reads the selector. `rank` and `candidates` are the dialect's defaults. Raises BadCheckpoint."""
    rank_place, candidates_place = (find_place(places, key) for key in SELECTOR_KEYS)
    rank = rank_place.positive("selector_rank", most=MAX_RANK, default=rank)
    candidates = candidates_place.positive("selector_top_k", default=candidates)
    if candidates > vocab:
        raise candidates_place.refusal(
            "selector_top_k", candidates, f"the vocabulary has {vocab} tokens"
        )
    if candidates > MAX_CANDIDATES:
        raise candidates_place.refusal(
            "selector_top_k", candidates, f"at most {MAX_CANDIDATES} are supported"
        )
    return CandidateSelector(rank, candidates)


def read_scaling(places: Sequence[ConfigFile]) -> Scaling:
    """Reads the scalars around the layers; a cap of 0 or below is none. Raises BadCheckpoint."""
    embedding, logits = (_read_factor(find_place(places, key), key) for key in SCALING_KEYS[:2])
    place = find_place(places, SCALING_KEYS[2])
    key = SCALING_KEYS[2]
    cap = _read_number(place, key) if place.has(key) else 0.0
    return Scaling(embedding, logits, cap if cap > 0 else None)


def _read_factor(place: ConfigFile, key: str) -> float:
    return place.number_within(key, 1e-9, 1e9) if place.has(key) else 1.0


def _read_number(place: ConfigFile, key: str) -> float:
    value = place.values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9:
        raise place.refusal(key, value, "expected a number")
    if 0 < value < 1e-9 or math.isnan(value):
        raise place.refusal(key, value, "expected a number of at least 1e-09, or 0 for no bound")
    return float(value)


def read_markov_head(
    places: Sequence[ConfigFile], vocab: int, rank: int | None = None, kind: str | None = None
) -> MarkovHead | None:
    """Reads the Markov head of a DSpark draft, None where its rank is 0: then the draft has no such head.

    `rank` and `kind` are the dialect's defaults. Raises BadCheckpoint.
    """
    place = find_place(places, "markov_rank")
    rank = place.integer("markov_rank") if place.has("markov_rank") or rank is None else rank
    if not 0 <= rank <= MAX_RANK:
        raise place.refusal("markov_rank", rank, f"expected 0 to {MAX_RANK}")
    if rank > vocab:
        raise place.refusal("markov_rank", rank, f"the vocabulary has {vocab} tokens")
    kind_place = find_place(places, "markov_head_type")
    found = kind_place.optional("markov_head_type", str) or kind
    if rank and found is None:
        raise kind_place.refusal("markov_head_type", None, "expected 'vanilla'")
    if found not in (None, "vanilla"):
        raise kind_place.refusal(
            "markov_head_type", found, "this is another Markov head; only 'vanilla' is supported"
        )
    return MarkovHead(rank) if rank else None


def read_confidence_head(
    places: Sequence[ConfigFile],
    tensors: Collection[str],
    hidden: int,
    markov: MarkovHead | None,
    default: bool,
) -> ConfidenceHead | None:
    """Reads the confidence head of a DSpark draft, None if there is none.

    Without its keys the tensors tell whether there is one, or `default` where the checkpoint has no tensors yet.
    `default` also tells whether the head reads the code of the token before. Raises BadCheckpoint.
    """
    place = find_place(places, CONFIDENCE_KEY)
    loss = find_place(places, CONFIDENCE_LOSS_KEY)
    announced = place.optional(CONFIDENCE_KEY, bool)
    stored = any(name.startswith("confidence_head.") for name in tensors)
    if announced is not None and tensors and announced != stored:
        found = "confidence_head.* is" if stored else "no confidence_head.* is"
        raise place.refusal(CONFIDENCE_KEY, announced, f"but {found} among the tensors")
    if announced is None:
        trained = bool(loss.has(CONFIDENCE_LOSS_KEY) and loss.values[CONFIDENCE_LOSS_KEY])
        announced = stored if tensors else default or trained
    if not announced:
        return None
    width_place = find_place(places, CONFIDENCE_WIDTH_KEY)
    with_code = width_place.optional(CONFIDENCE_WIDTH_KEY, bool)
    if with_code and markov is None:
        raise width_place.refusal(CONFIDENCE_WIDTH_KEY, True, "but markov_rank is 0")
    with_code = default if with_code is None else with_code
    return ConfidenceHead(hidden + (markov.rank if with_code and markov else 0))


def read_own_vocab(config: ConfigFile, tensors: Collection[str], vocab: int) -> int | None:
    """The vocabulary of a draft that stores an embedding or a head of its own; None if it uses the target's.

    Where only one of them is stored, the target's tensor is the other one. Raises BadCheckpoint if a key announces a
    tensor that is not there.
    """
    announced = [key for key in OWN_TABLES if config.optional(key, bool)]
    for key in announced:
        if tensors and OWN_TABLES[key] not in tensors:
            raise config.refusal(key, True, f"but no {OWN_TABLES[key]} is among the tensors")
    return vocab if announced or any(name in tensors for name in OWN_TABLES.values()) else None
