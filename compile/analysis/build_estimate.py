"""Build estimate: seconds and bytes that a build will take, from the figures of measured builds."""

from collections.abc import Iterable

import msgspec

from dflash_aot.cache.signature import SAMPLED_PROGRAMS, PairShapes, Signature
from dflash_aot.compile.analysis.memory_plan import count_tokens

MAX_COUNTED_TOKENS = 512  # tokens; wider calls are loops, which take no longer to compile


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

    def times(self, factor: float) -> "BuildEstimate":
        return BuildEstimate(self.seconds * factor, self.bytes * factor)


# Of one executable by platform and program: a fixed part, and a part per unit. On TPU the layers are a loop, and the
# unit is a token of the call. On CPU the layers are unrolled, and the unit is a layer. Measured with jax 0.10.2 on two
# cores of an idle x86 server: Qwen3-4B and its draft, for v5e (libtpu 0.0.42.1, one process each) and for CPU. Bytes on
# CPU: of targets with 3 to 28 layers, jax 0.12.0.1.
MEASURED_BUILDS: dict[str, dict[str, tuple[BuildEstimate, BuildEstimate]]] = {
    "tpu": {
        "prefill": (BuildEstimate(3.3, 300e3), BuildEstimate(0.02, 4e3)),
        "scored_prefill": (BuildEstimate(4.3, 500e3), BuildEstimate(0.02, 4e3)),
        "draft": (BuildEstimate(4.0, 400e3), BuildEstimate(0.03, 4.5e3)),
        "verify": (BuildEstimate(3.3, 330e3), BuildEstimate(0.03, 5.5e3)),
        **dict.fromkeys(SAMPLED_PROGRAMS, (BuildEstimate(4.6, 650e3), BuildEstimate(0.1, 8e3))),
        "kv_write": (BuildEstimate(2.2, 110e3), BuildEstimate(0.003, 1e3)),
        "rounds": (BuildEstimate(7.0, 800e3), BuildEstimate(0.06, 10e3)),
        "sampled_rounds": (BuildEstimate(8.5, 1100e3), BuildEstimate(0.13, 12e3)),
        "move": (BuildEstimate(1.8, 75e3), BuildEstimate(0.0, 0.0)),
        "admit": (BuildEstimate(1.6, 25e3), BuildEstimate(0.0, 0.0)),
    },
    "cpu": {
        "prefill": (BuildEstimate(0.0, 70e3), BuildEstimate(0.4, 15e3)),
        "scored_prefill": (BuildEstimate(0.7, 80e3), BuildEstimate(0.4, 15e3)),
        "draft": (BuildEstimate(0.0, 100e3), BuildEstimate(0.36, 5e3)),
        "verify": (BuildEstimate(0.0, 80e3), BuildEstimate(0.4, 15e3)),
        **dict.fromkeys(SAMPLED_PROGRAMS, (BuildEstimate(1.5, 145e3), BuildEstimate(0.4, 20e3))),
        "kv_write": (BuildEstimate(0.0, 30e3), BuildEstimate(0.25, 2e3)),
        "rounds": (BuildEstimate(1.5, 180e3), BuildEstimate(0.5, 19e3)),
        "sampled_rounds": (BuildEstimate(3.0, 190e3), BuildEstimate(0.5, 20e3)),
        "move": (BuildEstimate(0.4, 9e3), BuildEstimate(0.0, 0.0)),
        "admit": (BuildEstimate(0.2, 9e3), BuildEstimate(0.0, 0.0)),
    },
}


def estimate_build(signatures: Iterable[Signature], pair: PairShapes, platform: str) -> BuildEstimate | None:
    """The estimate of a whole build; None for a platform without measured builds."""
    if platform not in MEASURED_BUILDS:
        return None
    total = BuildEstimate(0.0, 0.0)
    for signature in signatures:
        fixed, per_unit = MEASURED_BUILDS[platform][signature.program]
        total += fixed + per_unit.times(_count_units(signature, pair, platform))
    return total


def _count_units(signature: Signature, pair: PairShapes, platform: str) -> int:
    if platform == "tpu":
        return min(count_tokens(signature, pair.block), MAX_COUNTED_TOKENS)
    return (pair.draft_kv if signature.program in ("draft", "kv_write") else pair.target_kv).layers
