"""The programs of a slot: admit initialises its sampling state, move copies it, and saves and restores its state.

And those that copy a kv page or a recurrent state for the host, and from it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dflash_aot.cache.arrays import KV_POOLS, RECURRENT_STATE, RING_STATE, SAMPLING_STATE
from dflash_aot.cache.signature import (
    ADMIT,
    COPY,
    MOVE,
    READ_PAGE,
    READ_STATE,
    WRITE_PAGE,
    WRITE_STATE,
    Program,
    Signature,
)
from dflash_aot.compile.models.kv_cache import copy_page, copy_ring
from dflash_aot.compile.models.recurrent_state import copy_slot
from dflash_aot.compile.programs.costs import BIAS, COUNTS, PROMPTED, PairCosts, RooflineCost
from dflash_aot.compile.programs.program import (
    Arrays,
    MeasuredBuild,
    ModeFigures,
    Outputs,
    PairModels,
    ProgramBody,
)


def admit(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Initialises the sampling state of slot `slots`, and its length and anchor if `anchor` is not negative."""
    slot = arrays["slots"]
    given = arrays["anchor"] >= 0
    starts = {"lengths": arrays["starts"], "anchors": arrays["anchor"]}
    kept = {name: jax.lax.dynamic_slice(arrays[name], slot, (1,)) for name in starts}
    rows = {name: jnp.where(given, start, kept[name]) for name, start in starts.items()}
    rows |= {name: arrays[f"slot_{name}"] for name in SAMPLING_STATE}
    rows |= {name: models.tp.own_slice(rows[name]) for name in ("bias", "prompted", "counts")}
    return {
        name: jax.lax.dynamic_update_slice_in_dim(arrays[name], row, slot[0], 0)
        for name, row in rows.items()
    }


def _count_admit_cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    """A slot's bias, prompt mask and counts, written. Every device reads all of them."""
    written = BIAS + PROMPTED + COUNTS
    return costs.row_state(written) + RooflineCost(costs.target.decoder.vocab * written, 0.0)


ADMIT_BODY = ProgramBody(
    program=ADMIT,
    function=admit,
    cost=_count_admit_cost,
    figures={
        None: ModeFigures(
            code_bytes=(200_000, 0), tpu=MeasuredBuild(1.2, 140e3), cpu=MeasuredBuild(0.2, 9e3)
        )
    },
    checks_temporaries=False,
)


def move(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Copies length, anchor, sampling, recurrent state and ring of slot `source` over those of slot `destination`.

    Of saved states, which come after the slots, only the recurrent state is copied, and a page of kv.
    """
    source = arrays["source"][0]
    destination = arrays["destination"][0]
    large = [name for name in signature.state if name in RECURRENT_STATE]
    other = (*RECURRENT_STATE, *RING_STATE, *KV_POOLS)
    small = [name for name in signature.state if name not in other]
    moved = {name: copy_slot(arrays[name], source, destination) for name in large}
    if "source_page" in arrays:
        pages = arrays["source_page"][0], arrays["destination_page"][0]
        moved |= {name: copy_page(arrays[name], *pages) for name in KV_POOLS}
        # A saved state has no anchor: the slot keeps its own. Writes to slots that do not exist are dropped.
        is_slot = source < arrays["lengths"].shape[0]
        source = jnp.where(is_slot, source, destination)
        # At length 0 the next round of other slots would clear the window.
        length = jnp.where(is_slot, arrays["lengths"][source], arrays["length"][0])
        moved["lengths"] = arrays["lengths"].at[destination].set(length)
        small.remove("lengths")
    for name in RING_STATE:
        if (pool := arrays.get(name)) is not None:
            ring = (pool.shape[1] - 1) // arrays["lengths"].shape[0]
            moved[name] = copy_ring(pool, ring, source, destination)
    return {
        **moved,
        **{name: arrays[name].at[destination].set(arrays[name][source]) for name in small},
    }


def _count_move_cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    """A slot's recurrent state and ring, and with sampling its bias, prompt mask and counts, read and written.

    Not counted: with saved states a page of kv, a few percent of the recurrent state.
    """
    samples = "bias" in signature.state
    sampling = costs.row_state(2 * (BIAS + PROMPTED + COUNTS) if samples else 0)
    return sampling + costs.recur(1, 0, passes=2) + costs.copy_rings()


MOVE_BODY = ProgramBody(
    program=MOVE,
    function=move,
    cost=_count_move_cost,
    figures={
        None: ModeFigures(
            code_bytes=(600_000, 0), tpu=MeasuredBuild(1.2, 45e3), cpu=MeasuredBuild(0.4, 9e3)
        )
    },
    checks_temporaries=False,
    copies_state=True,
)


def read_copies(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Returns copies of page, or state, `index` of all arrays. Pages and states are their second dimension."""
    index = arrays["index"][0]
    return {
        one.name: jax.lax.dynamic_slice_in_dim(arrays[one.name.removesuffix(COPY)], index, 1, 1)
        for one in signature.results
    }


def write_copies(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Writes copies to page, or state, `index`. The slot of a state gets its length too."""
    index = arrays["index"][0]
    written = {
        name: jax.lax.dynamic_update_slice_in_dim(arrays[name], arrays[name + COPY], index, 1)
        for name in signature.donated
        if name != "lengths"
    }
    if "length" in arrays:
        written["lengths"] = arrays["lengths"].at[index].set(arrays["length"][0])
    return written


def _count_copy_cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    arrays = (*signature.arguments, *signature.results)
    return costs.copy_arrays(one for one in arrays if one.name.endswith(COPY))


def _make_copy_body(
    program: Program, function: Callable[[PairModels, Signature, Arrays], Outputs]
) -> ProgramBody:
    return ProgramBody(
        program=program,
        function=function,
        cost=_count_copy_cost,
        figures={
            None: ModeFigures(
                code_bytes=(200_000, 0), tpu=MeasuredBuild(1.0, 30e3), cpu=MeasuredBuild(0.1, 6e3)
            )
        },
        checks_temporaries=False,
        copies_state=function is read_copies,
    )


COPY_BODIES = (
    *(_make_copy_body(program, read_copies) for program in (READ_PAGE, READ_STATE)),
    *(_make_copy_body(program, write_copies) for program in (WRITE_PAGE, WRITE_STATE)),
)
