"""What the engine counts while it serves, and what users want to know of it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.metrics.histogram import Histogram
from dflash_aot.runtime.requests.request import FinishReason, Request, Result


@dataclass
class Counters:
    """Kept by the engine's thread; `Engine.stats()` gives copies, each of whole commits.

    host_seconds: what its thread worked. host_wall_seconds: what passed meanwhile, waits for the device left out; on
    a CPU, that also counts what the device does on the same cores.
    bucket_rounds: rounds by bucket and whether they sampled. padded_rows: rows of those buckets that no request had.
    padded_prefill: positions of prefill chunks behind their prompts.
    waiting, running, slots: requests in line, requests in slots, and slots, at the moment of the copy.
    executables, loaded: how many there are, and how many are loaded, at that moment.
    """

    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    verified_at: list[int] = field(default_factory=list)
    bucket_rounds: dict[tuple[Bucket, bool], int] = field(default_factory=dict)
    padded_rows: int = 0
    prefill_chunks: int = 0
    padded_prefill: int = 0
    moves: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    refused: int = 0
    waiting: int = 0
    running: int = 0
    slots: int = 0
    executables: int = 0
    loaded: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)
    queued: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    host_seconds: float = 0.0
    host_wall_seconds: float = 0.0
    wait_seconds: float = 0.0
    compile_events: int = 0

    def note_round(self, bucket: Bucket, sampled: bool, rows: int) -> None:
        """One round with `rows` requests in it is on its way."""
        self.rounds += 1
        self.bucket_rounds[bucket, sampled] = self.bucket_rounds.get((bucket, sampled), 0) + 1
        self.padded_rows += bucket.batch - rows

    def note_chunk(self, width: int, tokens: int) -> None:
        """One prefill chunk with `tokens` of a prompt in it is on its way."""
        self.prefill_chunks += 1
        self.prompt_tokens += tokens
        self.padded_prefill += width - tokens

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

    def note_start(self, request: Request) -> None:
        """A request has got a slot."""
        assert request.started is not None
        self.queued.observe(request.started - request.submitted)

    def note_tokens(self, request: Request, before: int) -> None:
        """A request that had `before` tokens has more now."""
        self.output_tokens += len(request.token_ids) - before
        if not before and request.first_token is not None:
            self.first_token.observe(request.first_token - request.submitted)

    def note_end(self, request: Request) -> None:
        """A request has come to its end, whichever."""
        assert request.finish_reason is not None and request.finished is not None
        self.finished[request.finish_reason] = self.finished.get(request.finish_reason, 0) + 1
        self.latency.observe(request.finished - request.submitted)
        if request.first_token is not None and len(request.token_ids) > 1:
            self.per_token.observe((request.finished - request.first_token) / (len(request.token_ids) - 1))

    def copy(self) -> "Counters":
        """Nothing of it changes any more."""
        copied = copy.copy(self)
        for name in CONTAINERS:
            setattr(copied, name, getattr(self, name).copy())
        return copied


CONTAINERS = (
    *("accepted_at", "verified_at", "bucket_rounds", "finished"),
    *("first_token", "per_token", "queued", "latency"),
)


@dataclass(frozen=True)
class AcceptanceSummary:
    """Acceptance, both ways of averaging. τ counts the target's own token: 1 … K+1 per round."""

    rounds: int
    micro_tau: float  # 1 + accepted / rounds, over all rounds (vLLM)
    mean_tau: float  # mean over requests of each one's own (z-lab)
    per_position: tuple[float, ...]  # share of rounds in which drafted token i stands


def summarize_acceptance(results: Sequence[Result], counters: Counters) -> AcceptanceSummary:
    """Of finished requests; a request without a round has no τ."""
    runs = [result.accepted for result in results if result.accepted]
    rounds = sum(map(len, runs))
    if not rounds:
        return AcceptanceSummary(0, 0.0, 0.0, ())
    return AcceptanceSummary(
        rounds=rounds,
        micro_tau=1 + sum(map(sum, runs)) / rounds,
        mean_tau=sum(1 + sum(run) / len(run) for run in runs) / len(runs),
        per_position=tuple(
            stands / tried for stands, tried in zip(counters.accepted_at, counters.verified_at, strict=True) if tried
        ),
    )
