"""Worker processes: they answer in turn, report why they end, and end with their context."""

import os
import signal

import pytest

from dflash_aot.benchmarks.messages import Serve, Served, open_worker
from dflash_aot.cache.errors import PeerFailed
from tests.benchmarks.toy_worker import AskPid, Die, Pid, ToySpec, say


def test_worker_answers_in_turn_and_ends_with_its_context(open_toy):
    with open_toy() as toy:
        for last in (1, 7):
            served = toy.ask(Serve([[3, last]], 2), Served)
            assert served.answers[0].token_ids == say([3, last], 2)
        process = toy.ask(AskPid(), Pid).pid
        with pytest.raises(PeerFailed, match="a toy sent an invalid reply: Object missing required field"):
            toy.ask(AskPid(), Served)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (None, "the process of a toy ended with 1. Its last lines:\n"),
        (signal.SIGTERM, "was ended by SIGTERM. Its last lines:\n  first\n  second"),
        (signal.SIGKILL, "was ended by SIGKILL, probably because memory ran out. Its last lines"),
    ],
)
def test_ended_worker_is_reported_with_its_last_lines(open_toy, number, words):
    with open_toy() as toy, pytest.raises(PeerFailed) as failed:
        toy.ask(Die(number), Served)
    assert words in str(failed.value) and len(str(failed.value).splitlines()) <= 6


def test_worker_that_cannot_open_is_reported(open_toy):
    with pytest.raises(PeerFailed) as failed, open_toy(refuses=True):
        pass
    assert str(failed.value) == "the process of a toy ended with 1. Its last lines:\n  no such toy"
    missing = open_worker("nobody", "nowhere", ToySpec())
    with pytest.raises(PeerFailed, match="of nobody ended with 1(.|\n)*No module named nowhere"), missing:
        pass
