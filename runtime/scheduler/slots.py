"""Slots of the running batch: which request holds which slot, and how far each one is. Pure bookkeeping."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.speculation.acceptance_estimate import AcceptanceEstimate


@dataclass(eq=False)
class RunningRequest:
    """A request that holds a slot.

    request: what was asked, and the tokens committed so far.
    acceptance: the acceptance estimate of this request's drafts.
    sampled: its tokens are chosen by sampled rounds. Its first round starts at the prompt's last token.
    has_sampling_state: the device holds this request's sampling parameters.
    prefill_turn: order among equal priorities for the next prefill chunk; lower is earlier.
    prefilled_tokens: prompt tokens whose prefill was dispatched.
    length: kv positions that the host knows to be committed.
    in_flight_tokens: the most tokens that rounds dispatched but not yet read may commit: the sum of their K + 1.
    in_flight_rounds: rounds dispatched but not yet read; each commits at least one token, or was not needed.
    first_token_in_flight: the prefill that gives the first token was dispatched, and its token not yet read.
    """

    request: Request
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    sampled: bool = False
    has_sampling_state: bool = False
    prefill_turn: int = 0
    prefilled_tokens: int = 0
    length: int = 0
    in_flight_tokens: int = 0
    in_flight_rounds: int = 0
    first_token_in_flight: bool = False

    @property
    def is_prefilled(self) -> bool:
        return self.tokens_to_prefill == 0

    @property
    def tokens_to_prefill(self) -> int:
        """Prompt tokens whose prefill is still to be dispatched."""
        return len(self.request.prompt) - self.sampled - self.prefilled_tokens

    @property
    def tokens_outstanding(self) -> int:
        """Tokens wanted beyond those certain to come from what was dispatched."""
        certain = len(self.request.token_ids) + self.in_flight_rounds + self.first_token_in_flight
        return self.request.limit - certain

    @property
    def wants_round(self) -> bool:
        return self.is_prefilled and self.tokens_outstanding > 0

    @property
    def requested_k(self) -> int | None:
        """The request's own K; None where the speculation controller chooses."""
        return self.request.params.k

    @property
    def length_bound(self) -> int:
        """Upper bound of the length on the device."""
        return self.length + self.in_flight_tokens

    def start_rounds(self, rounds: int, k: int) -> None:
        """`rounds` rounds that verify `k` drafted tokens each were dispatched."""
        self.in_flight_rounds += rounds
        self.in_flight_tokens += rounds * (k + 1)

    def finish_rounds(self, rounds: int, k: int, committed: int) -> None:
        """The outcome of as many rounds was read; together they committed `committed` tokens on the device."""
        self.in_flight_rounds -= rounds
        self.in_flight_tokens -= rounds * (k + 1)
        self.length += committed


class Slots:
    """Slots 0 … N-1. Occupied slots are kept a prefix where that makes the batch bucket smaller."""

    def __init__(self, count: int):
        self._slots: list[RunningRequest | None] = [None] * count
        self._turns = itertools.count()

    def __iter__(self) -> Iterator[RunningRequest]:
        return (running for running in self._slots if running)

    def __len__(self) -> int:
        """Occupied slots."""
        return sum(1 for _ in self)

    @property
    def count(self) -> int:
        """Slots, occupied or not."""
        return len(self._slots)

    @property
    def span(self) -> int:
        """Number of slots up to the last occupied one."""
        return max((slot + 1 for slot, running in enumerate(self._slots) if running), default=0)

    @property
    def is_full(self) -> bool:
        return None not in self._slots

    def add(self, running: RunningRequest) -> None:
        """Takes the first free slot; the request's prefill comes after that of all others."""
        running.prefill_turn = next(self._turns)
        self._slots[self._slots.index(None)] = running

    def free(self, running: RunningRequest) -> None:
        self._slots[self._slots.index(running)] = None

    def slot_of(self, running: RunningRequest) -> int:
        return self._slots.index(running)

    def take_move(self) -> tuple[int, int] | None:
        """Moves the last request into the first free slot before it.

        Returns (source, destination), or None where no free slot lies before an occupied one.
        """
        source = self.span - 1
        free = source + 1 if self.is_full else self._slots.index(None)
        if free > source:
            return None
        self._slots[free], self._slots[source] = self._slots[source], None
        return source, free

    def wanting_round(self) -> list[RunningRequest | None]:
        """By slot the requests that want a round, None for other slots; ends at the last request that does."""
        members = [running if running and running.wants_round else None for running in self._slots]
        while members and members[-1] is None:
            members.pop()
        return members

    def take_prefill(self) -> RunningRequest | None:
        """The request whose next prompt chunk is to be prefilled; None where every prompt is in.

        Requests of the best priority take turns, so that a long prompt delays another one by a chunk at a time.
        """
        waiting = [running for running in self if not running.is_prefilled]
        chosen = min(waiting, key=lambda running: (running.request.priority, running.prefill_turn), default=None)
        if chosen:
            chosen.prefill_turn = next(self._turns)
        return chosen
