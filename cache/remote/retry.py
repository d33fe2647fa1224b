"""Trying again what fails for a moment: a few times, after pauses that grow, and not for ever."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """So many attempts, each of so many seconds and, for what is moved, as many more as a slow line takes.

    `pause`: seconds before the second attempt at most; before each further one twice as many.
    """

    attempts: int = 3
    seconds: float = 30.0
    bytes_per_second: float = 250_000.0
    pause: float = 1.0

    def call(self, action: Callable[[float], T], size: int, is_transient: Callable[[Exception], bool]) -> T:
        """What `action` returns, which is told how many seconds it has to move `size` bytes; else its last error."""
        seconds = self.seconds + size / self.bytes_per_second
        for attempt in range(1, self.attempts):
            try:
                return action(seconds)
            except Exception as error:
                if not is_transient(error):
                    raise
            # Random, so that those who failed together do not come back together.
            time.sleep(random.uniform(0.5, 1) * self.pause * 2 ** (attempt - 1))
        return action(seconds)


DEFAULT_RETRY = RetryPolicy()
