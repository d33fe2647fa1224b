"""Worker processes report why they end."""

import pytest

from dflash_aot.benchmarks.messages import open_worker
from dflash_aot.cache.errors import PeerFailed
from tests.benchmarks.toy_worker import ToySpec


def test_worker_that_cannot_open_is_reported(open_toy):
    with pytest.raises(PeerFailed) as failed, open_toy(refuses=True):
        pass
    assert str(failed.value) == "the process of a toy ended with 1. Its last lines:\n  no such toy"
    missing = open_worker("nobody", "nowhere", ToySpec())
    with pytest.raises(PeerFailed, match="of nobody ended with 1(.|\n)*No module named nowhere"), missing:
        pass
