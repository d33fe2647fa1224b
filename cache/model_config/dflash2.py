"""What a config says of DFlash2's parts, in either dialect, and of the scalars that newer DFlash drafts have too.

Every key of a DFlash2 config is either read, or listed here as one that changes nothing, or refused by its name.
"""

import math
from collections.abc import Collection, Sequence

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import (
    BlockConvolution,
    CandidateSelector,
    DraftScaling,
)
from dflash_aot.cache.model_config.config_file import ConfigFile, shorten_value
from dflash_aot.cache.model_config.rope import ROPE_KEYS

ARCHITECTURE = "DFlash2DraftModel"
CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
SELECTOR_KEYS = ("selector_rank", "selector_top_k")
# Axes of image positions: the positions of text are the same on all axes.
MROPE_KEYS = ("mrope_interleaved", "mrope_section")
SCALING_KEYS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# Far beyond any published draft (16 candidates of rank 256): every candidate takes a step of the selection.
MAX_CANDIDATES = 128
MAX_RANK = 1 << 14
# Keys of transformers that change nothing here. Those that begin with an underscore don't either.
NEUTRAL_KEYS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Keys of a decoder's layers, which both dialects have.
LAYER_KEYS = frozenset(
    {
        "attention_bias",
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
    }
)


def is_dflash2(config: ConfigFile) -> bool:
    """Whether a config names DFlash2: by its architecture, or as the speculators library does. Raises BadCheckpoint."""
    algorithm = config.section("speculators_config").optional("algorithm", str)
    kind = config.optional("speculators_model_type", str)
    return ARCHITECTURE in (config.optional("architectures", list) or ()) or "dflash2" in (
        algorithm,
        kind,
    )


def refuse_unknown_keys(place: ConfigFile, known: Collection[str]) -> None:
    """Raises BadCheckpoint for a key that is neither in `known` nor in NEUTRAL_KEYS: it may change the computation."""
    for key in sorted(set(place.values) - NEUTRAL_KEYS - set(known)):
        if place.has(key) and not key.startswith("_"):
            raise place.refusal(
                key, place.values[key], "unknown in a DFlash2 config; it may change the computation"
            )


def refuse_unknown_layer_keys(layers: ConfigFile, known: Collection[str] = ()) -> None:
    """As `refuse_unknown_keys`, for an object with the keys of a decoder's layers and those in `known`."""
    refuse_unknown_keys(layers, {*LAYER_KEYS, *known})
    for section in ("rope_parameters", "rope_scaling"):
        refuse_unknown_keys(layers.section(section), {*ROPE_KEYS, *MROPE_KEYS})


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


def read_scaling(places: Sequence[ConfigFile]) -> DraftScaling:
    """Reads the scalars around the layers; a cap of 0 or below is none. Raises BadCheckpoint."""
    embedding, logits = (_read_factor(find_place(places, key), key) for key in SCALING_KEYS[:2])
    place = find_place(places, SCALING_KEYS[2])
    key = SCALING_KEYS[2]
    cap = _read_number(place, key) if place.has(key) else 0.0
    return DraftScaling(embedding, logits, cap if cap > 0 else None)


def _read_factor(place: ConfigFile, key: str) -> float:
    return place.number_within(key, 1e-9, 1e9) if place.has(key) else 1.0


def _read_number(place: ConfigFile, key: str) -> float:
    value = place.values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9:
        raise place.refusal(key, value, "expected a number")
    if 0 < value < 1e-9 or math.isnan(value):
        raise place.refusal(key, value, "expected a number of at least 1e-09, or 0 for no bound")
    return float(value)
