"""Which request holds which slot. Pure bookkeeping of numbers: no arrays, no device."""

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_aot.runtime.request import Request


@dataclass(eq=False)
class Row:
    """One request in a slot.

    `written` counts prompt tokens whose kv is enqueued; `length` the committed kv positions that the host has read
    of; `in_flight` sums K+1 over the rounds it has not read of, each of which commits 1 … K+1 tokens.
    """

    request: Request
    written: int = 0
    length: int = 0
    in_flight: int = 0
    rounds_in_flight: int = 0
    first_in_flight: bool = False

    @property
    def decoding(self) -> bool:
        """The prompt is in, and more tokens are wanted than those already certain to come."""
        certain = len(self.request.token_ids) + self.rounds_in_flight + self.first_in_flight
        return self.prefilled and certain < self.request.limit

    @property
    def prefilled(self) -> bool:
        return self.written == len(self.request.prompt)

    @property
    def longest(self) -> int:
        """The length on the device is at most this."""
        return self.length + self.in_flight


class Slots:
    """Slots 0 … N-1. The occupied ones are kept a prefix where that makes the batch bucket smaller."""

    def __init__(self, count: int):
        self._rows: list[Row | None] = [None] * count

    def __iter__(self) -> Iterator[Row]:
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

    def add(self, request: Request) -> Row:
        """Into the first free slot."""
        slot = self._rows.index(None)
        self._rows[slot] = row = Row(request)
        return row

    def free(self, row: Row) -> None:
        self._rows[self._rows.index(row)] = None

    def slot_of(self, row: Row) -> int:
        return self._rows.index(row)

    def take_move(self) -> tuple[int, int] | None:
        """The last row into the first hole before it: (source, destination), noted here; None without a hole."""
        source = self.span - 1
        hole = self._rows.index(None) if not self.full else source + 1
        if hole > source:
            return None
        self._rows[hole], self._rows[source] = self._rows[source], None
        return source, hole

    def decoding(self, span: int) -> list[Row | None]:
        """The rows of the first `span` slots that take part in a round, None for those that don't."""
        return [row if row and row.decoding else None for row in self._rows[:span]]

    def next_prefill(self) -> Row | None:
        """The oldest row whose prompt is not in yet."""
        waiting = [row for row in self if not row.prefilled]
        return min(waiting, key=lambda row: row.request.submitted, default=None)
