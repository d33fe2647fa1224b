"""How much each caller has under way, and whose turn it is to have texts read."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from dflash_aot.server.api_errors import Problem

T = TypeVar("T")
READERS = 2


class Callers:
    """`most` choices each, under way or in line. Of one event loop's thread."""

    def __init__(self, most: int):
        self._most = most
        self._under_way: Counter[int] = Counter()
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reading")  # of nothing else that anybody awaits

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

    async def read(self, caller: int, read: Callable[[], T]) -> T:
        """In a thread, for long texts take their time; one at a time for each caller, so that none keeps all others
        waiting. Raises what `read` raises."""
        async with self._turns[caller]:
            return await asyncio.get_running_loop().run_in_executor(self._readers, read)
