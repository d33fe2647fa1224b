"""Places and turns of callers."""

import asyncio
import threading

import pytest

from dflash_aot.server.api_errors import Problem
from dflash_aot.server.key_limits import READERS, Callers


def test_places_are_a_callers_own_and_come_back():
    callers = Callers(3)
    with callers.admit(1, 2), callers.admit(2, 3):
        with pytest.raises(Problem, match="2 choices are under way"):
            callers.admit(1, 2).__enter__()
        with callers.admit(1, 1):
            pass
    with callers.admit(1, 3):
        pass


def test_more_than_a_caller_may_ever_have_is_no_matter_of_time():
    with pytest.raises(Problem) as caught:
        Callers(3).admit(1, 4).__enter__()
    assert (caught.value.status, caught.value.retry) == (400, False)


def test_the_texts_of_one_caller_keep_no_other_waiting():
    """More long ones than there are readers; another caller's is read while the first is not done."""
    release = threading.Event()

    async def ask() -> list[str]:
        callers = Callers(10)
        long = [asyncio.create_task(callers.read(1, lambda: release.wait(60))) for _ in range(READERS + 2)]
        read = await callers.read(2, lambda: "read")
        assert not any(task.done() for task in long)
        release.set()
        return [read, *map(str, await asyncio.gather(*long))]

    assert asyncio.run(ask()) == ["read", *["True"] * (READERS + 2)]
