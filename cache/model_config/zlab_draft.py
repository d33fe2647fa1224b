"""The draft dialect of z-lab, DFlash's authors: `DFlashDraftModel` with a `dflash_config`."""

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import (
    Draft,
    SlidingWindow,
    Target,
    default_target_layer_ids,
    read_decoder,
    read_dense_mlp,
)
from dflash_aot.cache.model_config.config_file import ConfigFile


def read_zlab(config: ConfigFile, target: Target) -> Draft:
    """Reads a draft's facts. Its layers are Qwen3's, whatever `model_type` says. Raises BadCheckpoint."""
    decoder = read_decoder(config, read_dense_mlp(config), normed=True, head_dim=config.positive("head_dim"))
    inner = config.section("dflash_config")
    layer_ids = inner.optional_integers("target_layer_ids")
    return Draft(
        decoder=decoder,
        block=_either(config, inner, "block_size"),
        mask_token=_either(inner, config, "mask_token_id"),
        target_layer_ids=default_target_layer_ids(target.decoder.layers, decoder.layers)
        if layer_ids is None
        else layer_ids,
        target_hidden=target.decoder.hidden,
        windows=_read_windows(config, inner, decoder.layers),
    )


def _either(first: ConfigFile, second: ConfigFile, key: str) -> int:
    """Reads a number that newer and older checkpoints keep in different places; if in both, the numbers must agree."""
    found = {place.where(key): place.integer(key) for place in (first, second) if place.has(key)}
    if not found:
        raise BadCheckpoint(f"{first.path}: {key} is missing, both at the top and in dflash_config")
    if len(set(found.values())) > 1:
        raise BadCheckpoint(" but ".join(f"{where} is {value}" for where, value in found.items()))
    return next(iter(found.values()))


def _read_windows(config: ConfigFile, inner: ConfigFile, layers: int) -> tuple[SlidingWindow | None, ...]:
    """Returns the window of each layer. A sliding layer is causal inside the block unless one of two keys is false."""
    sliding = read_layer_types(config, layers)
    if not any(sliding):
        return (None,) * layers
    flags = [place.optional(key, bool) for place, key in ((config, "is_causal"), (inner, "causal"))]
    window = SlidingWindow(config.positive("sliding_window"), causal=False not in flags)
    return tuple(window if slides else None for slides in sliding)


def read_layer_types(config: ConfigFile, layers: int) -> list[bool]:
    """Returns whether each layer has a sliding window; no layer has one if the key is absent."""
    kinds = config.optional("layer_types", list)
    if kinds is None:
        return [False] * layers
    if len(kinds) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise config.refusal("layer_types", kinds, f"expected {layers} items, full_attention or sliding_attention")
    return [kind == "sliding_attention" for kind in kinds]
