"""Streams, event loops, cancelling, closing, and what is counted meanwhile."""

import asyncio
import inspect
import itertools
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import jax
import jax.numpy as jnp
import pytest
from prometheus_client import generate_latest

from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.runtime import Engine, SamplingParams, Stream
from dflash_aot.runtime.engine_parts import load_engine_parts
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from tests.runtime.stepper import hold, wait_until

EVERYTHING = SamplingParams(stop_token_ids=())
SLOTS = 3


def up_to(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, stop_token_ids=())


def join(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("k", [0, 7])
def test_deltas_add_up_to_the_answer(serve, cases, k):
    case = cases["len70"]
    deltas = list(serve("tied", k).stream(case.prompt, up_to(len(case.answer))))
    assert join(deltas) == case.answer
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert [len(delta.token_ids) for delta in deltas[:1]] == [1]  # the first token comes with the prompt


def test_stream_result_is_complete_read_or_unread(serve, cases):
    case = cases["len30"]
    read, unread = (serve("tied", 7).stream(case.prompt, up_to(20)) for _ in range(2))
    assert join(read) == case.answer[:20]
    assert read.result().token_ids == unread.result().token_ids == case.answer[:20]


def test_read_stream_ends_at_once_when_read_again(serve, cases):
    stream = serve("tied", 7).stream(cases["len5"].prompt, up_to(5))
    assert join(stream) == cases["len5"].answer[:5]
    again: list[list] = []
    reader = threading.Thread(target=lambda: again.append(list(stream)), daemon=True)
    reader.start()
    reader.join(timeout=20)
    assert again == [[]]


def test_next_gives_one_delta_at_a_time(serve, cases):
    stream = serve("tied", 7).stream(cases["len5"].prompt, up_to(5))
    first = next(stream)
    assert join([first, *stream]) == cases["len5"].answer[:5]
    assert next(stream, None) is None


def test_leaving_a_stream_frees_its_slot(serve, cases):
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


def test_request_cancelled_in_the_queue_gives_nothing(serve, cases):
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


def test_event_loop_reads_several_streams(serve, cases):
    engine = serve("tied", 7)

    async def read(name: str) -> list[int]:
        params = up_to(len(cases[name].answer))
        return join([delta async for delta in engine.astream(cases[name].prompt, params)])

    async def read_all(names):
        return await asyncio.gather(*map(read, names))

    names = ["len1", "len131", "len30", "len5", "len70"]
    assert asyncio.run(read_all(names)) == [cases[name].answer for name in names]


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


def test_closing_an_async_stream_frees_its_slot(serve, cases):
    engine = serve("tied", 7)

    async def leave():
        stream = await engine.asubmit(cases["len30"].prompt, EVERYTHING)
        await anext(stream)
        stream.close()
        return [delta async for delta in stream][-1].finish_reason

    assert asyncio.run(leave()) == "cancelled"


@pytest.mark.parametrize("k", [0, 7])
def test_deltas_carry_their_round_outcomes(serve, cases, k):
    case = cases["len70"]
    params = SamplingParams(max_tokens=len(case.answer), stop_token_ids=(), trace=True)
    stream = serve("tied", k).stream(case.prompt, params)
    first, *others = stream
    result, rounds = stream.result(), [one for delta in others for one in delta.rounds]
    assert first.rounds == () and all(delta.rounds for delta in others)
    assert [one.accepted for one in rounds] == result.accepted
    assert [list(one.drafted) for one in rounds] == result.drafted
    assert {one.k for one in rounds} == {k}
    for delta in others[:-1]:
        assert len(delta.token_ids) == sum(one.accepted + 1 for one in delta.rounds)


def test_cancelling_the_reading_task_frees_the_slot(serve, cases):
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


def test_event_loop_gets_a_free_place_at_once(serve):
    async def read() -> list[int]:
        return join([delta async for delta in serve("tied", 7).astream([1], up_to(2), wait=0.0)])

    assert len(asyncio.run(read())) == 2


def test_closed_event_loop_affects_no_other_request(serve, cases):
    engine = serve("tied", 0)
    kept = []

    async def leave() -> None:
        stream = engine.astream(cases["len1"].prompt, EVERYTHING)
        kept.append(stream)  # not closed: its deltas go to a closed event loop
        await anext(stream)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    assert engine.generate(cases["len5"].prompt, up_to(30)).token_ids == cases["len5"].answer[:30]


# -- every way to leave a stream


def close_it(streams: list[Stream]) -> None:
    streams[0].close()


def close_its_iterator(streams: list[Stream]) -> None:
    deltas = iter(streams[0])
    next(deltas)
    deltas.close()


def leave_the_loop(streams: list[Stream]) -> None:
    for _ in streams[0]:
        break


def drop_it(streams: list[Stream]) -> None:
    del streams[0]


@pytest.mark.parametrize("leave", [close_it, close_its_iterator, leave_the_loop, drop_it])
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


@pytest.mark.parametrize("way", ["cancel", "close", "time out"])
def test_closed_async_stream_frees_its_slot_within_two_rounds(serve, cases, way):
    engine = serve("tied", 0)

    async def leave(stepper) -> int:
        stream = engine.astream(cases["len1"].prompt, EVERYTHING)
        first = asyncio.ensure_future(anext(stream))
        while not first.done():
            stepper.advance()
            await asyncio.sleep(0.001)
        while True:  # what came with the first one
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.05)
            if not waiting.done():
                break
        rounds = engine.stats().rounds
        if way == "time out":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, 0.01)
        else:
            waiting.cancel()
            await asyncio.wait([waiting])
        if way == "close":
            await stream.aclose()
        return rounds

    with hold(engine) as stepper:
        rounds = asyncio.run(leave(stepper))
        stepper.advance(2)
        assert (engine.stats().running, engine.stats().rounds - rounds) == (1, 2)


