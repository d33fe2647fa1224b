"""The verify programs: the target over the block of each row, the choice of tokens, and acceptance."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflash_aot.cache.arrays import CHOOSING_STATE, RECURRENT_STATE, PairShapes
from dflash_aot.cache.sampling_state import count_mask_words, count_top_logprobs
from dflash_aot.cache.signature import PROGRAMS, VERIFY, Mode, Signature
from dflash_aot.cache.weight_recipe import ITEM_BYTES
from dflash_aot.compile.kernels.kernel_device import SUBLANES, round_up
from dflash_aot.compile.models.gated_delta_net import MixerCall
from dflash_aot.compile.models.layer_loop import LayerIndex
from dflash_aot.compile.models.recurrent_state import (
    RecurrentState,
    choose_kernels,
    make_pending,
    verify_layer,
)
from dflash_aot.compile.programs.costs import BIAS, COUNTS, PROMPTED, PairCosts, RooflineCost
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
from dflash_aot.compile.programs.sampling import (
    SAMPLING_EXCHANGES,
    TargetForward,
    apply_mask,
    choose_tokens,
    commit_round,
    compute_logprobs,
    count_tokens,
)


def verify(
    models: PairModels, signature: Signature, arrays: Arrays, scores: bool = True
) -> Outputs:
    """The verification of the signature's mode: runs the target over the blocks, and accepts drafted tokens."""
    return accept_tokens(models, signature, arrays, _run_target(models, signature, arrays), scores)


def accept_tokens(
    models: PairModels,
    signature: Signature,
    arrays: Arrays,
    forward: TargetForward,
    scores: bool = True,
) -> Outputs:
    """Chooses tokens in the signature's mode, and accepts the drafted prefix that agrees. scores: where it samples."""
    _, mode = PROGRAMS[signature.program]
    if mode == "greedy":
        return _accept_greedily(models, arrays, forward)
    return _accept_sampled(models, arrays, forward, scores)


def _accept_greedily(models: PairModels, arrays: Arrays, forward: TargetForward) -> Outputs:
    """Greedy verification. A row of the verdict, int32 [2K+2]: accepted tokens, K drafted, K+1 chosen tokens."""
    chosen = models.tp.argmax(forward.logits)
    accepted, outputs = commit_round(arrays, forward, chosen)
    return {
        **outputs,
        "verdict": jnp.concatenate([accepted[:, None], forward.block[:, 1:], chosen], axis=1),
    }


def _accept_sampled(
    models: PairModels, arrays: Arrays, forward: TargetForward, scores: bool
) -> Outputs:
    """Sampled verification: as the greedy one, with tokens chosen by each slot's sampling state.

    The accepted tokens have the distribution that they would have without a draft. A row of the verdict has K+1 more
    elements, the bits of the chosen tokens' log-probabilities (float32). With `allowed` each position chooses among its
    allowed tokens. Without `scores` no log-probabilities are computed, and the verdict has the form of the greedy one.
    """
    batch, width = forward.block.shape
    active = arrays["active"]
    state = {name: arrays[name][:batch] for name in ("counts", *CHOOSING_STATE)}
    # The barrier takes the counts out of the state array. If a branch read them in place, XLA would copy the whole
    # array before it is written.
    state["counts"] = jax.lax.optimization_barrier(state["counts"])
    drafted = forward.block[:, 1:]
    logits = forward.logits
    if (allowed := arrays.get("allowed")) is not None:
        logits = apply_mask(logits, allowed, models.tp.own_tokens(logits.shape[-1]))
    chosen = choose_tokens(logits, forward.positions + 1, drafted, active, state, models.tp)
    scored: Outputs = {}
    bits: Sequence[jax.Array] = ()
    if scores:
        wanted = jnp.any(active & (arrays["tops"][:batch] > 0))
        likelihood, tokens, tops = compute_logprobs(
            forward.logits, chosen, wanted, count_top_logprobs(models.shapes.vocab), models.tp
        )
        bits = [jax.lax.bitcast_convert_type(likelihood, jnp.int32)]
        scored = {"top_tokens": tokens, "top_logprobs": tops}
    accepted, outputs = commit_round(arrays, forward, chosen)
    committed = active[:, None] & (jnp.arange(width) <= accepted[:, None])
    counts = state["counts"] + count_tokens(
        chosen, committed, models.tp.own_tokens(state["counts"].shape[1])
    )
    return {
        **outputs,
        **scored,
        "counts": jax.lax.dynamic_update_slice(arrays["counts"], counts, (0, 0)),
        "verdict": jnp.concatenate([accepted[:, None], drafted, chosen, *bits], axis=1),
    }


