"""Which request holds which slot. Pure bookkeeping: no device is asked."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax

from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.speculation.acceptance_estimate import AcceptanceEstimate


@dataclass(eq=False)
class RunningRequest:
    """One request in a slot.

    `written` counts prompt tokens whose kv is enqueued; `length` the committed kv positions that the host has read
    of; `in_flight` sums K+1 over the rounds it has not read of, each of which commits 1 … K+1 tokens.
    `sampled`: its tokens are chosen by sampled rounds, from the first on, which starts at the prompt's last token.
    `left`: int32 [1], what the last dispatch of several rounds leaves to be generated; None if that was not the last.
    `admitted`: the device knows what it asks of the choice. `turn`: by which prompts go in, see `Slots.take_prefill`.
    """

    request: Request
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    sampled: bool = False
    admitted: bool = False
    turn: int = 0
    written: int = 0
    length: int = 0
    in_flight: int = 0
    rounds_in_flight: int = 0
    first_in_flight: bool = False
    left: jax.Array | None = None

    @property
    def decoding(self) -> bool:
        """The prompt is in, and more tokens are wanted than those already certain to come."""
        return self.prefilled and self.unsure > 0

    @property
    def unsure(self) -> int:
        """Tokens that are wanted beyond those certain to come: each round commits one, or was not needed."""
        return self.request.limit - len(self.request.token_ids) - self.rounds_in_flight - self.first_in_flight

    @property
    def unwritten(self) -> int:
        """Prompt tokens that are still to be prefilled."""
        return len(self.request.prompt) - self.sampled - self.written

    @property
    def prefilled(self) -> bool:
        return self.unwritten == 0

    @property
    def wanted_k(self) -> int | None:
        """Its own K, where it does not leave that to the engine."""
        return self.request.params.k

    @property
    def longest(self) -> int:
        """The length on the device is at most this."""
        return self.length + self.in_flight


class Slots:
    """Slots 0 … N-1. The occupied ones are kept a prefix where that makes the batch bucket smaller."""

    def __init__(self, count: int):
        self._rows: list[RunningRequest | None] = [None] * count
        self._turns = itertools.count()

    def __iter__(self) -> Iterator[RunningRequest]:
        return (row for row in self._rows if row)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def span(self) -> int:
        """Slots up to the last occupied one."""
        return max((slot + 1 for slot, row in enumerate(self._rows) if row), default=0)

    @property
    def full(self) -> bool:
        return None not in self._rows

    def add(self, row: RunningRequest) -> None:
        """Into the first free slot; behind all others in turn."""
        row.turn = next(self._turns)
        self._rows[self._rows.index(None)] = row

    def free(self, row: RunningRequest) -> None:
        self._rows[self._rows.index(row)] = None

    def slot_of(self, row: RunningRequest) -> int:
        return self._rows.index(row)

    def take_move(self) -> tuple[int, int] | None:
        """The last row into the first hole before it: (source, destination), noted here; None without a hole."""
        source = self.span - 1
        hole = self._rows.index(None) if not self.full else source + 1
        if hole > source:
            return None
        self._rows[hole], self._rows[source] = self._rows[source], None
        return source, hole

    def decoding(self) -> list[RunningRequest | None]:
        """By slot the rows that take part in a round, None for those before the last one that don't."""
        rows = [row if row and row.decoding else None for row in self._rows]
        while rows and rows[-1] is None:
            rows.pop()
        return rows

    def take_prefill(self) -> RunningRequest | None:
        """Of the rows whose prompt is not in yet the one whose turn it is; the next turn is another's.

        By priority; equal ones take turns, so that a prompt of many chunks holds none up by more than one at a time.
        """
        waiting = [row for row in self if not row.prefilled]
        row = min(waiting, key=lambda row: (row.request.priority, row.turn), default=None)
        if row:
            row.turn = next(self._turns)
        return row
