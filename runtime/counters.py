"""What the engine counts while it serves, and what users want to know of it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_aot.runtime.request import Result


@dataclass
class Counters:
    """Kept by the engine's thread.

    host_seconds: what its thread worked. host_wall_seconds: what passed meanwhile, waits for the device left out; on
    a CPU, that also counts what the device does on the same cores.
    """

    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    verified_at: list[int] = field(default_factory=list)
    prefill_chunks: int = 0
    moves: int = 0
    host_seconds: float = 0.0
    host_wall_seconds: float = 0.0
    wait_seconds: float = 0.0
    compile_events: int = 0

    def note_row(self, k: int, accepted: int) -> None:
        """One row of one round: `accepted` of `k` drafted tokens stand."""
        self.row_rounds += 1
        self.drafted += k
        self.accepted += accepted
        while len(self.verified_at) < k:
            self.verified_at.append(0)
            self.accepted_at.append(0)
        for position in range(k):
            self.verified_at[position] += 1
            self.accepted_at[position] += position < accepted

    def copy(self) -> "Counters":
        return dataclasses.replace(self, accepted_at=[*self.accepted_at], verified_at=[*self.verified_at])


@dataclass(frozen=True)
class Speculation:
    """Acceptance, both ways of averaging. τ counts the target's own token: 1 … K+1 per round."""

    rounds: int
    micro_tau: float  # 1 + accepted / rounds, over all rounds (vLLM)
    mean_tau: float  # mean over requests of each one's own (z-lab)
    per_position: tuple[float, ...]  # share of rounds in which drafted token i stands


def summarize(results: Sequence[Result], counters: Counters) -> Speculation:
    """Of finished requests; a request without a round has no τ."""
    runs = [result.accepted for result in results if result.accepted]
    rounds = sum(map(len, runs))
    if not rounds:
        return Speculation(0, 0.0, 0.0, ())
    return Speculation(
        rounds=rounds,
        micro_tau=1 + sum(map(sum, runs)) / rounds,
        mean_tau=sum(1 + sum(run) / len(run) for run in runs) / len(runs),
        per_position=tuple(
            stands / tried for stands, tried in zip(counters.accepted_at, counters.verified_at, strict=True) if tried
        ),
    )
