"""The mixed programs: the verification of a round and a chunk of a prompt, in one pass over the target's weights."""

import jax

from dflash_aot.cache.arrays import PairShapes
from dflash_aot.cache.signature import MIXED, PROGRAMS, Signature
from dflash_aot.compile.programs.costs import PairCosts, RooflineCost
from dflash_aot.compile.programs.prefill import choose_first_token, estimate_chunk_temporaries
from dflash_aot.compile.programs.program import (
    Arrays,
    Blocks,
    MeasuredBuild,
    ModeFigures,
    Outputs,
    PairModels,
    ProgramBody,
    split_parts,
)
from dflash_aot.compile.programs.sampling import SAMPLING_EXCHANGES, TargetForward
from dflash_aot.compile.programs.verify import (
    accept_tokens,
    count_choice_cost,
    count_verified_tokens,
    estimate_temporaries,
    find_rows,
)


def mixed(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Runs the target over the blocks of the active rows and over one chunk of another slot's prompt.

    Accepts tokens as `verify`, and sets length, anchor and first token of the chunk as `prefill`.
    """
    target = models.bind_target(arrays)
    rows, anchors = find_rows(signature, arrays)
    slots, starts, counts = (arrays[name] for name in ("slots", "chunk_starts", "chunk_counts"))
    chunk = Blocks(arrays["tokens"], starts, arrays["chunk_pages"], slots, counts)
    shapes = rows.ids.shape, chunk.ids.shape
    x, features, kv, _ = models.run_target(
        arrays, target, (rows, chunk), signature.bucket["length"], None, None
    )
    hidden, chunk_hidden = split_parts(x, shapes)
    row_features, chunk_features = split_parts(features, shapes)
    forward = TargetForward(
        rows.starts, anchors, rows.ids, rows.positions, target.logits(hidden), row_features, kv
    )
    verified = accept_tokens(models, signature, arrays, forward)
    end = models.tp.order_after(counts, verified["verdict"][:1, 0])
    if (tops := verified.get("top_logprobs")) is not None:
        end = models.tp.order_after(end, tops[0, 0, :1])
    last = jax.lax.dynamic_slice_in_dim(chunk_hidden, end[0] - 1, 1, axis=1)
    first, anchors = choose_first_token(
        models, target, last, {**arrays, "anchors": verified["anchors"]}
    )
    lengths = jax.lax.dynamic_update_slice(verified["lengths"], starts + counts, slots)
    return {
        **verified,
        "lengths": lengths,
        "anchors": anchors,
        "chunk_features": chunk_features,
        "first": first,
    }


def _cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    """The target over the tokens of both, with the logits of the rows' tokens and of the chunk's last token."""
    _, mode = PROGRAMS[signature.program]
    B, S, K, P = signature.bucket.values()
    logit_tokens = B * (K + 1) + 1
    cost = costs.forward([(B, K + 1), (1, P)], S, logit_tokens, state_passes=0)
    return cost + count_choice_cost(costs, B, K, mode)


def _count_tokens(signature: Signature, block: int) -> int:
    return count_verified_tokens(signature, block) + signature.bucket["prefill"]


def _estimate_temporaries(signature: Signature, pair: PairShapes, devices: int) -> int:
    """Those of the verification and of the chunk."""
    chunk = estimate_chunk_temporaries(signature.bucket["prefill"], pair, devices)
    return estimate_temporaries(signature, pair, devices) + chunk


def _count_collectives(models: PairModels, signature: Signature) -> int:
    """Collectives of the verification and the chunk, with one choice of a token for each."""
    _, mode = PROGRAMS[signature.program]
    sampling = 0 if mode == "greedy" else SAMPLING_EXCHANGES
    return models.count_target_collectives() + 1 + sampling


SAMPLED_FIGURES = ModeFigures(
    code_bytes=(3_000_000, 36_000),
    tpu=MeasuredBuild(12.0, 1300e3, 0.15, 10e3),
    cpu=MeasuredBuild(6.0, 180e3, 0.7, 25e3),
    logits_arrays=3,
)
BODY = ProgramBody(
    program=MIXED,
    function=mixed,
    cost=_cost,
    count_tokens=_count_tokens,
    estimate_temporaries=_estimate_temporaries,
    count_collectives=_count_collectives,
    figures={
        "greedy": ModeFigures(
            code_bytes=(1_500_000, 23_000),
            tpu=MeasuredBuild(8.0, 650e3, 0.06, 6.4e3),
            cpu=MeasuredBuild(4.0, 110e3, 0.7, 20e3),
            rated=True,
        ),
        "sample": SAMPLED_FIGURES,
        "constrain": SAMPLED_FIGURES,
    },
    checks_temporaries=False,
)
