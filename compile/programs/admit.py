"""The admit program: initialises the sampling state of a slot."""

import jax
import jax.numpy as jnp

from dflash_aot.cache.arrays import SAMPLING_STATE
from dflash_aot.cache.signature import ADMIT, Signature
from dflash_aot.compile.programs.costs import BIAS, COUNTS, PROMPTED, PairCosts, RooflineCost
from dflash_aot.compile.programs.pair_models import Arrays, PairModels
from dflash_aot.compile.programs.program import MeasuredBuild, ModeFigures, Outputs, ProgramBody


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


def _cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    """A slot's bias, prompt mask and counts, written. Every device reads all of them."""
    written = BIAS + PROMPTED + COUNTS
    return costs.row_state(written) + RooflineCost(costs.target.decoder.vocab * written, 0.0)


BODY = ProgramBody(
    program=ADMIT,
    function=admit,
    cost=_cost,
    figures={
        None: ModeFigures(
            code_bytes=(200_000, 0), tpu=MeasuredBuild(1.6, 25e3), cpu=MeasuredBuild(0.2, 9e3)
        )
    },
    checks_temporaries=False,
)
