"""Fixtures of several benchmarks: workers that are toys."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dflash_aot.benchmarks.messages import Worker, open_worker
from dflash_aot.benchmarks.record import RECORD_SCHEMA, Record, read_machine
from tests.benchmarks.toy_worker import ToySpec


@pytest.fixture
def open_toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[Worker]]:
    """Name and faults → a toy in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return lambda name, **faults: open_worker(name, "toy_worker", ToySpec(**faults))


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Record]:
    """Samples, and settings → a valid record of them."""

    def make(samples: list[dict], settings: dict | None = None) -> Record:
        return Record(RECORD_SCHEMA, "toy", "", "", "", 1.0, read_machine(0.0), settings or {}, samples, "")

    return make
