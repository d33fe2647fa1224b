"""Counters of an engine: rounds, tokens, acceptance, latency histograms; and summaries of acceptance (τ)."""

import copy
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.requests.request import FinishReason, Request, Result

# Upper bounds of a histogram's buckets, about a factor of 2.5 apart: from a token on a fast chip to a long answer on
# a slow chip.
BUCKET_BOUNDS_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)


@dataclass
class Histogram:
    """A histogram of durations.

    Attributes:
        counts: counts[i] durations were at most BUCKET_BOUNDS_SECONDS[i] and above the bound before; the last count is
            of durations above all bounds.
        total: the sum of the durations, in seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_BOUNDS_SECONDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKET_BOUNDS_SECONDS, seconds)] += 1
        self.total += seconds

    def copy(self) -> "Histogram":
        return Histogram([*self.counts], self.total)


@dataclass
class Counters:
    """Counts since an engine was opened. The engine's thread updates them; `Engine.stats()` returns copies.

    Attributes:
        rounds: rounds; a multi-round step counts as several.
        row_rounds: committed rows of rounds: one for each request in a round.
        drafted: drafted tokens that were verified.
        accepted: drafted tokens that were accepted.
        accepted_at: accepted tokens by position in the draft, from 0.
        verified_at: verified tokens by position in the draft, from 0.
        bucket_rounds: rounds by bucket and whether the round sampled.
        padded_rows: rows of dispatched rounds that no request used.
        prefill_chunks: dispatched prefill chunks.
        mixed_chunks: of these, chunks in the call of a round's verification.
        packed_chunks: of these, chunks that shared a call with chunks of other prompts.
        padded_prefill: positions of prefill chunks after the end of their texts.
        moves: moves of a request to another slot.
        preemptions: times that a request gave its slot back, because the kv pages were not enough for all.
        prefix_queries: prompt tokens whose kv was looked up.
        prefix_hits: of these, those whose kv was there already.
        evictions: kv pages evicted for other requests.
        state_evictions: saved states evicted for others.
        host_queries: prompt tokens whose kv was not on the device, and was looked up in host memory.
        host_hits: of these, those whose kv was copied from there.
        host_bytes: kv in host memory, at the time of the copy.
        host_evictions: pages and saved states evicted from host memory.
        offloaded_bytes, restored_bytes: copied to host memory, and from there to the device.
        pages_used: kv pages in use, at the time of the copy.
        pages: kv pages, at the time of the copy.
        failures: executable calls that failed.
        prompt_tokens: prompt tokens that were prefilled; those computed again after a preemption count once.
        output_tokens: committed tokens.
        finished: ended requests by finish reason.
        refused: requests that the full queue refused.
        waiting: requests in the queue, at the time of the copy.
        running: requests in slots, at the time of the copy.
        slots: slots, at the time of the copy.
        executables: executables that serve, loaded or not, at the time of the copy.
        loaded: loaded executables, at the time of the copy.
        first_token: seconds from submission to the first token.
        per_token: mean seconds between the tokens of a request.
        queued: seconds from submission to a slot.
        latency: seconds from submission to the end.
        host_seconds: processor time of the engine's thread.
        host_wall_seconds: wall time of the engine's steps without waits for the device. On a CPU, this includes what
            the device computes on the same cores.
        wait_seconds: time that the engine's thread waited for the device.
        compile_events: traces and compiles on the engine's thread; 0 unless something is wrong.
        guard_failures: guards of this process that a call ended: each is started again, at the time of the copy.
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
    mixed_chunks: int = 0
    packed_chunks: int = 0
    padded_prefill: int = 0
    moves: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    evictions: int = 0
    state_evictions: int = 0
    host_queries: int = 0
    host_hits: int = 0
    host_bytes: int = 0
    host_evictions: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0
    pages_used: int = 0
    pages: int = 0
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
    guard_failures: int = 0

    def note_rounds(self, bucket: Bucket, sampled: bool, rows: Sequence[int]) -> None:
        """Counts dispatched rounds. rows: of each round, its requests."""
        key = (bucket, sampled)
        rounds = len(rows)
        self.rounds += rounds
        self.bucket_rounds[key] = self.bucket_rounds.get(key, 0) + rounds
        self.padded_rows += rounds * bucket.batch - sum(rows)

    def note_chunk(self, width: int, tokens: int, prompt_tokens: int) -> None:
        """Counts a dispatched prefill chunk of `width` positions with `tokens` of a text.

        prompt_tokens: of these, the tokens of a prompt that were not computed before a preemption.
        """
        self.prefill_chunks += 1
        self.prompt_tokens += prompt_tokens
        self.padded_prefill += width - tokens

    def note_rows(self, k: int, accepted: Sequence[int]) -> None:
        """Counts rows of committed rounds: how many of `k` drafted tokens were accepted in each of them."""
        rounds = len(accepted)
        self.row_rounds += rounds
        self.drafted += k * rounds
        self.accepted += sum(accepted)
        while len(self.verified_at) < k:
            self.verified_at.append(0)
            self.accepted_at.append(0)
        for position in range(k):
            self.verified_at[position] += rounds
        for position in range(max(accepted, default=0)):
            self.accepted_at[position] += sum([count > position for count in accepted])

    def note_start(self, request: Request) -> None:
        """Counts a request that was given a slot."""
        assert request.progress.started is not None
        self.queued.observe(request.progress.started - request.submitted)

    def note_first_token(self, request: Request) -> None:
        """Counts the first token of a request, if it has one."""
        if request.output.first_token is not None:
            self.first_token.observe(request.output.first_token - request.submitted)

    def note_end(self, request: Request) -> None:
        """Counts an ended request."""
        assert request.output.finish_reason is not None and request.output.finished is not None
        self.finished[request.output.finish_reason] = (
            self.finished.get(request.output.finish_reason, 0) + 1
        )
        self.latency.observe(request.output.finished - request.submitted)
        if request.output.first_token is not None and len(request.output.token_ids) > 1:
            self.per_token.observe(
                (request.output.finished - request.output.first_token)
                / (len(request.output.token_ids) - 1)
            )

    def copy(self) -> "Counters":
        """Returns an independent copy."""
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
    """Acceptance of finished requests. τ, the tokens per round, counts the target's own token: 1 to K+1.

    Attributes:
        rounds: rounds of all requests.
        micro_tau: 1 + accepted / rounds over all rounds, as vLLM reports it.
        mean_tau: the mean of the requests' own τ, as z-lab reports it.
        per_position: share of the rounds in which drafted token i was accepted.
    """

    rounds: int
    micro_tau: float
    mean_tau: float
    per_position: tuple[float, ...]


