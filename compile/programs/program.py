"""The compile half of a program of the catalogue: its function, its estimates and its checks, as one record.

Each program has a module here with a `BODY`, see `programs`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import msgspec

from dflash_aot.cache.arrays import PairShapes
from dflash_aot.cache.signature import Mode, Program, Signature
from dflash_aot.compile.programs.costs import PairCosts, RooflineCost
from dflash_aot.compile.programs.pair_models import Arrays, PairModels

Outputs = dict[str, jax.Array]


class BuildEstimate(msgspec.Struct, frozen=True):
    """What compiling takes.

    Attributes:
        seconds: of one core.
        bytes: on disk, compressed, of executable and program.
    """

    seconds: float
    bytes: float

    def __add__(self, other: "BuildEstimate") -> "BuildEstimate":
        return BuildEstimate(self.seconds + other.seconds, self.bytes + other.bytes)


class MeasuredBuild(NamedTuple):
    """Builds of a program on a platform: a fixed part in seconds of one core and bytes on disk, and a part per unit.

    On TPU the layers are a loop, and the unit is a token of the call. On CPU the layers are unrolled, and the unit is a
    layer. Measured with jax 0.10.2 on two cores of an idle x86 server: Qwen3-4B and its draft, for v5e (libtpu
    0.0.42.1, one process each) and for CPU. Bytes on CPU: of targets with 3 to 28 layers, jax 0.12.0.1.
    """

    seconds: float
    bytes: float
    unit_seconds: float = 0.0
    unit_bytes: float = 0.0

    def estimate(self, units: int) -> BuildEstimate:
        """What compiling an executable of so many units takes."""
        return BuildEstimate(
            self.seconds + units * self.unit_seconds, self.bytes + units * self.unit_bytes
        )


@dataclass(frozen=True)
class ModeFigures:
    """What was measured of a program in one mode, and how its executables are checked.

    Attributes:
        code_bytes: of a TPU executable: a fixed part, and a part per token of a call. Fitted to Qwen3-4B and its draft
            on v5e.
        tpu, cpu: builds for these platforms.
        rated: whether the estimated time is compared with its bound. Not where sampling takes much of it: the bound
            leaves out top_k and top_p.
        logits_arrays: float32 arrays of the size of the logits that the temporaries may hold in addition.
    """

    code_bytes: tuple[int, int]
    tpu: MeasuredBuild
    cpu: MeasuredBuild
    rated: bool = False
    logits_arrays: int = 0


def _nothing(*given: object) -> int:
    return 0


@dataclass(frozen=True)
class ProgramBody:
    """The compile half of a program.

    Attributes:
        program: the half in the catalogue of `cache`.
        function: inputs by name → donated state and results by name.
        cost: of a call, for the roofline.
        figures: by mode.
        count_tokens: how many tokens a call computes; the second argument is the tokens of a draft's block.
        estimate_temporaries: bytes on each of a number of TPU devices. A layer's intermediate results stay in VMEM, and
            features of verified tokens take the place of the logits. Fitted to Qwen3-4B, Qwen3-8B and their drafts on
            v5e, v5p and v6e.
        count_collectives: how many the program needs on several devices.
        layers_of: the model whose layers make a build on CPU longer.
        checks_temporaries: whether temporaries are checked.
        copies_state: whether it copies state on purpose.
    """

    program: Program
    function: Callable[[PairModels, Signature, Arrays], Outputs]
    cost: Callable[[PairCosts, Signature], RooflineCost]
    figures: Mapping[Mode, ModeFigures]
    count_tokens: Callable[[Signature, int], int] = _nothing
    estimate_temporaries: Callable[[Signature, PairShapes, int], int] = _nothing
    count_collectives: Callable[[PairModels, Signature], int] = _nothing
    layers_of: Literal["target", "draft"] = "target"
    checks_temporaries: bool = True
    copies_state: bool = False
