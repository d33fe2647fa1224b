"""Streams, event loops, cancelling, closing, and what is counted meanwhile."""

import asyncio
import signal
from collections.abc import Callable

import pytest

from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.runtime import Engine, SamplingParams, Stream
from tests.runtime.stepper import finish, hold, join, up_to, wait_until

EVERYTHING = SamplingParams(stop_token_ids=())


def test_stream_result_is_complete_read_or_unread(serve, cases):
    case = cases["len30"]
    read, unread = (serve("tied", 7).stream(case.prompt, up_to(20)) for _ in range(2))
    first = next(read)
    assert join([first, *read]) == case.answer[:20]
    assert finish(lambda: list(read)) == [] and next(read, None) is None
    read.close()  # changes nothing
    assert read.result().token_ids == unread.result().token_ids == case.answer[:20]
    assert read.result().finish_reason == "length"


def test_asubmit_queues_or_refuses_before_it_returns(serve, cases):
    engine, case = serve("tied", 7), cases["len30"]

    async def submit():
        stream = await engine.asubmit(case.prompt, up_to(20))
        with pytest.raises(BadInput, match="the prompt is empty"):
            await engine.asubmit([], up_to(20))
        deltas = [delta async for delta in stream]
        return deltas, [delta async for delta in stream], await stream.result()

    deltas, again, result = asyncio.run(submit())
    assert join(deltas) == result.token_ids == case.answer[:20] and again == []


def test_agenerate_returns_the_answer_and_frees_its_slot_when_cancelled(serve, cases):
    engine, case = serve("tied", 7), cases["len30"]
    assert asyncio.run(engine.agenerate(case.prompt, up_to(20))).token_ids == case.answer[:20]

    async def cancel(stepper) -> None:
        task = asyncio.ensure_future(engine.agenerate(cases["len1"].prompt, EVERYTHING))
        while engine.stats().running < 2:
            stepper.advance()
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with hold(engine) as stepper:
        asyncio.run(cancel(stepper))
        stepper.advance(2)
        assert engine.stats().running == 1


@pytest.mark.parametrize("k", [0, 7])
def test_deltas_add_up_to_the_answer_with_its_rounds(serve, cases, k):
    case = cases["len70"]
    params = SamplingParams(max_tokens=len(case.answer), stop_token_ids=(), trace=True)
    stream = serve("tied", k).stream(case.prompt, params)
    first, *others = stream
    result, rounds = stream.result(), [one for delta in others for one in delta.rounds]
    assert join([first, *others]) == result.token_ids == case.answer
    assert [delta.finish_reason for delta in others] == [None] * (len(others) - 1) + ["length"]
    assert first.rounds == () and all(delta.rounds for delta in others)
    assert [one.accepted for one in rounds] == result.accepted
    assert [list(one.drafted) for one in rounds] == result.drafted
    assert {one.k for one in rounds} == {k}
    for delta in others[:-1]:
        assert len(delta.token_ids) == sum(one.accepted + 1 for one in delta.rounds)


def test_closed_event_loop_frees_its_slot(serve, cases):
    engine, kept = serve("tied", 0), []
    before = engine.stats().finished.get("cancelled", 0)

    async def leave() -> None:
        kept.append(engine.astream(cases["len1"].prompt, EVERYTHING))
        await anext(kept[0])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    wait_until(lambda: engine.stats().running == 0)
    assert engine.stats().finished["cancelled"] == before + 1


# -- every way to leave a stream


def close_it(streams: list[Stream]) -> None:
    streams[0].close()


def leave_the_loop(streams: list[Stream]) -> None:
    for _ in streams[0]:
        break


def drop_it(streams: list[Stream]) -> None:
    del streams[0]


@pytest.mark.parametrize("leave", [close_it, leave_the_loop, drop_it])
def test_closed_stream_frees_its_slot_within_two_rounds(serve, cases, leave):
    engine, other = serve("tied", 0), cases["len5"]
    with hold(engine) as stepper:
        streams = [engine.stream(cases["len1"].prompt, EVERYTHING)]
        stepper.advance(4)
        rounds = engine.stats().rounds
        assert engine.stats().running == 2
        leave(streams)
        stepper.advance(2)
        assert (engine.stats().running, engine.stats().rounds - rounds) == (1, 2)
    assert engine.generate(other.prompt, up_to(30)).token_ids == other.answer[:30]


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which pytest would handle itself."""


@pytest.fixture
def on_alarm():
    """Runs a function in a signal handler of this thread, soon."""
    before = signal.getsignal(signal.SIGALRM)

    def start(work: Callable[[], None]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: work())
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("prompts", [1, 5])
def test_interrupted_caller_frees_slots_and_places(serve, cases, on_alarm, prompts):
    engine = serve("tied", 0)

    def interrupt() -> None:
        raise Interrupt

    with hold(engine) as stepper:
        on_alarm(interrupt)
        with pytest.raises(Interrupt) as kept:  # with its frames, and what lives in them
            if prompts == 1:
                engine.generate(cases["len1"].prompt, EVERYTHING)
            else:
                engine.generate_all([cases["len1"].prompt] * prompts, EVERYTHING)
        stepper.advance(2)
        assert (engine.stats().running, engine.stats().waiting) == (1, 0)
    assert kept


# -- readers of all kinds


def test_panic_in_the_engine_thread_ends_every_request(bundle, cases):
    """Libraries written in Rust panic with a BaseException; waiting callers must receive it."""

    class Panic(BaseException):
        pass

    class PanickingText:
        finished, tokens_kept = False, 0

        def push(self, tokens):
            raise Panic("index out of bounds")

        def flush(self):
            return ""

    engine = Engine.open(bundle("tied"), k=0)
    request = engine._build_request(cases["len5"].prompt, SamplingParams(max_tokens=8), lambda delta: None)
    request.detokenizer = PanickingText()
    other = engine.stream(cases["len5"].prompt, SamplingParams(max_tokens=200))
    engine._submit(request)
    for ask in (other.result, lambda: engine.generate([1])):
        with pytest.raises(EngineFailed, match="Panic: index out of bounds"):
            ask()
    engine.close()
