"""Retry policy: transient failures are retried a few times, with growing random pauses and a time limit."""

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")
PERMISSION_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long an operation is tried.

    Attributes:
        attempts: calls in all.
        seconds: time limit of an attempt, without the time for its bytes.
        bytes_per_second: the slowest transfer that is waited for; it extends the limit by the
            size of the transfer.
        pause: longest pause before the second attempt, in seconds; doubled before each further
            one.
    """

    attempts: int = 3
    seconds: float = 30.0
    bytes_per_second: float = 250_000.0
    pause: float = 1.0

    def call(
        self,
        action: Callable[[float], Result],
        size: int,
        is_transient: Callable[[Exception], bool],
    ) -> Result:
        """Calls `action` with its time limit in seconds until it succeeds; returns its result or raises its last error.

        size: bytes that the action transfers. is_transient: whether an error may go away.
        """
        seconds = self.seconds + size / self.bytes_per_second
        for attempt in range(1, self.attempts):
            try:
                return action(seconds)
            except Exception as error:
                if not is_transient(error):
                    raise
            # Random, so that clients that failed together do not come back together.
            time.sleep(random.uniform(0.5, 1) * self.pause * 2 ** (attempt - 1))
        return action(seconds)


DEFAULT_RETRY = RetryPolicy()
