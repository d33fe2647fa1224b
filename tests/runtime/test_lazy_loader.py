"""Executables that are loaded when they are needed, or ahead: who loads what, and in which order."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.signature import ExecutableId
from dflash_aot.runtime.executables.lazy_loader import LazyLoader
from tests.runtime.stepper import LONG


def name(number: int) -> ExecutableId:
    return "verify", (number,)


class Shelf:
    """What is to be loaded; each waits until it may be, if there are permits at all."""

    def __init__(self, count: int, soon: int = 0, held: bool = False):
        self.log: list[int] = []
        self.errors: dict[int, Exception] = {}
        self.begun, self._permits = threading.Semaphore(0), threading.Semaphore(0) if held else None
        self.told = threading.Semaphore(0)
        self.loader = LazyLoader(self._load, [name(number) for number in range(count)], soon)  # type: ignore[arg-type]

    def _load(self, asked: ExecutableId) -> str:
        (number,) = asked[1]
        self.log.append(number)
        self.begun.release()
        if self._permits:
            assert self._permits.acquire(timeout=LONG), "nobody lets it go on"
        if number in self.errors:
            raise self.errors[number]
        return f"executable {number}"

    def permit(self, count: int = 1) -> None:
        assert self._permits
        self._permits.release(count)

    def resume(self) -> None:
        self.loader.resume(self.told.release)

    def await_told(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.told.acquire(timeout=LONG), "nothing more is loaded"


@pytest.fixture
def shelf() -> "Callable[..., Shelf]":
    made: list[Shelf] = []

    def make(*args: int, **facts: bool) -> Shelf:
        made.append(Shelf(*args, **facts))
        return made[-1]

    yield make
    for one in made:
        one.loader.close()


def test_without_its_thread_only_what_is_asked_for_is_loaded_and_once(shelf):
    one = shelf(3)
    assert [one.loader[name(2)], one.loader[name(2)]] == ["executable 2"] * 2
    assert one.log == [2]
    assert (len(one.loader), name(2) in one.loader, name(1) in one.loader) == (1, True, False)
    assert [*one.loader] == ["executable 2"]
    with pytest.raises(KeyError):
        one.loader[name(3)]


def test_who_asks_for_what_somebody_is_loading_waits_for_that(shelf):
    one = shelf(1, held=True)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(one.loader.__getitem__, name(0)) for _ in range(4)]
        assert one.begun.acquire(timeout=LONG)
        one.permit(4)
        assert {each.result(LONG) for each in asking} == {"executable 0"}
    assert one.log == [0]


def test_the_thread_loads_everything_in_order_and_tells(shelf):
    one = shelf(5)
    one.loader[name(3)]
    one.resume()
    one.loader.start()
    one.await_told(4)
    assert one.log == [3, 0, 1, 2, 4]
    assert len(one.loader) == 5


def test_what_is_prepared_comes_next_and_what_is_asked_for_waits_for_nobody(shelf):
    one = shelf(6, held=True)
    one.resume()
    one.loader.start()
    assert one.begun.acquire(timeout=LONG)  # it is at 0
    assert not one.loader.prepare([name(4), name(5)])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(one.loader.__getitem__, name(3))
        assert one.begun.acquire(timeout=LONG)
        one.permit(6)
        assert asked.result(LONG) == "executable 3"
    one.await_told(5)
    assert one.log == [0, 3, 4, 5, 1, 2]
    assert one.loader.prepare([name(4), name(5)])


def test_while_it_is_paused_only_what_is_needed_soon_is_loaded(shelf):
    one = shelf(5, soon=2)
    one.resume()
    one.loader.pause()
    one.loader.start()
    one.await_told(2)
    assert not one.loader.prepare([name(4)])
    one.await_told()
    assert one.log == [0, 1, 4]
    one.resume()
    one.await_told(2)
    assert one.log == [0, 1, 4, 2, 3]


def test_what_is_corrupt_is_told_to_everybody_who_asks_and_the_rest_is_loaded(shelf, caplog):
    one = shelf(3)
    one.errors[1] = CorruptBundle("no executable. Mend it: so")
    one.resume()
    with caplog.at_level(logging.ERROR):
        one.loader.start()
        one.await_told(3)
    assert [str(record.msg) for record in caplog.records] == ["no executable. Mend it: so"]
    told = []
    for _ in range(2):
        with pytest.raises(CorruptBundle, match="no executable. Mend it: so") as error:
            one.loader[name(1)]
        told.append(error.value)
    assert told[0] is not told[1]  # one that is raised again and again would keep all frames that it went through
    assert one.log == [0, 1, 2]
    assert (len(one.loader), name(1) in one.loader, one.loader.prepare([name(1)])) == (2, False, False)


@pytest.mark.parametrize("error", [IncompatibleBundle("no memory is free"), MemoryError("none")])
def test_what_failed_for_want_of_something_else_is_tried_again(shelf, error):
    one = shelf(1)
    one.errors[0] = error
    with pytest.raises(type(error), match=str(error)):
        one.loader[name(0)]
    del one.errors[0]
    assert one.loader[name(0)] == "executable 0"
    assert one.log == [0, 0]


def test_closing_waits_for_what_is_being_loaded_and_begins_nothing_more(shelf):
    one = shelf(3, held=True)
    one.loader.start()
    assert one.begun.acquire(timeout=LONG)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(one.loader.close)
        one.permit(3)
        closing.result(LONG)
    assert one.log[0] == 0 and len(one.log) == len(one.loader)
    assert not one.loader._thread.is_alive()
    assert one.loader[name(2)] == "executable 2"  # who asks is served as before
    one.loader.close()  # again
