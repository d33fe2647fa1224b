"""Lazy loader: which thread loads what, and in which order."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.signature import ExecutableId
from dflash_aot.runtime.executables.loaded_bundle import LazyLoader
from tests.runtime.stepper import LONG


def name(number: int) -> ExecutableId:
    return "verify", (number,)


class RecordedLoader:
    """A loader of strings that records what it loads. If `held`, each load waits for a permit."""

    def __init__(self, count: int, soon: int = 0, held: bool = False):
        self.log: list[int] = []
        self.errors: dict[int, Exception] = {}
        self.begun, self._permits = threading.Semaphore(0), threading.Semaphore(0) if held else None
        self.loaded_count = threading.Semaphore(0)
        self.loader = LazyLoader(self._load, [name(number) for number in range(count)], soon)  # type: ignore[arg-type]

    def _load(self, wanted: ExecutableId) -> str:
        (number,) = wanted[1]
        self.log.append(number)
        self.begun.release()
        if self._permits:
            assert self._permits.acquire(timeout=LONG), "no permit came"
        if number in self.errors:
            raise self.errors[number]
        return f"executable {number}"

    def permit(self, count: int = 1) -> None:
        assert self._permits
        self._permits.release(count)

    def resume(self) -> None:
        self.loader.resume(self.loaded_count.release)

    def await_loaded(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.loaded_count.acquire(timeout=LONG), "no further executable was loaded"


@pytest.fixture
def make_loader() -> "Callable[..., RecordedLoader]":
    loaders: list[RecordedLoader] = []

    def make(*args: int, **facts: bool) -> RecordedLoader:
        loaders.append(RecordedLoader(*args, **facts))
        return loaders[-1]

    yield make
    for recorded in loaders:
        recorded.loader.close()


def test_look_up_loads_the_executable_once(make_loader):
    recorded = make_loader(3)
    assert [recorded.loader[name(2)], recorded.loader[name(2)]] == ["executable 2"] * 2
    assert recorded.log == [2]
    loader = recorded.loader
    assert (len(loader.list_loaded()), loader.is_loaded(name(2)), loader.is_loaded(name(1))) == (1, True, False)
    assert loader.list_loaded() == ["executable 2"]
    with pytest.raises(KeyError):
        recorded.loader[name(3)]


def test_look_up_waits_for_a_load_in_progress(make_loader):
    recorded = make_loader(1, held=True)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(recorded.loader.__getitem__, name(0)) for _ in range(4)]
        assert recorded.begun.acquire(timeout=LONG)
        recorded.permit(4)
        assert {each.result(LONG) for each in asking} == {"executable 0"}
    assert recorded.log == [0]


def test_thread_loads_everything_in_order(make_loader):
    recorded = make_loader(5)
    recorded.loader[name(3)]
    recorded.resume()
    recorded.loader.start()
    recorded.await_loaded(4)
    assert recorded.log == [3, 0, 1, 2, 4]
    assert len(recorded.loader.list_loaded()) == 5


def test_prefetched_executables_come_next(make_loader):
    recorded = make_loader(6, held=True)
    recorded.resume()
    recorded.loader.start()
    assert recorded.begun.acquire(timeout=LONG)  # the thread loads 0
    assert not recorded.loader.prefetch([name(4), name(5)])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(recorded.loader.__getitem__, name(3))
        assert recorded.begun.acquire(timeout=LONG)
        recorded.permit(6)
        assert asked.result(LONG) == "executable 3"
    recorded.await_loaded(5)
    assert recorded.log == [0, 3, 4, 5, 1, 2]
    assert recorded.loader.prefetch([name(4), name(5)])


def test_paused_thread_loads_only_what_is_needed_soon(make_loader):
    recorded = make_loader(5, soon=2)
    recorded.resume()
    recorded.loader.pause()
    recorded.loader.start()
    recorded.await_loaded(2)
    assert not recorded.loader.prefetch([name(4)])
    recorded.await_loaded()
    assert recorded.log == [0, 1, 4]
    recorded.resume()
    recorded.await_loaded(2)
    assert recorded.log == [0, 1, 4, 2, 3]


def test_corrupt_executable_raises_in_each_look_up(make_loader, caplog):
    recorded = make_loader(3)
    recorded.errors[1] = CorruptBundle("no executable. Rebuild it: so")
    recorded.resume()
    with caplog.at_level(logging.ERROR):
        recorded.loader.start()
        recorded.await_loaded(3)
    assert [str(record.msg) for record in caplog.records] == ["no executable. Rebuild it: so"]
    errors = []
    for _ in range(2):
        with pytest.raises(CorruptBundle, match="no executable. Rebuild it: so") as error:
            recorded.loader[name(1)]
        errors.append(error.value)
    assert errors[0] is not errors[1]  # an exception that is raised again keeps the frames of all callers
    assert recorded.log == [0, 1, 2]
    loader = recorded.loader
    assert (len(loader.list_loaded()), loader.is_loaded(name(1)), loader.prefetch([name(1)])) == (2, False, False)


@pytest.mark.parametrize("error", [IncompatibleBundle("no memory is free"), MemoryError("none")])
def test_load_that_failed_for_another_reason_is_tried_again(make_loader, error):
    recorded = make_loader(1)
    recorded.errors[0] = error
    with pytest.raises(type(error), match=str(error)):
        recorded.loader[name(0)]
    del recorded.errors[0]
    assert recorded.loader[name(0)] == "executable 0"
    assert recorded.log == [0, 0]


def test_close_waits_for_the_load_in_progress(make_loader):
    recorded = make_loader(3, held=True)
    recorded.loader.start()
    assert recorded.begun.acquire(timeout=LONG)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(recorded.loader.close)
        recorded.permit(3)
        closing.result(LONG)
    assert recorded.log[0] == 0 and len(recorded.log) == len(recorded.loader.list_loaded())
    assert not recorded.loader._thread.is_alive()
    assert recorded.loader[name(2)] == "executable 2"  # look-ups still work
    recorded.loader.close()  # a second call is harmless
