"""What the two `config.json` say, checked and frozen. No default stands in for a fact of a model."""

import msgspec

from dflash_aot.cache.config_file import ConfigFile
from dflash_aot.cache.errors import BadCheckpoint


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary embedding: base and head width. Frequencies as in Su et al. 2021, base^(-2i/D)."""

    theta: float
    head_dim: int

    def inverse_frequencies(self) -> tuple[float, ...]:
        """D/2 angles per position, highest first."""
        return tuple(self.theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2))


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Heads of one attention layer; heads · head_dim need not equal the hidden width."""

    heads: int
    kv_heads: int
    head_dim: int


class Decoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What target and draft have in common: a stack of Qwen3-style layers."""

    layers: int
    hidden: int
    mlp: int
    attention: Attention
    rope: Rope
    epsilon: float
    vocab: int
    positions: int


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dense Qwen3 target."""

    decoder: Decoder
    tied: bool


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sliding layer sees positions q - size < k ≤ q, or |k - q| < size where it is not causal."""

    size: int
    causal: bool


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A z-lab DFlash draft.

    `taps` are target layer ids, 0-based; `block` is the trained width, anchor included; `windows` has one entry
    per layer, None for full attention.
    """

    decoder: Decoder
    block: int
    mask_token: int
    taps: tuple[int, ...]
    target_hidden: int
    windows: tuple[Window | None, ...]


TARGETS = ("Qwen3ForCausalLM",)
DRAFTS = ("DFlashDraftModel",)
RELATIVES = {
    "projector_type": "Domino",
    "markov_rank": "DSpark",
    "sample_from_anchor": "a draft that samples its anchor",
}


def read_target(config: ConfigFile) -> Target:
    """A target's `config.json`. Raises BadCheckpoint."""
    _check_architecture(config, TARGETS, "target")
    if config.optional("use_sliding_window", bool):
        raise config.refusal("use_sliding_window", True, "sliding-window targets are not supported")
    return Target(_read_decoder(config), tied=config.require("tie_word_embeddings", bool))


def read_draft(config: ConfigFile, target: Target) -> Draft:
    """A draft's `config.json`, checked against the target that it is to draft for. Raises BadCheckpoint."""
    _check_architecture(config, DRAFTS, "draft")
    _check_dialect(config)
    decoder, inner = _read_decoder(config), config.section("dflash_config")
    taps = inner.optional_integers("target_layer_ids")
    draft = Draft(
        decoder=decoder,
        block=_either(config, inner, "block_size"),
        mask_token=_either(inner, config, "mask_token_id"),
        taps=default_taps(target.decoder.layers, decoder.layers) if taps is None else taps,
        target_hidden=target.decoder.hidden,
        windows=_read_windows(config, inner, decoder.layers),
    )
    _check_pair(config, target, draft)
    return draft