def summarize_acceptance(results: Sequence[Result], counters: Counters) -> AcceptanceSummary:
    """Summarizes finished requests; a request without a round has no τ. counters: of the same requests."""
    runs = [result.accepted for result in results if result.accepted]
    rounds = sum(map(len, runs))
    if not rounds:
        return AcceptanceSummary(0, 0.0, 0.0, ())
    return AcceptanceSummary(
        rounds=rounds,
        micro_tau=1 + sum(map(sum, runs)) / rounds,
        mean_tau=sum(1 + sum(run) / len(run) for run in runs) / len(runs),
        per_position=tuple(
            accepted / verified
            for accepted, verified in zip(counters.accepted_at, counters.verified_at, strict=True)
            if verified
        ),
    )


STALL_SECONDS = 60.0


@dataclass
class Watchdog:
    """Detects a device that hangs without raising an error, by counters that no longer change."""

    stall_seconds: float = STALL_SECONDS
    _work: int = -1
    _since: float = 0.0
    _was_busy: bool = False  # at the last call

    def is_stalled(self, stats: Counters, now: float) -> bool:
        """Whether requests have run or waited without any progress for longer than `stall_seconds`.

        now: monotonic seconds. Progress is measured from call to call.
        """
        work = stats.rounds + stats.prefill_chunks + sum(stats.finished.values())
        is_busy = bool(stats.running or stats.waiting)
        if work != self._work or not (is_busy and self._was_busy):
            self._work, self._since = work, now
        self._was_busy = is_busy
        return now - self._since > self.stall_seconds
