"""How long a build takes and how large it becomes, before it is begun: an estimate from what builds took."""

from collections.abc import Iterable

import msgspec

from dflash_aot.cache.signature import Pair, Signature
from dflash_aot.compile.analysis.memory_plan import count_tokens

WIDE = 512  # tokens; wider calls are loops that take no longer to compile


class Effort(msgspec.Struct, frozen=True):
    """Seconds of one core, and bytes on disk, compressed as the store keeps them."""

    seconds: float
    bytes: float

    def __add__(self, other: "Effort") -> "Effort":
        return Effort(self.seconds + other.seconds, self.bytes + other.bytes)

    def times(self, factor: float) -> "Effort":
        return Effort(self.seconds * factor, self.bytes * factor)


# Of one executable: what it takes at least, and what each of its units adds. Layers are a loop on TPU, so there a
# unit is a token of the call; elsewhere they are unrolled, and it is a layer. Measured with jax 0.10.2 on two cores of
# an idle x86 server: Qwen3-4B and its draft, for v5e (libtpu 0.0.42.1; a process started for each) and for its CPU.
MEASURED: dict[str, dict[str, tuple[Effort, Effort]]] = {
    "tpu": {
        "prefill": (Effort(3.3, 300e3), Effort(0.02, 4e3)),
        "draft": (Effort(4.0, 400e3), Effort(0.03, 4.5e3)),
        "verify": (Effort(3.3, 330e3), Effort(0.03, 5.5e3)),
        "sampled_verify": (Effort(4.6, 650e3), Effort(0.1, 8e3)),
        "kv_write": (Effort(2.2, 110e3), Effort(0.003, 1e3)),
        "rounds": (Effort(7.0, 800e3), Effort(0.06, 10e3)),
        "move": (Effort(1.8, 75e3), Effort(0.0, 0.0)),
        "admit": (Effort(1.6, 25e3), Effort(0.0, 0.0)),
    },
    "cpu": {
        "prefill": (Effort(0.0, 0.0), Effort(0.4, 11e3)),
        "draft": (Effort(0.0, 0.0), Effort(0.36, 17e3)),
        "verify": (Effort(0.0, 0.0), Effort(0.4, 13e3)),
        "sampled_verify": (Effort(1.5, 60e3), Effort(0.4, 13e3)),
        "kv_write": (Effort(0.0, 0.0), Effort(0.25, 8e3)),
        "rounds": (Effort(1.5, 60e3), Effort(0.5, 16e3)),
        "move": (Effort(0.4, 9e3), Effort(0.0, 0.0)),
        "admit": (Effort(0.2, 9e3), Effort(0.0, 0.0)),
    },
}


def estimate_effort(signatures: Iterable[Signature], pair: Pair, platform: str) -> Effort | None:
    """Of a whole build; None for a platform of which nothing is known."""
    if platform not in MEASURED:
        return None
    total = Effort(0.0, 0.0)
    for signature in signatures:
        least, per_unit = MEASURED[platform][signature.program]
        total += least + per_unit.times(_count_units(signature, pair, platform))
    return total


def _count_units(signature: Signature, pair: Pair, platform: str) -> int:
    if platform == "tpu":
        return min(count_tokens(signature, pair.block), WIDE)
    return (pair.draft_kv if signature.program in ("draft", "kv_write") else pair.target_kv).layers
