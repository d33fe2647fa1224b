"""Ways in processes of their own: they answer in turn, say why they end, and rest while others work."""

import os
import signal

import pytest

from dflash_aot.benchmarks.peer import Peer, python_module
from dflash_aot.benchmarks.traffic import Serve, Served
from dflash_aot.cache.errors import PeerFailed
from tests.benchmarks.toy_peer import Die, ToyOrder, Who, open_toy, say

WORK = Serve([[[1]]], 200_000)


def test_a_peer_answers_one_question_after_the_other_and_what_it_prints_is_no_answer():
    with open_toy() as toy:
        for last in (1, 7):
            served = toy.ask(Serve([[[3, last]]], 2), Served)
            assert served.answers[0][0].token_ids == say([3, last], 2)
            assert toy.ask(Who(), int) != os.getpid()


def test_a_peer_that_crashes_is_reported_with_its_last_lines():
    with open_toy("one way") as toy, pytest.raises(PeerFailed) as failed:
        toy.ask(Die(), Served)
    lines = str(failed.value).splitlines()
    assert lines[0] == "the process of one way ended with 1. Its last lines:"
    assert lines[-1] == "  RuntimeError: the toy is broken"
    assert 1 < len(lines) <= 6


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, "was ended by SIGTERM. Its last lines:\n  first\n  second"),
        (signal.SIGKILL, "was ended by SIGKILL: where nobody did that, memory was short. Its last lines"),
    ],
)
def test_a_peer_that_a_signal_ends_is_reported_by_its_name(number, words):
    with open_toy() as toy, pytest.raises(PeerFailed) as failed:
        toy.ask(Die(number), Served)
    assert words in str(failed.value)


def test_a_peer_that_does_not_open_says_why_without_a_stack():
    with pytest.raises(PeerFailed) as failed:
        open_toy(refuses=True)
    assert str(failed.value) == "the process of a toy ended with 1. Its last lines:\n  no such toy"


def test_a_module_that_is_not_there_is_reported():
    with pytest.raises(PeerFailed, match="of nobody ended with 1(.|\n)*No module named nowhere"):
        Peer("nobody", python_module("nowhere"), ToyOrder())


def test_an_answer_to_something_else_is_none():
    with open_toy() as toy, pytest.raises(PeerFailed, match="a toy answers what is none: Expected `object`, got `int`"):
        toy.ask(Who(), Served)


def test_a_process_ends_with_its_context():
    with open_toy() as toy:
        process = toy.ask(Who(), int)
        os.kill(process, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_peer_that_rests_uses_nothing_while_another_one_works():
    with open_toy() as resting, open_toy() as working:
        for _ in range(3):
            working.ask(WORK, Served)
            resting.ask(Who(), int)
    assert resting.idle_seconds > 0
    assert resting.idle_cpu_seconds < 0.02 * resting.idle_seconds


def test_a_peer_that_does_not_rest_is_found():
    with open_toy(burns=True) as restless, open_toy() as working:
        while restless.idle_cpu_seconds < 0.02:  # which a process that rests never uses
            working.ask(WORK, Served)
            restless.ask(Who(), int)
    assert restless.idle_cpu_seconds > 0.02 * restless.idle_seconds