def test_leaving_an_async_iteration_frees_the_slot(serve, cases):
    engine, case = serve("tied", 0), cases["len5"]

    async def scenario() -> list[int]:
        for _ in range(2 * SLOTS):
            async for _ in engine.astream(cases["len1"].prompt, EVERYTHING):
                break
        return join([delta async for delta in engine.astream(case.prompt, up_to(30))])

    ends = engine.stats().finished.get("cancelled", 0)
    assert asyncio.run(scenario()) == case.answer[:30]
    assert engine.stats().finished["cancelled"] - ends >= 2 * SLOTS - 1


def test_waiting_request_gets_a_freed_slot_within_two_rounds(serve, cases):
    engine, case = serve("tied", 0), cases["len5"]
    with hold(engine) as stepper:
        left = [engine.stream(cases["len1"].prompt, EVERYTHING) for _ in range(SLOTS - 1)]
        waiting = [engine.stream(case.prompt, up_to(30)) for _ in range(SLOTS - 1)]
        stepper.advance(4)
        assert (engine.stats().running, engine.stats().waiting) == (SLOTS, len(waiting))
        for stream in left:
            stream.close()
        stepper.advance()
        assert (engine.stats().running, engine.stats().waiting) == (SLOTS, 0)
    assert [stream.result().token_ids for stream in waiting] == [case.answer[:30]] * len(waiting)


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


def test_signal_handler_may_close_a_stream(serve, cases, on_alarm):
    engine, case = serve("tied", 0), cases["len1"]
    with hold(engine) as stepper:
        stream = engine.stream(case.prompt, EVERYTHING)
        stepper.advance(6)

        def close() -> None:
            stream.close()
            stepper.let_go()

        on_alarm(close)
        result = stream.result()
    assert result.finish_reason == "cancelled" and result.error is None
    assert 0 < len(result.token_ids) < 10 and result.token_ids == case.answer[: len(result.token_ids)]


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine, prompt: engine.generate(prompt, EVERYTHING),
        lambda engine, prompt: engine.generate_all([prompt] * 5, EVERYTHING),
    ],
    ids=["one prompt", "several"],
)
def test_interrupted_caller_frees_slots_and_places(serve, cases, on_alarm, ask):
    engine = serve("tied", 0)

    def interrupt() -> None:
        raise Interrupt

    with hold(engine) as stepper:
        on_alarm(interrupt)
        with pytest.raises(Interrupt) as kept:  # with its frames, and what lives in them
            ask(engine, cases["len1"].prompt)
        stepper.advance(2)
        assert (engine.stats().running, engine.stats().waiting) == (1, 0)
    assert kept


