"""The kv_write program: the draft's context keys and values from the target's features."""

import jax.numpy as jnp

from dflash_aot.cache.signature import KV_WRITE, Signature
from dflash_aot.cache.weight_recipe import ITEM_BYTES
from dflash_aot.compile.models.kv_cache import make_rows, put_rows, write_kv
from dflash_aot.compile.programs.costs import PairCosts, RooflineCost
from dflash_aot.compile.programs.program import (
    Arrays,
    MeasuredBuild,
    ModeFigures,
    Outputs,
    PairModels,
    ProgramBody,
)

COLLECTIVES = 1  # a sum, after `fc`


def write_context(models: PairModels, arrays: Arrays) -> Outputs:
    """Writes the draft's context keys and values for all features.

    Keys and values of rejected tokens are written too, after the length, where the next round overwrites them.
    """
    draft = models.bind_draft(arrays)
    features = arrays["features"]
    tables = arrays["pages"]
    starts = arrays["starts"]
    positions = starts[:, None] + jnp.arange(features.shape[1])

    kv = (arrays["draft_k"], arrays["draft_v"])
    rows = draft.write_context(features, positions, put_rows, make_rows(kv, *positions.shape))
    keys, values = write_kv(kv, rows, tables, starts)
    return {"draft_k": keys, "draft_v": values}


def _kv_write(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    return write_context(models, arrays)


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


def _cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    return count_kv_write_cost(costs, *signature.bucket.values())


def _count_tokens(signature: Signature, block: int) -> int:
    return signature.bucket["rows"] * signature.bucket["width"]


def _count_collectives(models: PairModels, signature: Signature) -> int:
    return COLLECTIVES


BODY = ProgramBody(
    program=KV_WRITE,
    function=_kv_write,
    cost=_cost,
    count_tokens=_count_tokens,
    count_collectives=_count_collectives,
    figures={
        None: ModeFigures(
            # measured for 1 and 128 tokens: 0.2 and 1.3 MB, without global memory
            code_bytes=(300_000, 8_000),
            tpu=MeasuredBuild(2.0, 110e3, 0.01, 1e3),
            cpu=MeasuredBuild(0.9, 30e3, 0.25, 2e3),
            rated=True,
        )
    },
    layers_of="draft",
)
