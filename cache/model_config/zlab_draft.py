"""The draft dialect of z-lab, DFlash's authors: `DFlashDraftModel` or `DFlash2DraftModel` with a `dflash_config`."""

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
from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.dflash2 import (
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
from dflash_aot.cache.model_config.draft_relatives import UNSUPPORTED_KEYS
from dflash_aot.cache.model_config.qwen3_config import QWEN3_DEFAULTS, read_sliding_layers

WINDOW_DEFAULTS = {key: QWEN3_DEFAULTS[key] for key in ("max_window_layers", "sliding_window")}
# Keys of DFlash2 drafts, which are read in `dflash_config`, otherwise at the top.
OWN_KEYS = ("block_size", "mask_token_id", "target_layer_ids", *CONVOLUTION_KEYS, *SELECTOR_KEYS, *SCALING_KEYS)


def read_zlab(config: ConfigFile, target: Target) -> Draft:
    """Reads a draft's facts. Its layers are Qwen3's, whatever `model_type` says. Raises BadCheckpoint."""
    inner = config.section("dflash_config")
    if second := is_dflash2(config):
        refuse_unknown_keys(inner, {*OWN_KEYS, *UNSUPPORTED_KEYS, "causal", "projector_type"})
        refuse_unknown_layer_keys(
            config,
            {*OWN_KEYS, *UNSUPPORTED_KEYS, "dflash_config", "is_causal", "num_target_layers", "projector_type"},
        )
    decoder = read_decoder(config, read_dense_mlp(config), normed=True, head_dim=config.positive("head_dim"))
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


def _read_windows(config: ConfigFile, inner: ConfigFile, layers: int, second: bool) -> tuple[SlidingWindow | None, ...]:
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
        raise config.refusal("use_sliding_window", windowed, "but layer_types has sliding_attention")
    place, key = (inner, "swa_window_size") if inner.has("swa_window_size") else (config, "sliding_window")
    window = SlidingWindow(place.positive(key), causal)
    return tuple(window if slides or everywhere else full for slides in sliding)
