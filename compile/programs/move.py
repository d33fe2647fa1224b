"""The move program: copies a slot."""

from dflash_aot.cache.arrays import RECURRENT_STATE
from dflash_aot.cache.signature import MOVE, Signature
from dflash_aot.compile.models.recurrent_state import copy_slot
from dflash_aot.compile.programs.costs import BIAS, COUNTS, PROMPTED, PairCosts, RooflineCost
from dflash_aot.compile.programs.pair_models import Arrays, PairModels
from dflash_aot.compile.programs.program import MeasuredBuild, ModeFigures, Outputs, ProgramBody


def move(models: PairModels, signature: Signature, arrays: Arrays) -> Outputs:
    """Copies length, anchor, sampling and recurrent state of slot `source` over those of slot `destination`."""
    source = arrays["source"][0]
    destination = arrays["destination"][0]
    large = [name for name in signature.state if name in RECURRENT_STATE]
    small = [name for name in signature.state if name not in RECURRENT_STATE]
    moved = {name: copy_slot(arrays[name], source, destination) for name in large}
    return {
        **moved,
        **{name: arrays[name].at[destination].set(arrays[name][source]) for name in small},
    }


def _cost(costs: PairCosts, signature: Signature) -> RooflineCost:
    """A slot's recurrent state, and with sampling its bias, prompt mask and counts, read and written."""
    samples = "bias" in signature.state
    sampling = costs.row_state(2 * (BIAS + PROMPTED + COUNTS) if samples else 0)
    return sampling + costs.recur(1, 0, passes=2)


BODY = ProgramBody(
    program=MOVE,
    function=move,
    cost=_cost,
    figures={
        None: ModeFigures(
            code_bytes=(600_000, 0), tpu=MeasuredBuild(1.8, 75e3), cpu=MeasuredBuild(0.4, 9e3)
        )
    },
    checks_temporaries=False,
    copies_state=True,
)
