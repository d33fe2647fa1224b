"""How much each caller has under way."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_aot.server.problems import Problem


class Callers:
    """`most` choices each, under way or in line. Of one event loop's thread."""

    def __init__(self, most: int):
        self._most = most
        self._under_way: Counter[int] = Counter()

    @contextmanager
    def admit(self, caller: int, choices: int) -> Iterator[None]:
        """While they are under way. Raises Problem where that is too much."""
        if choices > self._most:
            raise Problem(
                400, f"{choices} choices are asked for; one caller may have {self._most}", "invalid_value", "n"
            )
        if self._under_way[caller] + choices > self._most:
            raise Problem(
                429,
                f"{self._under_way[caller]} choices are under way for this API key, {choices} more are asked for, and "
                f"no more than {self._most} may be. Wait for answers first",
                "too_many_requests",
                retry=True,
            )
        self._under_way[caller] += choices
        try:
            yield
        finally:
            self._under_way[caller] -= choices
