"""How an engine ends, what it leaves behind, and what forks and spawned processes see."""

import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.runtime import Engine
from tests.runtime.stepper import LONG, hold, up_to, wait_until


@pytest.fixture
def case(cases):
    return cases["len1"]


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


def test_engine_without_a_reference_is_closed_with_a_warning(bundle, case):
    before = threading.enumerate()  # of other tests
    engine = Engine.open(bundle("tiny"))
    stream = engine.stream(case.prompt, up_to(4))
    shown = repr(engine)
    assert shown == f"<Engine of {bundle('tiny')} on 1 cpu device, 1 slots, K up to 3: open>"
    del engine
    assert stream.result().token_ids == case.answer[:4]  # a stream keeps its engine
    with pytest.warns(ResourceWarning, match=f"{re.escape(shown)} was not closed"):
        del stream
    assert not [thread.name for thread in {*threading.enumerate()} - {*before} if thread.name.startswith("dflash-")]
    with Engine.open(bundle("tiny")) as engine:
        """Closed in time."""
    assert repr(engine).endswith(": the engine was closed>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del engine


def test_closed_engine_frees_its_memory_and_spares_that_of_another(bundle, case):
    with Engine.open(bundle("tiny")) as other:
        engine = Engine.open(bundle("tiny"))
        engine.generate(case.prompt, up_to(5))
        state = [*engine._loop._dispatcher._state._arrays.values()]
        executable = engine._bundle.executables.list_loaded()[0]
        freed = [weakref.ref(one) for one in (executable, *executable._known.values())]
        del executable
        engine.close()
        engine.close()
        gc.collect()
        assert len(state) > 1 and all(array.is_deleted() for array in state)
        assert len(freed) > 2 and all(one() is None for one in freed)
        assert engine.stats().loaded == 0
        closed = weakref.ref(engine._bundle)
        del engine
        gc.collect()
        assert closed() is None  # a process that opens engines in turn does not keep their code
        assert other.generate(case.prompt, up_to(5)).token_ids == case.answer[:5]


# -- other processes


@pytest.fixture
def run_script(bundle, tmp_path: Path):
    """Runs a script in a subprocess with `bundle` as its argument. Returns exit code, output and errors."""

    def run(program: str) -> tuple[int, str, str]:
        script = tmp_path / "service.py"
        script.write_text(textwrap.dedent(program))
        done = subprocess.run(
            [sys.executable, str(script), str(bundle("tiny"))],
            capture_output=True,
            text=True,
            timeout=LONG,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        return done.returncode, done.stdout, done.stderr

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


FORK = """
    import os, signal, sys, warnings
    from dflash_aot.cache.errors import EngineFailed
    from dflash_aot.runtime import Engine, SamplingParams

    warnings.simplefilter("ignore")  # Python's and JAX's own, of forks
    engine = Engine.open(sys.argv[1])
    params = SamplingParams(max_tokens=9, stop_token_ids=())
    answer = engine.generate([1, 2], params).token_ids
    running = engine.stream([1, 2], SamplingParams(stop_token_ids=()))
    waiting = [engine.stream([1, 2], params) for _ in range(100)]  # their answers come in the parent process only
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        asks = (
            engine.generate, engine.stream, lambda prompt: engine.generate_all([prompt], wait=True),
            lambda _: engine.stats(), lambda _: waiting[-1].result(),
        )
        for ask in (*asks, lambda _: Engine.open(sys.argv[1])):
            try:
                ask([1, 2])
            except EngineFailed as error:
                print(error, flush=True)
        engine.close()
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), engine.generate([1, 2], params).token_ids == answer)
    print(running.result().token_ids[:9] == answer)
    engine.close()
"""


def test_invalid_drain_seconds_are_refused(serve, case):
    engine = serve("tiny", 3)
    for seconds in (-1, float("nan")):
        with pytest.raises(BadInput, match="drain_seconds is .*at least 0"):
            engine.close(drain_seconds=seconds)
    assert engine.generate(case.prompt, up_to(5)).token_ids == case.answer[:5]


def test_fork_is_refused_and_the_parent_goes_on(run_script):
    code, output, errors = run_script(FORK)
    *told, own, last = output.splitlines()
    assert len(told) == 6 and all("threads and devices do not survive a fork" in line for line in told)
    assert all("'spawn' or 'forkserver'" in line for line in told)
    assert (code, own, last, errors) == (0, "0 True", "True", "")
