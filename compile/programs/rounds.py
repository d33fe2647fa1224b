"""The rounds programs: several rounds of draft, verify and kv_write in one dispatch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_aot.cache.signature import PROGRAMS, ROUNDS, Signature
from dflash_aot.compile.programs.costs import PairCosts, RooflineCost, sum_costs
from dflash_aot.compile.programs.draft import (
    KV_WRITE_COLLECTIVES,
    count_draft_collectives,
    count_draft_cost,
    count_kv_write_cost,
    draft,
    write_context,
)
from dflash_aot.compile.programs.program import (
    Arrays,
    MeasuredBuild,
    ModeFigures,
    Outputs,
    PairModels,
    ProgramBody,
)
from dflash_aot.compile.programs.sampling import (
    SAMPLING_EXCHANGES,
    SCORING_EXCHANGES,
    find_ends,
)
from dflash_aot.compile.programs.verify import (
    count_verified_tokens,
    count_verify_cost,
    estimate_temporaries,
    verify,
)


class MultiRoundState(NamedTuple):
    """The loop state of a multi-round step, between two rounds.

    Attributes:
        done: int32, rounds that are done.
        left: int32 [B], tokens that each row has left to generate; a row with 0 or less is done.
        state: the donated state by name.
        verdicts: int32 [rounds, B, 2K+2], one verdict per round and row, -1 where the row did not take part.
        features: [B, rounds, F], features whose context is not written yet (K = 0 only).
    """

    done: jax.Array
    left: jax.Array
    state: Outputs
    verdicts: jax.Array
    features: jax.Array


def rounds(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Multi-round step: runs rounds of the active rows until `count` are done or no row has tokens left.

    Rows that are done stay inactive, as in a single round. With `stop_early` the step ends after the first round in
    which a row is done, or was before: another request waits for its place. The first round always runs.

    With K = 0 no round reads the draft's kv, so all rounds' context is written once, after the last round.
    """
    batch, _, k, max_rounds = (signature.bucket[axis] for axis in ROUNDS.axes)
    samples = _samples(signature)
    # A draft has two flags: `penalised` is an argument of sampled rounds, `sampled` is always true here.
    flags: Outputs = {"sampled": jnp.ones((1,), jnp.bool_)} if samples else {}
    active = arrays["active"]
    first_positions = arrays["lengths"][:batch]

    def has_next_round(carry: MultiRoundState) -> jax.Array:
        is_running = carry.left > 0
        stops_early = arrays["stop_early"][0] & jnp.any(active & ~is_running)
        may_go_on = (carry.done == 0) | ~stops_early
        return (carry.done < arrays["count"][0]) & jnp.any(active & is_running) & may_go_on

    def run_round(carry: MultiRoundState) -> MultiRoundState:
        running = active & (carry.left > 0)
        now = {**arrays, **flags, **carry.state, "active": running}
        block = draft(models, signature, now) if k else {}
        verified = verify(models, signature, {**now, **block}, scores=False)
        verdict = verified["verdict"]
        features = models.tp.order_after(verified["features"], verdict[:, :1, None])
        written = write_context(models, {**now, **verified, "features": features}) if k else {}
        accepted = verdict[:, 0]
        chosen = verdict[:, k + 1 :]
        committed = jnp.arange(k + 1) <= accepted[:, None]
        is_end = committed & find_ends(chosen, arrays["ends"])
        left = jnp.where(jnp.any(is_end, axis=1), 0, carry.left - accepted - 1)
        outcome = jnp.where(running[:, None], verdict, -1)
        return MultiRoundState(
            done=carry.done + 1,
            left=jnp.where(running, left, carry.left),
            state={
                name: {**carry.state, **verified, **written}[name] for name in signature.donated
            },
            verdicts=jax.lax.dynamic_update_slice(
                carry.verdicts, outcome[None], (carry.done, 0, 0)
            ),
            features=carry.features
            if k
            else jax.lax.dynamic_update_slice(carry.features, features, (0, carry.done, 0)),
        )

    feature_width = len(models.facts.target_layer_ids) * models.facts.target_hidden
    last = jax.lax.while_loop(
        has_next_round,
        run_round,
        MultiRoundState(
            done=jnp.int32(0),
            left=arrays["left"],
            state={name: arrays[name] for name in signature.donated},
            verdicts=jnp.full((max_rounds, batch, 2 * k + 2), -1, jnp.int32),
            features=jnp.zeros((batch, 0 if k else max_rounds, feature_width), models.shapes.dtype),
        ),
    )
    context: Outputs = {}
    if not k:
        features = {"features": last.features, "starts": first_positions}
        context = write_context(models, {**arrays, **last.state, **features})
    return {**last.state, **context, "verdicts": last.verdicts, "left_over": last.left}


def _samples(signature: Signature) -> bool:
    _, mode = PROGRAMS[signature.program]
    return mode != "greedy"


def _cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    """All rounds. With K = 0 the draft's kv is written once, after the last round."""
    B, S, K, rounds = signature.bucket.values()
    _, mode = PROGRAMS[signature.program]
    verify = count_verify_cost(costs, B, S, K, mode)
    if not K:
        return sum_costs([verify] * rounds) + count_kv_write_cost(costs, B, rounds)
    draft = count_draft_cost(costs, B, S, K)
    return sum_costs([draft, verify, count_kv_write_cost(costs, B, K + 1)] * rounds)


def _count_collectives(models: PairModels, signature: Signature) -> int:
    """Collectives of one round, which is the body of the loop."""
    samples = _samples(signature)
    drafted = count_draft_collectives(models, samples) if signature.bucket["k"] else 0
    sampling = SAMPLING_EXCHANGES - SCORING_EXCHANGES if samples else 0
    return drafted + models.count_target_collectives() + sampling + KV_WRITE_COLLECTIVES


BODY = ProgramBody(
    program=ROUNDS,
    function=rounds,
    cost=_cost,
    count_tokens=count_verified_tokens,
    estimate_temporaries=estimate_temporaries,
    count_collectives=_count_collectives,
    figures={
        "greedy": ModeFigures(
            code_bytes=(3_000_000, 50_000),
            tpu=MeasuredBuild(14.0, 800e3, 0.12, 10e3),
            cpu=MeasuredBuild(3.0, 180e3, 0.6, 19e3),
            rated=True,
        ),
        "sample": ModeFigures(
            code_bytes=(4_500_000, 65_000),
            tpu=MeasuredBuild(20.0, 1100e3, 0.2, 12e3),
            cpu=MeasuredBuild(5.0, 190e3, 0.6, 20e3),
            logits_arrays=3,
        ),
    },
)
