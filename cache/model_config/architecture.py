"""What target and draft are: the facts that executables depend on, frozen, and no more than those.

`target_config` and `draft_config` read them from the published files.
"""

from typing import Literal

import msgspec

from dflash_aot.cache.model_config.rope import Rope


class AttentionShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Heads of one attention layer; heads · head_dim need not equal the hidden width.

    normed: queries and keys pass an RMS norm per head. biased: all four projections have a bias.
    """

    heads: int
    kv_heads: int
    head_dim: int
    normed: bool = True
    biased: bool = False


class DenseMlp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="dense"):
    """One gated MLP."""

    width: int


class MixtureOfExperts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="experts"):
    """`count` gated MLPs, of which a router takes `chosen` for each token.

    normalized: the weights of the chosen ones are made to sum to one.
    """

    count: int
    chosen: int
    width: int
    normalized: bool


class Decoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What target and draft have in common: a stack of pre-norm layers of attention and MLP."""

    layers: int
    hidden: int
    mlp: DenseMlp | MixtureOfExperts
    attention: AttentionShape
    rope: Rope
    epsilon: float
    vocab: int
    positions: int


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A target; `tied`: its head is its embedding."""

    decoder: Decoder
    tied: bool


class SlidingWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the rows q of a block that starts at n see in a sliding layer; four readings are in use.

    Of the context: q - size < k, or for all rows alike n - size ≤ k where it is `anchored` (speculators).
    Of the block: k ≤ q where it is `causal`; else |k - q| < size, or all of it where it is `anchored`.
    """

    size: int
    causal: bool
    anchored: bool = False


Dialect = Literal["z-lab", "speculators"]


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A DFlash draft.

    `taps` are target layer ids, 0-based; `block` is the trained width, anchor included; `windows` has one entry
    per layer, None for full attention. `vocab` is what a draft with a head of its own chooses from (it has an
    embedding of its own too), None for one that borrows the target's. `k` is how many tokens its makers verify.
    """

    decoder: Decoder
    block: int
    mask_token: int
    target_layer_ids: tuple[int, ...] = msgspec.field(name="taps")
    target_hidden: int
    windows: tuple[SlidingWindow | None, ...]
    dialect: Dialect = "z-lab"
    vocab: int | None = None
    k: int | None = None

    @property
    def pruned(self) -> bool:
        """Its head knows only some of the target's tokens, and maps them (`d2t`)."""
        return self.vocab is not None and self.vocab != self.decoder.vocab

    @property
    def default_k(self) -> int:
        """K where nobody says otherwise: 1 … block - 1."""
        return self.k or self.block - 1


def default_target_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Where a draft that names no taps listens (z-lab/dflash `build_target_layer_ids`)."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(draft_layers))
