"""How an engine ends, what it leaves behind, and what forks and spawned processes see."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.runtime import Engine, SamplingParams
from tests.runtime.stepper import LONG, finish, hold, wait_until

EVERYTHING = SamplingParams(stop_token_ids=())


def up_to(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, stop_token_ids=())


@pytest.fixture
def case(cases):
    return cases["len1"]


def test_closed_engine_releases_its_executables(bundle):
    """A process that opens engines in turn must not keep them all: each maps its code and weights."""
    engine = Engine.open(bundle("tiny"))
    engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
    engine.close()
    served = weakref.ref(engine._bundle)
    del engine
    gc.collect()
    assert served() is None


def test_closed_engine_leaves_no_array_and_no_thread(bundle, case):
    def serve_once() -> None:
        with Engine.open(bundle("tiny")) as engine:
            engine.generate(case.prompt, up_to(4))

    serve_once()
    gc.collect()
    arrays, threads = len(jax.live_arrays()), threading.active_count()
    serve_once()
    gc.collect()
    assert (len(jax.live_arrays()), threading.active_count()) == (arrays, threads)


# -- closing


def test_draining_answers_running_and_waiting_requests(bundle, case):
    engine = Engine.open(bundle("tiny"), k=0)
    with ThreadPoolExecutor(2) as pool, hold(engine) as stepper:
        streams = [engine.stream(case.prompt, up_to(5)) for _ in range(6)]
        closing = pool.submit(engine.close, drain_seconds=LONG)
        wait_until(lambda: engine.failure is not None)
        with pytest.raises(EngineFailed, match="the engine accepts no more requests: the engine was closed"):
            engine.generate(case.prompt)
        stepper.advance(3)  # it goes on
        assert not closing.done()
        stepper.let_go()
        closing.result(timeout=LONG)
    assert [stream.result().token_ids for stream in streams] == [case.answer[:5]] * len(streams)


def test_draining_ends_after_its_time(bundle, case):
    engine, seconds = Engine.open(bundle("tiny"), k=0), 0.2
    with ThreadPoolExecutor(1) as pool, hold(engine) as stepper:
        streams = [engine.stream(case.prompt, up_to(5)) for _ in range(2)]
        closing = pool.submit(engine.close, drain_seconds=seconds)
        wait_until(lambda: engine.failure is not None)
        time.sleep(seconds)
        stepper.let_go()
        closing.result(timeout=LONG)
    for stream in streams:
        with pytest.raises(EngineFailed, match="the engine was closed"):
            finish(stream.result)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_draining_an_idle_engine_returns_at_once(bundle):
    engine = Engine.open(bundle("tiny"), k=0)
    began = time.monotonic()
    engine.close(drain_seconds=LONG)
    assert time.monotonic() - began < LONG / 2


def test_exception_in_the_with_block_closes_the_engine(bundle, case):
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ZeroDivisionError), Engine.open(bundle("tiny"), k=0) as engine, hold(engine) as stepper:
            other = pool.submit(engine.generate, case.prompt, EVERYTHING)
            wait_until(lambda: engine.stats().waiting == 1)
            threading.Timer(0.05, stepper.let_go).start()  # closing waits for the step that the engine is in
            raise ZeroDivisionError
        with pytest.raises(EngineFailed, match="closed"):
            other.result(timeout=LONG)
    assert engine.failure == "the engine was closed"


def test_several_threads_close_at_once(bundle, case):
    for _ in range(3):
        engine, start = Engine.open(bundle("tiny"), k=0), threading.Barrier(5)
        streams = [engine.stream(case.prompt, EVERYTHING) for _ in range(20)]

        def close(engine: Engine = engine, start: threading.Barrier = start) -> bool:
            start.wait()
            engine.close()
            return engine._thread.is_alive()

        with ThreadPoolExecutor(5) as pool:
            alive = [pool.submit(close) for _ in range(5)]
            assert not any(one.result(timeout=LONG) for one in alive)
        ends = [list(stream)[-1].finish_reason for stream in streams]
        assert set(ends) <= {"length", "error"} and ends[-1] == "error"


# -- other processes


@pytest.fixture
def run_script(bundle, tmp_path: Path):
    """Runs a script in a subprocess with `bundle` as its argument. Returns exit code, output and errors."""

    def run(program: str, sends: signal.Signals | None = None) -> tuple[int, str, str]:
        script = tmp_path / "service.py"
        script.write_text(textwrap.dedent(program))
        process = subprocess.Popen(
            [sys.executable, str(script), str(bundle("tiny"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        try:
            if sends is not None:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
                process.send_signal(sends)
            output, errors = process.communicate(timeout=LONG)
        finally:
            process.kill()
        return process.returncode, output, errors

    return run


def test_unclosed_engine_ends_with_its_process_silently(run_script):
    """With a running request, an unread stream, and waiting requests."""
    assert run_script("""
        import contextlib, sys, threading
        from dflash_aot.cache.errors import EngineFailed
        from dflash_aot.runtime import Engine, SamplingParams

        def ask():
            with contextlib.suppress(EngineFailed):
                engine.generate([1, 2], wait=True)

        engine = Engine.open(sys.argv[1])
        streams = [engine.stream([1, 2], SamplingParams(stop_token_ids=())) for _ in range(500)]
        threading.Thread(target=ask, daemon=True).start()
        print(next(iter(streams[0])).finish_reason)
    """) == (0, "None\n", "")


def test_process_ending_in_an_exception_prints_only_that(run_script):
    code, output, errors = run_script("""
        import sys
        from dflash_aot.runtime import Engine

        engine = Engine.open(sys.argv[1])
        stream = engine.stream([1, 2])
        raise SystemExit("that was all")
    """)
    assert (code, output, errors) == (1, "", "that was all\n")


def test_terminated_process_may_drain(run_script):
    """As in docs/engine.md: the signal handler raises, and leaving the block closes the engine."""
    assert run_script(
        """
        import signal, sys, threading
        from dflash_aot.runtime import Engine, SamplingParams

        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        with Engine.open(sys.argv[1]) as engine:
            print("ready", flush=True)
            stop.wait()
            streams = [engine.stream([1, 2], SamplingParams(max_tokens=20, stop_token_ids=())) for _ in range(20)]
            engine.close(drain_seconds=60)
            print({len(stream.result().token_ids) for stream in streams})
        """,
        sends=signal.SIGTERM,
    ) == (0, "{20}\n", "")


def test_ctrl_c_ends_a_waiting_process(run_script):
    code, output, errors = run_script(
        """
        import signal, sys
        from dflash_aot.runtime import Engine, SamplingParams

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores SIGINT
        with Engine.open(sys.argv[1]) as engine:
            print("ready", flush=True)
            while True:
                engine.generate([1, 2], SamplingParams(stop_token_ids=()))
        """,
        sends=signal.SIGINT,
    )
    assert code == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt")


FORK = """
    import os, sys, traceback, warnings
    from dflash_aot.cache.errors import EngineFailed
    from dflash_aot.runtime import Engine, SamplingParams

    warnings.simplefilter("ignore")  # Python's and JAX's own, of forks
    engine = Engine.open(sys.argv[1])
    params = SamplingParams(max_tokens=9, stop_token_ids=())
    answer = engine.generate([1, 2], params).token_ids
    running = engine.stream([1, 2], SamplingParams(stop_token_ids=()))
    child = os.fork()
    if child == 0:
        asks = (
            engine.generate, engine.stream, lambda prompt: engine.generate_all([prompt], wait=True),
            lambda _: engine.stats(),
        )
        for ask in asks:
            try:
                ask([1, 2])
            except EngineFailed as error:
                print(error, flush=True)
        engine.close()
        {end}
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), engine.generate([1, 2], params).token_ids == answer)
    print(running.result().token_ids[:9] == answer)
    engine.close()
