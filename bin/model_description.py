"""What was read from a model's config, as one line of text for plans and inspections. JAX is not imported."""

from dflash_aot.cache.model_config.architecture import Decoder, Draft, DraftScaling, Target


def describe_target(target: Target) -> str:
    """The sizes of a target, and its recurrent layers if it has some."""
    if target.recurrent is None:
        return describe_decoder(target.decoder)
    heads = f"{target.recurrent.value_heads} heads"
    return f"{describe_decoder(target.decoder)}; Gated DeltaNet in {len(target.recurrent.layers)} layers, {heads}"


def describe_decoder(decoder: Decoder) -> str:
    """The sizes of a model's layers."""
    heads = f"{decoder.attention.heads} heads, {decoder.attention.kv_heads} kv heads"
    return f"{_count_layers(decoder)}, hidden size {decoder.hidden}, {heads}, vocabulary {decoder.vocab}"


def describe_draft(draft: Draft) -> str:
    """Generation, format and facts of a draft, besides the sizes of its layers."""
    parts = [
        _count_layers(draft.decoder) + _describe_windows(draft),
        f"blocks of {draft.block}",
        f"target_layer_ids {', '.join(map(str, draft.target_layer_ids))}",
    ]
    if draft.vocab is not None:
        parts.append(f"its own head over {draft.vocab} of {draft.decoder.vocab} tokens")
    if draft.convolution:
        parts.append(f"convolutions over {draft.convolution.kernel} rows in groups of {draft.convolution.group}")
    if draft.selector:
        parts.append(f"a path through {draft.selector.candidates} candidates of rank {draft.selector.rank}")
    parts += _list_scaling(draft.scaling)
    return f"{draft.generation} draft in {draft.dialect} format: {', '.join(parts)}"


def _count_layers(decoder: Decoder) -> str:
    return f"{decoder.layers} layer{'s' * (decoder.layers > 1)}"


def _describe_windows(draft: Draft) -> str:
    """How many layers have a sliding window, and in how many no row of the block sees a later one; "" if neither."""
    windows = [window for window in draft.windows if window is not None]
    if not windows:
        return ""
    sliding = [window.size for window in windows if window.slides]
    sizes = ", ".join(map(str, sorted(set(sliding))))
    parts = [f"{len(sliding)} of them with a sliding window of {sizes}"] if sliding else []
    causal = sum(window.causal for window in windows) or "none"
    return f" ({', '.join([*parts, f'{causal} of them causal inside the block'])})"


def _list_scaling(scaling: DraftScaling) -> list[str]:
    """The scalars around the layers that change anything."""
    parts = [f"embedding times {scaling.embedding:g}"] if scaling.embedding != 1 else []
    parts += [f"logits times {scaling.logits:g}"] if scaling.logits != 1 else []
    return parts + ([f"logits capped at {scaling.cap:g}"] if scaling.cap else [])
