"""The draft's programs: the draft over a block of each row, and the write of its context keys and values."""

import math
from functools import partial

import jax.numpy as jnp

from dflash_aot.cache.arrays import CHOOSING_STATE, PairShapes
from dflash_aot.cache.signature import DRAFT, KV_WRITE, Signature
from dflash_aot.cache.weight_recipe import ITEM_BYTES
from dflash_aot.compile.kernels.kernel_device import LANES
from dflash_aot.compile.models.kv_cache import make_rows, put_rows, write_kv
from dflash_aot.compile.models.matmul import MIN_TILE
from dflash_aot.compile.programs.costs import PairCosts, RooflineCost, sum_costs
from dflash_aot.compile.programs.program import (
    Arrays,
    MeasuredBuild,
    ModeFigures,
    Outputs,
    PairModels,
    ProgramBody,
)
from dflash_aot.compile.programs.sampling import PENALTY_EXCHANGES, draw_draft_scores

# Collectives of a Markov head in addition to its candidates: codes of the guess, then codes and tokens of a pass.
PATH_EXCHANGES = 3
KV_WRITE_COLLECTIVES = 1  # a sum, after `fc`


def draft(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Drafts K tokens per row, with one pass over the block of the trained width, whatever K is.

    Row 0 of the block is the anchor. The drafted tokens follow its position: the likeliest ones, or if `sampled` the
    ones drawn with the noise of the verification.
    """
    facts = models.facts
    batch = signature.bucket["batch"]
    k = signature.bucket["k"]
    target = models.bind_target(arrays)
    draft = models.bind_draft(arrays)
    lengths = arrays["lengths"][:batch]
    anchors = arrays["anchors"][:batch]
    masks = jnp.full((batch, facts.block - 1), facts.mask_token, jnp.int32)
    ids = jnp.concatenate([anchors[:, None], masks], axis=1)
    positions = lengths[:, None] + jnp.arange(facts.block)

    kv = (arrays["draft_k"], arrays["draft_v"])
    tables = arrays["pages"]
    attend = models.attend_block(kv, tables, lengths, signature.bucket["length"])
    hidden = draft.block_hidden(draft.embed(ids, target), positions, attend)
    adjust = None
    adjusts = None
    if "sampled" in arrays:
        state = {name: arrays[name] for name in ("counts", *CHOOSING_STATE)}
        adjust = partial(
            draw_draft_scores,
            positions=positions[:, :k] + 1
            if facts.heads.predicts_next
            else positions[:, 1 : k + 1],
            sampled=arrays["sampled"],
            penalised=arrays["penalised"],
            state=state,
            tp=models.tp,
        )
        if facts.heads.markov:
            adjusts = (arrays["sampled"] | arrays["penalised"])[0]
    drafted = draft.propose(hidden, anchors, target, k, adjust, adjusts)
    return {"block": jnp.concatenate([anchors[:, None], drafted], axis=1)}


def count_draft_cost(costs: PairCosts, B: int, S: int, K: int) -> RooflineCost:
    """The draft over the whole block of each row, with the logits of K tokens, and the parts of DFlash2 and DSpark."""
    facts = costs.draft
    decoder = facts.decoder
    T = facts.block
    vocab = facts.heads.vocab or costs.target.decoder.vocab
    head = costs.formats.draft if facts.pruned else costs.formats.target
    parts = (
        costs.embed(decoder, B * T),
        costs.layers(decoder.hidden, facts.kinds, costs.formats.draft, B * T),
        costs.attend(facts.kinds, B, T, S, S + T),
        costs.head(decoder, vocab, head, B * K),
        costs.convolve(B * T),
        costs.select(B, K),
        costs.follow(B, K),
    )
    return sum_costs(parts)


def _cost_draft(costs: PairCosts, signature: Signature) -> RooflineCost:
    return count_draft_cost(costs, *signature.bucket.values())


def _count_draft_tokens(signature: Signature, block: int) -> int:
    """The whole block for any K."""
    return signature.bucket["batch"] * block


def _estimate_temporaries(signature: Signature, pair: PairShapes, devices: int) -> int:
    """Bytes of the float32 logits of drafted positions, over a device's tokens of the vocabulary.

    A walk through all tokens has them with and without a bias, and as tiles. A search for candidates (of a selector, or
    to draw among) reads them as tiles, and a tile narrower than a register's lanes is padded to them: on v5e:2x2, with
    tiles of 32 of Qwen3's tokens, a draft takes four times as much.
    """
    vocab = pair.vocab // devices
    draws = any(array.name == "sampled" for array in signature.arguments)
    selects = any("candidate_selector" in name for name in signature.weights)
    walks = any("markov_head" in name for name in signature.weights)
    tile = max(MIN_TILE, math.gcd(vocab, LANES)) if draws or selects or walks else LANES
    arrays = 3 if walks else 1
    return arrays * 4 * signature.bucket["batch"] * signature.bucket["k"] * vocab * LANES // tile


def count_draft_collectives(models: PairModels, draws: bool) -> int:
    """Layers, a selector's codes or the walk of a Markov head, and the penalties of a draft that draws."""
    layers = models.draft.module.count_written_layers()
    selection = 1 if models.facts.heads.selector else 0
    if models.facts.heads.markov:
        selection = PATH_EXCHANGES
    drawing = PENALTY_EXCHANGES if draws else 0
    return models.count_forward_collectives(layers) + selection + drawing


def _count_collectives(models: PairModels, signature: Signature) -> int:
    return count_draft_collectives(models, models.shapes.samples)


DRAFT_BODY = ProgramBody(
    program=DRAFT,
    function=draft,
    cost=_cost_draft,
    count_tokens=_count_draft_tokens,
    estimate_temporaries=_estimate_temporaries,
    count_collectives=_count_collectives,
    figures={
        None: ModeFigures(
            # measured for 64 and 128 tokens: 3.1 and 4.4 MB, without global memory
            code_bytes=(1_500_000, 23_000),
            tpu=MeasuredBuild(9.0, 1000e3, 0.06, 3.4e3),
            cpu=MeasuredBuild(4.0, 100e3, 0.5, 5e3),
            rated=True,
        )
    },
    layers_of="draft",
)


# -- the write of its kv


def write_context(models: PairModels, arrays: Arrays, at_once: bool = False) -> Outputs:
    """Writes the draft's context keys and values for all features, `at_once` for all layers.

    Keys and values of rejected tokens are written too, after the length, where the next round overwrites them.
    """
    draft = models.bind_draft(arrays)
    features = arrays["features"]
    tables = arrays["pages"]
    starts = arrays["starts"]
    positions = starts[:, None] + jnp.arange(features.shape[1])

    kv = (arrays["draft_k"], arrays["draft_v"])
    rows = draft.project_context(features, positions) if at_once else None
    if rows is None:
        rows = draft.write_context(features, positions, put_rows, make_rows(kv, *positions.shape))
    keys, values = write_kv(kv, rows, tables, starts)
    return {"draft_k": keys, "draft_v": values}


def _kv_write(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    return write_context(models, arrays, at_once=models.tp.backend.shares_products)


def count_kv_write_cost(costs: PairCosts, rows: int, width: int) -> RooflineCost:
    """Features through `fc`, summed in float32, then keys and values of each layer, which are written."""
    decoder = costs.draft.decoder
    tokens = rows * width
    features = len(costs.draft.target_layer_ids) * costs.draft.target_hidden
    weights = decoder.hidden * (features + costs.count_kv(costs.draft.kinds))
    products = costs.multiply(weights, costs.formats.draft, 2 * tokens * weights)
    read = costs.share(tokens * features, 0)
    summed = costs.sum(tokens * decoder.hidden * ITEM_BYTES["float32"])
    return products + read + costs.write(costs.draft.kinds, tokens) + summed


def _cost_kv_write(costs: PairCosts, signature: Signature) -> RooflineCost:
    return count_kv_write_cost(costs, *signature.bucket.values())


def _count_written_tokens(signature: Signature, block: int) -> int:
    return signature.bucket["rows"] * signature.bucket["width"]


KV_WRITE_BODY = ProgramBody(
    program=KV_WRITE,
    function=_kv_write,
    cost=_cost_kv_write,
    count_tokens=_count_written_tokens,
    count_collectives=lambda *_: KV_WRITE_COLLECTIVES,
    figures={
        None: ModeFigures(
            # measured for 1 and 128 tokens: 0.2 and 1.3 MB, without global memory
            code_bytes=(300_000, 8_000),
            tpu=MeasuredBuild(2.0, 130e3, 0.01, 2.2e3),
            cpu=MeasuredBuild(0.9, 30e3, 0.25, 2e3),
            rated=True,
        )
    },
    layers_of="draft",
)