"""


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_invalid_drain_seconds_are_refused(serve, case, seconds):
    engine = serve("tiny", 3)
    with pytest.raises(BadInput, match="drain_seconds is .*at least 0"):
        engine.close(drain_seconds=seconds)
    assert engine.generate(case.prompt, up_to(5)).token_ids == case.answer[:5]


@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(0)"])
def test_fork_is_refused_and_the_parent_goes_on(run_script, end):
    code, output, errors = run_script(FORK.replace("{end}", end))
    *told, own, last = output.splitlines()
    assert len(told) == 4 and all("threads and devices do not survive a fork" in line for line in told)
    assert (code, own, last, errors) == (0, "0 True", "True", "")


def test_fork_reading_a_stream_is_refused(run_script):
    """The answer comes in the parent process only."""
    code, output, errors = run_script("""
        import os, signal, sys, warnings
        from dflash_aot.cache.errors import EngineFailed
        from dflash_aot.runtime import Engine, SamplingParams

        warnings.simplefilter("ignore")
        engine = Engine.open(sys.argv[1])
        streams = [engine.stream([1, 2], SamplingParams(stop_token_ids=())) for _ in range(200)]
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # as good as for ever
            try:
                streams[-1].result()
            except EngineFailed as error:
                print(error, flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert code == 0 and "do not survive a fork" in output and output.endswith("0\n"), (output, errors)


def test_spawned_process_opens_its_own_engine(run_script):
    assert run_script("""
        import multiprocessing, sys
        from dflash_aot.runtime import Engine, SamplingParams

        PARAMS = SamplingParams(max_tokens=9, stop_token_ids=())

        def serve(bundle):
            with Engine.open(bundle) as engine:
                return engine.generate([1, 2], PARAMS).token_ids

        if __name__ == "__main__":
            with Engine.open(sys.argv[1]) as engine, multiprocessing.get_context("spawn").Pool(1) as pool:
                theirs = pool.apply_async(serve, sys.argv[1:])
                print(engine.generate([1, 2], PARAMS).token_ids == theirs.get(timeout=100))
    """) == (0, "True\n", "")