def _run_target(models: PairModels, signature: Signature, arrays: Arrays) -> TargetForward:
    """The target over the block: the anchor and K drafted tokens of each row."""
    batch, length, k = (signature.bucket[axis] for axis in VERIFY.axes)
    target = models.bind_target(arrays)
    rows, anchors = find_rows(signature, arrays)
    lengths = rows.starts
    state = None
    room = None
    delta = None
    if sizes := models.target.module.target.recurrent:
        state = RecurrentState(*(arrays[name] for name in RECURRENT_STATE))
        delta = choose_kernels(models.tp.backend, state, sizes, k + 1)
        room = make_pending(state, sizes, batch, k + 1, delta)

    def recur(
        carry: TargetCarry[Any], layer: LayerIndex, call: MixerCall
    ) -> tuple[jax.Array, TargetCarry[Any]]:
        kv_rows, pending = carry
        assert state is not None
        mixed, pending = verify_layer(state, pending, layer, call, lengths, delta)
        return mixed, (kv_rows, pending)

    x, features, kv, pending = models.run_target(arrays, target, (rows,), length, room, recur)
    return TargetForward(
        lengths, anchors, rows.ids, rows.positions, target.logits(x), features, kv, pending, delta
    )


def find_rows(signature: Signature, arrays: Arrays) -> tuple[Blocks, jax.Array]:
    """The blocks of a round, each an anchor and K drafted tokens; and the anchors, int32 [B]."""
    batch = signature.bucket["batch"]
    anchors = arrays["anchors"][:batch]
    block = arrays["block"] if signature.bucket["k"] else anchors[:, None]
    return Blocks(block, arrays["lengths"][:batch], arrays["pages"]), anchors


def count_verify_cost(costs: PairCosts, B: int, S: int, K: int, mode: Mode) -> RooflineCost:
    """The target over K+1 tokens of each row, with the logits of all of them.

    A sampled verification reads each row's bias, prompt mask and counts, and writes the counts; a constrained one also
    reads a mask of allowed tokens for each position.
    """
    cost = costs.forward([(B, K + 1)], S, logit_tokens=B * (K + 1), state_passes=3)
    return cost + count_choice_cost(costs, B, K, mode)


def count_choice_cost(costs: PairCosts, B: int, K: int, mode: Mode) -> RooflineCost:
    """The sampling state and the masks, see `count_verify_cost`."""
    cost = RooflineCost(0.0, 0.0)
    if mode != "greedy":
        cost += costs.row_state(B * (BIAS + PROMPTED + 2 * COUNTS))
    if mode == "constrain":
        words = count_mask_words(costs.target.decoder.vocab)
        cost += RooflineCost(B * (K + 1) * words * ITEM_BYTES["int32"], 0.0)
    return cost


def _cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    _, mode = PROGRAMS[signature.program]
    B, S, K = signature.bucket.values()
    return count_verify_cost(costs, B, S, K, mode)


def count_verified_tokens(signature: Signature, block: int) -> int:
    return signature.bucket["batch"] * (signature.bucket["k"] + 1)


def estimate_temporaries(signature: Signature, pair: PairShapes, devices: int) -> int:
    """Logits, twice where tokens are sampled, and what the block adds to a hybrid's recurrent state."""
    _, mode = PROGRAMS[signature.program]
    batch = signature.bucket["batch"]
    width = signature.bucket["k"] + 1
    arrays = 1 if mode == "greedy" else 2
    logits = arrays * 4 * batch * width * pair.vocab
    return (logits + _estimate_pending(pair, batch, width)) // devices


def _estimate_pending(pair: PairShapes, batch: int, tokens: int) -> int:
    """Bytes of what verified tokens add to a hybrid's recurrent state: keys, updates and inputs of the convolution.

    The kernels pad the tokens to whole tiles.
    """
    shape = pair.recurrent
    if shape is None:
        return 0
    tokens = round_up(tokens, SUBLANES)
    updates = shape.heads * (shape.value_dim + 1)
    keys = (shape.channels - shape.heads * shape.value_dim) // 2
    rows = ITEM_BYTES[pair.dtype] * shape.channels * (shape.window + tokens)
    return shape.layers * batch * (4 * (keys + updates) * tokens + rows)


def _count_collectives(models: PairModels, signature: Signature) -> int:
    _, mode = PROGRAMS[signature.program]
    sampling = 0 if mode == "greedy" else SAMPLING_EXCHANGES
    return models.count_target_collectives() + sampling


# Code of a sampled verification was measured for 1, 16 and 128 tokens: 2.8, 4.4 and 7.5 MB, without global memory.
SAMPLED_FIGURES = ModeFigures(
    code_bytes=(3_000_000, 36_000),
    tpu=MeasuredBuild(12.0, 1300e3, 0.15, 10e3),
    cpu=MeasuredBuild(5.0, 145e3, 0.5, 20e3),
    logits_arrays=3,
)
BODY = ProgramBody(
    program=VERIFY,
    function=verify,
    cost=_cost,
    count_tokens=count_verified_tokens,
    estimate_temporaries=estimate_temporaries,
    count_collectives=_count_collectives,
    figures={
        "greedy": ModeFigures(
            # measured for 1, 64 and 128 tokens: 1.3, 3.2 and 4.5 MB, without global memory
            code_bytes=(1_500_000, 23_000),
            tpu=MeasuredBuild(6.6, 590e3, 0.06, 6.4e3),
            cpu=MeasuredBuild(2.5, 80e3, 0.5, 15e3),
            rated=True,
        ),
        "sample": SAMPLED_FIGURES,
        "constrain": SAMPLED_FIGURES,
    },
)