# -- readers of all kinds


def test_threads_and_event_loops_share_an_engine(serve, cases):
    engine = serve("tied", 7)
    names = ["len1", "len131", "len30", "len5", "len70", "random12"]

    async def read(name: str) -> bool:
        params = up_to(len(cases[name].answer))
        return join([delta async for delta in engine.astream(cases[name].prompt, params)]) == cases[name].answer

    async def read_all() -> bool:
        return all(await asyncio.gather(*map(read, names)))

    def ask_all() -> bool:
        results = engine.generate_all([cases[name].prompt for name in names], up_to(40))
        return [result.token_ids for result in results] == [cases[name].answer[:40] for name in names]

    with ThreadPoolExecutor(6) as pool:
        loops = [pool.submit(asyncio.run, read_all()) for _ in range(3)]
        threads = [pool.submit(ask_all) for _ in range(3)]
        assert all(one.result() for one in [*loops, *threads])


def test_slow_thread_delays_no_other_request(serve, cases):
    engine = serve("tied", 0)
    unread = [engine.stream(cases["len70"].prompt, up_to(60)) for _ in range(SLOTS)]
    for stream in unread:
        next(iter(stream))  # dropping the iterator closes the stream
    unread = [engine.stream(cases["len70"].prompt, up_to(60)) for _ in range(SLOTS)]
    read = engine.generate(cases["len5"].prompt, up_to(30))
    assert read.token_ids == cases["len5"].answer[:30]
    wait_until(lambda: engine.stats().running == 0)
    assert all(stream._deltas.qsize() <= 60 for stream in unread)
    assert [join(stream) for stream in unread] == [cases["len70"].answer[:60]] * SLOTS


def test_slow_coroutine_delays_no_other_request(serve, cases):
    engine, case, other = serve("tied", 0), cases["len70"], cases["len5"]

    async def read(name: str) -> list[int]:
        return join([delta async for delta in engine.astream(cases[name].prompt, up_to(30))])

    async def scenario() -> tuple[list[int], list[int]]:
        unread = [engine.astream(case.prompt, up_to(60)) for _ in range(SLOTS)]
        begun = [await anext(stream) for stream in unread]
        answer = await read("len5")
        return answer, join([begun[0], *[delta async for delta in unread[0]]])

    assert asyncio.run(scenario()) == (other.answer[:30], case.answer[:60])


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
    with pytest.raises(EngineFailed, match="Panic: index out of bounds"):
        other.result()
    with pytest.raises(EngineFailed, match="Panic: index out of bounds"):
        engine.generate([1])
    engine.close()


def test_service_threads_may_trace_and_compile(serve, cases):
    engine, case = serve("tied", 0), cases["len131"]
    stream = engine.stream(case.prompt, EVERYTHING)
    assert float(jax.jit(lambda x: jnp.sin(x) * 3)(jnp.zeros(()))) == 0
    assert stream.result().token_ids[: len(case.answer)] == case.answer
    assert engine.stats().compile_events == 0


def test_counters_add_up(bundle, cases):
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


def test_concurrent_stats_are_consistent(serve, cases):
    engine, stop = serve("tied", 7), threading.Event()
    prompts = [cases[name].prompt for name in ("len1", "len70", "len5", "len30", "len131")] * 4

    def watch() -> int:
        last = engine.stats()
        for looks in itertools.count(1):
            stats = engine.stats()
            check_counters(stats)
            assert stats.rounds >= last.rounds and sum(stats.finished.values()) >= sum(last.finished.values())
            last = stats
            if stop.is_set():
                return looks

    with ThreadPoolExecutor(4) as pool:
        watching = [pool.submit(watch) for _ in range(4)]
        for _ in range(3):
            engine.generate_all(prompts, up_to(20))
        stop.set()
        assert all(one.result() > 10 for one in watching)