def default_taps(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Where a draft that names no taps listens (z-lab/dflash `build_target_layer_ids`)."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(draft_layers))


def _check_architecture(config: ConfigFile, known: tuple[str, ...], role: str) -> None:
    found = config.require("architectures", list)
    if not any(name in known for name in found):
        hint = ""
        if role == "target" and any(name in DRAFTS for name in found):
            hint = " This is a draft: are --target and --draft the wrong way round?"
        if role == "draft" and any(name in TARGETS for name in found):
            hint = " This is a target: are --target and --draft the wrong way round?"
        raise BadCheckpoint(f"{config.path}: architectures is {found}; as a {role} this runs {', '.join(known)}.{hint}")


def _check_dialect(config: ConfigFile) -> None:
    """Relatives of DFlash that share its architecture's name but draft in another way."""
    for place in (config, config.section("dflash_config")):
        for key, relative in RELATIVES.items():
            if place.values.get(key):
                raise place.refusal(key, place.values[key], f"this is {relative}, which is not supported")


def _read_decoder(config: ConfigFile) -> Decoder:
    if config.optional("attention_bias", bool):
        raise config.refusal("attention_bias", True, "projections with a bias are not supported")
    if (activation := config.require("hidden_act", str)) != "silu":
        raise config.refusal("hidden_act", activation, "'silu' is what these layers compute")
    attention = Attention(
        heads=config.positive("num_attention_heads"),
        kv_heads=config.positive("num_key_value_heads"),
        head_dim=config.positive("head_dim"),
    )
    if attention.heads % attention.kv_heads:
        raise config.refusal("num_attention_heads", attention.heads, f"not a multiple of {attention.kv_heads} kv heads")
    if attention.head_dim % 2:
        raise config.refusal("head_dim", attention.head_dim, "rotation needs an even width")
    return Decoder(
        layers=config.positive("num_hidden_layers"),
        hidden=config.positive("hidden_size"),
        mlp=config.positive("intermediate_size"),
        attention=attention,
        rope=Rope(_read_theta(config), attention.head_dim),
        epsilon=config.positive_number("rms_norm_eps"),
        vocab=config.positive("vocab_size"),
        positions=config.positive("max_position_embeddings"),
    )


def _read_theta(config: ConfigFile) -> float:
    """`rope_parameters` (transformers 5) before `rope_theta` and `rope_scaling` (4)."""
    if config.has("rope_parameters"):
        rope = config.section("rope_parameters")
        if (kind := rope.optional("rope_type", str) or "default") != "default":
            raise rope.refusal("rope_type", kind, "scaled rotary embeddings are not supported")
        return rope.positive_number("rope_theta")
    if config.has("rope_scaling"):
        raise config.refusal(
            "rope_scaling", config.values["rope_scaling"], "scaled rotary embeddings are not supported"
        )
    return config.positive_number("rope_theta")


def _either(first: ConfigFile, second: ConfigFile, key: str) -> int:
    """A number that newer and older checkpoints keep in different places; in both, it must be the same."""
    found = {place.where(key): place.integer(key) for place in (first, second) if place.has(key)}
    if not found:
        raise BadCheckpoint(f"{first.path}: {key} stands neither at the top nor in dflash_config")
    if len(set(found.values())) > 1:
        raise BadCheckpoint(" but ".join(f"{where} is {value}" for where, value in found.items()))
    return next(iter(found.values()))


def _read_windows(config: ConfigFile, inner: ConfigFile, layers: int) -> tuple[Window | None, ...]:
    kinds = config.optional("layer_types", list)
    if kinds is None:
        return (None,) * layers
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise config.refusal("layer_types", kinds, f"expected {layers} of full_attention or sliding_attention")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    flags = [place.optional(key, bool) for place, key in ((config, "is_causal"), (inner, "causal"))]
    window = Window(config.positive("sliding_window"), causal=False not in flags)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _check_pair(config: ConfigFile, target: Target, draft: Draft) -> None:
    """The draft borrows the target's embedding, head and features: they must be the ones it was trained with."""
    for key, own, expected in (
        ("hidden_size", draft.decoder.hidden, target.decoder.hidden),
        ("vocab_size", draft.decoder.vocab, target.decoder.vocab),
        ("num_target_layers", config.optional("num_target_layers", int), target.decoder.layers),
    ):
        if own is not None and own != expected:
            raise config.refusal(key, own, f"the target has {expected}: this draft was trained for another one")
    if draft.block < 2:
        raise _refuse_fact(config, "block_size", draft.block, "a block is the anchor and at least one drafted token")
    if not 0 <= draft.mask_token < target.decoder.vocab:
        raise _refuse_fact(
            config, "mask_token_id", draft.mask_token, f"the target's vocabulary has {target.decoder.vocab} tokens"
        )
    for tap in draft.taps:
        if not 0 <= tap < target.decoder.layers:
            raise _refuse_fact(
                config, "target_layer_ids", list(draft.taps), f"the target has layers 0 to {target.decoder.layers - 1}"
            )
        if tap == target.decoder.layers - 1:
            raise _refuse_fact(
                config,
                "target_layer_ids",
                list(draft.taps),
                "a tap on the last layer is ambiguous: the reference reads it after the final norm, servers before it",
            )
    if not draft.taps or len(set(draft.taps)) < len(draft.taps):
        raise _refuse_fact(config, "target_layer_ids", list(draft.taps), "at least one tap, each once")


def _refuse_fact(config: ConfigFile, key: str, found: object, reason: str) -> BadCheckpoint:
    """A refusal that names the place where `key` stands: in dflash_config, or at the top."""
    inner = config.section("dflash_config")
    return (inner if inner.has(key) else config).refusal(key, found, reason)
