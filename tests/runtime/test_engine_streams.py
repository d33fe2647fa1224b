"""Streams, event loops, cancelling, closing, and what is counted meanwhile."""

import asyncio
import inspect
import itertools
import sys
import threading
from contextlib import suppress

import jax
import jax.numpy as jnp
import pytest

from dflash_aot.cache.errors import EngineFailed
from dflash_aot.runtime import Engine, SamplingParams

EVERYTHING = SamplingParams(stop_token_ids=())
SLOTS = 3


def up_to(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, stop_token_ids=())


def join(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("k", [0, 7])
def test_deltas_add_up_to_the_answer_and_only_the_last_one_ends_it(serve, cases, k):
    case = cases["len70"]
    deltas = list(serve("tied", k).stream(case.prompt, up_to(len(case.answer))))
    assert join(deltas) == case.answer
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert [len(delta.token_ids) for delta in deltas[:1]] == [1]  # the first token comes with the prompt


def test_a_stream_s_result_is_whole_whether_it_was_read_or_not(serve, cases):
    case = cases["len30"]
    read, unread = (serve("tied", 7).stream(case.prompt, up_to(20)) for _ in range(2))
    assert join(read) == case.answer[:20]
    assert read.result().token_ids == unread.result().token_ids == case.answer[:20]


def test_a_stream_that_has_been_read_ends_at_once_when_it_is_read_again(serve, cases):
    stream = serve("tied", 7).stream(cases["len5"].prompt, up_to(5))
    assert join(stream) == cases["len5"].answer[:5]
    again: list[list] = []
    reader = threading.Thread(target=lambda: again.append(list(stream)), daemon=True)
    reader.start()
    reader.join(timeout=20)
    assert again == [[]]


def test_leaving_a_stream_early_frees_its_slot_for_the_next(serve, cases):
    engine = serve("tied", 0)
    left = [engine.stream(cases["len1"].prompt, EVERYTHING) for _ in range(SLOTS)]
    for stream in left:
        for delta in stream:
            assert delta.finish_reason is None
            break
    waiting = engine.stream(cases["len5"].prompt, up_to(30))
    assert waiting.result().token_ids == cases["len5"].answer[:30]
    for stream in left:
        result = stream.result()
        assert result.finish_reason == "cancelled"
        assert result.token_ids[:48] == cases["len1"].answer[: len(result.token_ids)]


def test_a_request_cancelled_before_its_turn_gives_nothing_and_harms_nobody(serve, cases):
    engine = serve("tied", 0)
    running = [engine.stream(cases["len70"].prompt, up_to(60)) for _ in range(SLOTS)]
    waiting, behind = (engine.stream(cases["len5"].prompt, up_to(30)) for _ in range(2))
    waiting.close()
    assert (waiting.result().token_ids, waiting.result().finish_reason) == ([], "cancelled")
    assert behind.result().token_ids == cases["len5"].answer[:30]
    assert [stream.result().token_ids for stream in running] == [cases["len70"].answer[:60]] * SLOTS


def test_closing_a_finished_stream_changes_nothing(serve, cases):
    stream = serve("tied", 7).stream(cases["len5"].prompt, up_to(5))
    list(stream)
    stream.close()
    assert (stream.result().finish_reason, stream.result().token_ids) == ("length", cases["len5"].answer[:5])


def test_an_event_loop_reads_several_streams_at_once(serve, cases):
    engine = serve("tied", 7)

    async def read(name: str) -> list[int]:
        params = up_to(len(cases[name].answer))
        return join([delta async for delta in engine.astream(cases[name].prompt, params)])

    async def read_all(names):
        return await asyncio.gather(*map(read, names))

    names = ["len1", "len131", "len30", "len5", "len70"]
    assert asyncio.run(read_all(names)) == [cases[name].answer for name in names]


def test_cancelling_the_task_that_reads_frees_the_slot(serve, cases):
    engine = serve("tied", 0)

    async def leave(started: asyncio.Event) -> None:
        async for _ in engine.astream(cases["len1"].prompt, EVERYTHING):
            started.set()

    async def scenario() -> list[int]:
        started = [asyncio.Event() for _ in range(SLOTS)]
        tasks = [asyncio.create_task(leave(one)) for one in started]
        await asyncio.gather(*(one.wait() for one in started))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        return join([delta async for delta in engine.astream(cases["len5"].prompt, up_to(30))])

    assert asyncio.run(scenario()) == cases["len5"].answer[:30]


def test_an_event_loop_that_has_gone_harms_nobody(serve, cases):
    engine = serve("tied", 0)
    kept = []

    async def leave() -> None:
        stream = engine.astream(cases["len1"].prompt, EVERYTHING)
        kept.append(stream)  # nobody closes it: its deltas go to a loop that is closed
        await anext(stream)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    assert engine.generate(cases["len5"].prompt, up_to(30)).token_ids == cases["len5"].answer[:30]


def test_a_panic_in_the_engines_thread_ends_every_request_with_its_name(bundle, cases):
    """Libraries written in Rust panic with a BaseException; whoever waits must hear of it."""

    class Panic(BaseException):
        pass

    class PanickingText:
        finished = False

        def push(self, tokens):
            raise Panic("index out of bounds")

        def flush(self):
            return ""

    engine = Engine.open(bundle("tied"), k=0)
    request = engine._prepare_request(cases["len5"].prompt, SamplingParams(max_tokens=8), lambda delta: None)
    request.text = PanickingText()
    other = engine.stream(cases["len5"].prompt, SamplingParams(max_tokens=200))
    engine._submit(request)
    with pytest.raises(EngineFailed, match="Panic: index out of bounds"):
        other.result()
    with pytest.raises(EngineFailed, match="Panic: index out of bounds"):
        engine.generate([1])
    engine.close()


def test_a_service_may_trace_and_compile_on_its_own_threads_meanwhile(serve, cases):
    engine, case = serve("tied", 0), cases["len131"]
    stream = engine.stream(case.prompt, EVERYTHING)
    assert float(jax.jit(lambda x: jnp.sin(x) * 3)(jnp.zeros(()))) == 0
    assert stream.result().token_ids[: len(case.answer)] == case.answer
    assert engine.stats().compile_events == 0


def test_what_is_counted_adds_up(bundle, cases):
    with Engine.open(bundle("tiny")) as engine:
        assert engine.k == 3
        assert engine.stats().rounds == engine.stats().compile_events == 0
        results = [engine.generate(cases["len1"].later(cut).prompt, up_to(9)) for cut in range(12)]
        stats = engine.stats()
    accepted = [count for result in results for count in result.accepted]
    assert stats.accepted == sum(accepted) == sum(stats.accepted_at) > 0
    assert stats.row_rounds == len(accepted) <= stats.rounds
    assert stats.drafted == sum(stats.verified_at) >= stats.accepted
    assert stats.accepted_at == [sum(count > position for count in accepted) for position in range(3)]
    assert stats.prefill_chunks == len(results)  # no prompt is longer than a chunk
    assert (stats.compile_events, stats.moves) == (0, 0)
    assert all(0 < result.first_token_seconds <= result.seconds for result in results)


def test_a_closed_engine_refuses_and_says_so(bundle, cases):
    engine = Engine.open(bundle("tiny"))
    engine.close()
    engine.close()
    for ask in (engine.generate, engine.stream, lambda prompt: engine.generate_all([prompt])):
        with pytest.raises(EngineFailed, match="closed"):
            ask(cases["len1"].prompt)


def test_closing_ends_what_is_running_and_what_is_waiting(bundle, cases):
    with Engine.open(bundle("tiny"), k=0) as engine:
        streams = [engine.stream(cases["len1"].prompt, EVERYTHING) for _ in range(200)]
    ends = [list(stream)[-1] for stream in streams]
    assert {end.finish_reason for end in ends} <= {"length", "error"} and ends[-1].finish_reason == "error"
    assert all("closed" in end.error for end in ends if end.finish_reason == "error")
    with pytest.raises(EngineFailed, match="closed"):
        streams[-1].result()


@pytest.mark.slow
def test_no_request_is_forgotten_wherever_it_is_when_the_engine_closes(bundle):
    """The thread that asks is held at each line of the engine's source in turn until the engine has closed."""
    lines = itertools.takewhile(lambda line: ends_while_closing(bundle("tiny"), line), itertools.count())
    assert sum(1 for _ in lines) > 10


def ends_while_closing(bundle, line: int) -> bool:
    """Whether a request comes to that line at all; with an answer or a refusal it always ends."""
    engine, count, held = Engine.open(bundle, k=0), itertools.count(), []
    there, go_on = threading.Event(), threading.Event()

    def trace(frame, event, _):
        if frame.f_code.co_filename != inspect.getsourcefile(Engine):
            return None
        if event == "line" and next(count) == line:
            held.append(frame.f_lineno)
            there.set()
            go_on.wait()
        return trace

    def ask() -> None:
        sys.settrace(trace)
        with suppress(EngineFailed):
            engine.generate([1], up_to(1))
        sys.settrace(None)
        there.set()

    threads = [threading.Thread(target=work, daemon=True) for work in (ask, engine.close)]
    threads[0].start()
    there.wait()
    threads[1].start()
    threads[1].join(timeout=1)  # it may have to wait for the one that is held
    go_on.set()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads), f"held at line {held}, it waits for ever"
    return bool(held)