def check_counters(stats) -> None:
    assert stats.accepted == sum(stats.accepted_at) <= stats.drafted == sum(stats.verified_at)
    assert sum(stats.bucket_rounds.values()) == stats.rounds
    rows = sum(bucket.batch * rounds for (bucket, _), rounds in stats.bucket_rounds.items())
    assert stats.row_rounds + stats.padded_rows <= rows
    assert 0 <= stats.running <= stats.slots == SLOTS and stats.waiting >= 0
    assert sum(stats.finished.values()) == sum(stats.latency.counts)
    assert sum(stats.first_token.counts) <= sum(stats.queued.counts)


def test_sent_tokens_are_counted(serve, cases):
    engine = serve("tied", 7)

    def ask(name: str) -> bool:
        before = engine.stats()
        result = engine.generate(cases[name].prompt, up_to(9))
        after = engine.stats()
        told = sum(after.finished.values()) > sum(before.finished.values())
        return told and after.output_tokens - before.output_tokens >= len(result.token_ids)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, ["len1", "len5", "len30", "len70"] * 10))


def test_metrics_can_be_scraped_while_serving(serve, cases):
    engine = serve("tied", 7)
    registry, stop = engine.metrics(), threading.Event()

    def scrape() -> list[float]:
        return [read_rounds(generate_latest(registry).decode()) for _ in iter(stop.is_set, True)]

    with ThreadPoolExecutor(2) as pool:
        scraping = [pool.submit(scrape) for _ in range(2)]
        engine.generate_all([cases["len70"].prompt] * 12, up_to(40))
        stop.set()
        seen = [one.result() for one in scraping]
    assert all(one == sorted(one) and one for one in seen)
    wait_until(lambda: engine.stats().running == 0)
    assert read_rounds(generate_latest(registry).decode()) == engine.stats().rounds


def read_rounds(text: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("dflash:rounds_total"))


def test_closed_engine_refuses_requests(bundle, cases):
    engine = Engine.open(bundle("tiny"))
    engine.close()
    engine.close()
    for ask in (engine.generate, engine.stream, lambda prompt: engine.generate_all([prompt])):
        with pytest.raises(EngineFailed, match="closed"):
            ask(cases["len1"].prompt)


def test_close_ends_running_and_waiting_requests(bundle, cases):
    with Engine.open(bundle("tiny"), k=0) as engine:
        streams = [engine.stream(cases["len1"].prompt, EVERYTHING) for _ in range(200)]
    ends = [list(stream)[-1] for stream in streams]
    assert {end.finish_reason for end in ends} <= {"length", "error"} and ends[-1].finish_reason == "error"
    assert all("closed" in end.error for end in ends if end.finish_reason == "error")
    with pytest.raises(EngineFailed, match="closed"):
        streams[-1].result()


SOURCES = {inspect.getsourcefile(one) for one in (Engine, Stream, RequestQueue)}


@pytest.mark.slow
@pytest.mark.parametrize("wait", [False, True])
def test_close_forgets_no_request(bundle, wait):
    """The submitting thread is held at each source line on its way until the engine has closed."""
    opened = load_engine_parts(bundle("tiny"), None, None, 0)  # for one engine after the other
    lines = itertools.takewhile(lambda line: ends_while_closing(Engine(opened), line, wait), itertools.count())
    assert sum(1 for _ in lines) > 20


def ends_while_closing(engine: Engine, line: int, wait: bool) -> bool:
    """Whether a request reaches that line; it always ends, with an answer or a refusal."""
    count, held = itertools.count(), []
    there, go_on = threading.Event(), threading.Event()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in SOURCES:
            return None
        if event == "line" and next(count) == line:
            held.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            there.set()
            go_on.wait()
        return trace

    def ask() -> None:
        sys.settrace(trace)
        with suppress(EngineFailed):
            engine.generate([1], up_to(1), wait=wait)
        sys.settrace(None)
        there.set()

    threads = [threading.Thread(target=work, daemon=True) for work in (ask, engine.close)]
    threads[0].start()
    there.wait()
    threads[1].start()
    threads[1].join(timeout=0.3)  # it may have to wait for the one that is held
    go_on.set()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads), f"held at line {held}, it waits for ever"
    return bool(held)
