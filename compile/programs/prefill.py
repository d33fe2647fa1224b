"""The prefill programs: the target over a chunk of one slot's prompt, or over short chunks of several."""

from typing import Any

import jax
import jax.numpy as jnp

from dflash_aot.cache.arrays import RECURRENT_STATE, PairShapes
from dflash_aot.cache.sampling_state import count_top_logprobs
from dflash_aot.cache.signature import PACKED_PREFILL, PREFILL, Signature
from dflash_aot.cache.weight_recipe import ITEM_BYTES
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.gated_delta_net import MixerCall
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.recurrent_state import RecurrentState, prefill_layer
from dflash_aot.compile.programs.costs import PairCosts, RooflineCost
from dflash_aot.compile.programs.program import (
    Arrays,
    Blocks,
    MeasuredBuild,
    ModeFigures,
    Outputs,
    PairModels,
    ProgramBody,
    TargetCarry,
)
from dflash_aot.compile.programs.sampling import SCORED_ROWS, SCORING_EXCHANGES, score_tokens


def prefill(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Runs the target over one chunk of one slot's prompt, and with `gives_first` picks the token after it.

    Positions from `counts` on are padding: they are written after the new length, where nothing reads them. With
    `next_tokens`, the scored prefill, it also returns their log-probabilities and the likeliest tokens.
    """
    target = models.bind_target(arrays)
    slots, starts, counts = (arrays[name] for name in ("slots", "starts", "counts"))
    chunk = Blocks(arrays["tokens"], starts, arrays["pages"], slots, counts)
    before = (
        RecurrentState(*(arrays[name] for name in RECURRENT_STATE))
        if models.shapes.recurrent
        else None
    )

    def recur(
        carry: TargetCarry[Any], layer: LayerIndex, call: MixerCall
    ) -> tuple[jax.Array, TargetCarry[Any]]:
        rows, recurrent = carry
        mixed, recurrent = prefill_layer(recurrent, layer, call, slots[0], starts[0], counts[0])
        return mixed, (rows, recurrent)

    x, features, kv, recurrent = models.run_target(
        arrays, target, (chunk,), signature.bucket["length"], before, recur
    )
    scores: Outputs = {}
    end = counts
    if (wanted := arrays.get("next_tokens")) is not None:
        logprobs, tokens_found, tops = score_tokens(
            x, wanted, target.logits, count_top_logprobs(models.shapes.vocab), models.tp
        )
        scores = {"logprobs": logprobs, "top_tokens": tokens_found, "top_logprobs": tops}
        end = models.tp.order_after(counts, logprobs[:, 0])
    last = jax.lax.dynamic_slice_in_dim(x, end[0] - 1, 1, axis=1)
    first, anchors = choose_first_token(models, target, last, arrays)
    return {
        **(dict(zip(RECURRENT_STATE, recurrent, strict=True)) if recurrent else {}),
        **kv,
        "lengths": jax.lax.dynamic_update_slice(arrays["lengths"], starts + counts, slots),
        "anchors": anchors,
        "features": features,
        "first": first,
        **scores,
    }


def choose_first_token(
    models: PairModels, target: CausalLM, last: jax.Array, arrays: Arrays
) -> tuple[jax.Array, jax.Array]:
    """With `gives_first` the token after hidden states `last` [1, 1, H] of a prompt, int32 [1], which is the anchor.

    Returns the token, else 0, and the anchors of all slots.
    """

    def choose_token() -> tuple[jax.Array, jax.Array]:
        first = models.tp.argmax(target.logits(last))[:, 0]
        return first, jax.lax.dynamic_update_slice(arrays["anchors"], first, arrays["slots"])

    def keep_anchor() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((1,), jnp.int32), arrays["anchors"]

    # Only the last chunk of a prompt gives a token: the others do without the product with the vocabulary.
    return jax.lax.cond(arrays["gives_first"][0], choose_token, keep_anchor)


def packed_prefill(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Runs the target over a chunk of each of several prompts, and with `gives_first` picks the token after it.

    A row with count 0 has no prompt: what it computes is written to page 0, and no slot changes.
    """
    target = models.bind_target(arrays)
    slots, starts, counts = (arrays[name] for name in ("slots", "starts", "counts"))
    gives_first = arrays["gives_first"] & (counts > 0)
    chunks = Blocks(arrays["tokens"], starts, arrays["pages"], slots, counts)
    x, features, kv, _ = models.run_target(
        arrays, target, (chunks,), signature.bucket["length"], None, None
    )

    def choose_tokens() -> jax.Array:
        last = jax.vmap(_take_last)(x, counts)
        return models.tp.argmax(target.logits(last))[:, 0]

    first = jax.lax.cond(jnp.any(gives_first), choose_tokens, lambda: jnp.zeros_like(counts))
    first = jnp.where(gives_first, first, 0)
    return {
        **kv,
        "lengths": _set_slots(arrays["lengths"], slots, starts + counts, counts > 0),
        "anchors": _set_slots(arrays["anchors"], slots, first, gives_first),
        "features": features,
        "first": first,
    }


def _take_last(x: jax.Array, count: jax.Array) -> jax.Array:
    """The last of the first `count` positions of a row [T, H]: [1, H]."""
    return jax.lax.dynamic_slice_in_dim(x, jnp.maximum(count - 1, 0), 1)


def _set_slots(values: jax.Array, slots: jax.Array, new: jax.Array, is_set: jax.Array) -> jax.Array:
    """`values` with those of `slots` replaced by `new`, where `is_set`."""
    absent = values.shape[0]
    return values.at[jnp.where(is_set, slots, absent)].set(new, mode="drop")


def _is_scored(signature: Signature) -> bool:
    return signature.program == PREFILL.name("prompt_logprobs")


def _cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    """A recurrent state is read and written once."""
    P = signature.bucket["prefill"]
    logits = P if _is_scored(signature) else 1
    return costs.forward([(1, P)], signature.bucket["length"], logit_tokens=logits, state_passes=2)


def _count_tokens(signature: Signature, block: int) -> int:
    return signature.bucket["prefill"]


def _estimate_temporaries(signature: Signature, pair: PairShapes, devices: int) -> int:
    """Keys and values of the chunk in all layers, and twice the size of its results.

    Of a scored chunk, twice the features and the logits of a group of rows at a time.
    """
    P = signature.bucket["prefill"]
    chunk = estimate_chunk_temporaries(P, pair, devices)
    if _is_scored(signature):
        return chunk + 2 * 4 * min(P, SCORED_ROWS) * pair.vocab // devices
    return chunk


def estimate_chunk_temporaries(P: int, pair: PairShapes, devices: int) -> int:
    """Keys and values of the chunk in all layers, and twice the size of its features."""
    item = ITEM_BYTES[pair.dtype]
    width = sum(2 * one.layers * one.kv_heads * one.head_dim for one in pair.target_caches)
    return 2 * item * P * pair.feature_width + width * item * P // devices


def _cost_packed(costs: PairCosts, signature: Signature) -> RooflineCost:
    R, P, S = signature.bucket.values()
    return costs.forward([(R, P)], S, logit_tokens=R, state_passes=0)


def _count_packed_tokens(signature: Signature, block: int) -> int:
    return signature.bucket["rows"] * signature.bucket["prefill"]


def _estimate_packed_temporaries(signature: Signature, pair: PairShapes, devices: int) -> int:
    return estimate_chunk_temporaries(_count_packed_tokens(signature, 0), pair, devices)


def _count_collectives(models: PairModels, signature: Signature) -> int:
    scoring = SCORING_EXCHANGES if _is_scored(signature) else 0
    return models.count_target_collectives() + scoring


PLAIN_FIGURES = ModeFigures(
    code_bytes=(1_500_000, 23_000),
    tpu=MeasuredBuild(6.6, 430e3, 0.04, 4e3),
    cpu=MeasuredBuild(3.5, 70e3, 0.5, 15e3),
    rated=True,
)
BODY = ProgramBody(
    program=PREFILL,
    function=prefill,
    cost=_cost,
    count_tokens=_count_tokens,
    estimate_temporaries=_estimate_temporaries,
    count_collectives=_count_collectives,
    figures={
        None: PLAIN_FIGURES,
        "prompt_logprobs": ModeFigures(
            code_bytes=(1_500_000, 23_000),
            tpu=MeasuredBuild(9.0, 500e3, 0.04, 4e3),
            cpu=MeasuredBuild(4.2, 80e3, 0.5, 15e3),
        ),
    },
    checks_temporaries=False,
)
PACKED_BODY = ProgramBody(
    program=PACKED_PREFILL,
    function=packed_prefill,
    cost=_cost_packed,
    count_tokens=_count_packed_tokens,
    estimate_temporaries=_estimate_packed_temporaries,
    count_collectives=lambda models, _: models.count_target_collectives(),
    figures={None: PLAIN_FIGURES},
    checks_temporaries=False,
)
