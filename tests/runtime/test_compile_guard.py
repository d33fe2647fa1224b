"""Compile guard: tracing raises on the guarded thread, and only its compile events are counted."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_aot.runtime.executables.executable import CompileGuard


def fresh():
    """Returns a function that JAX has not traced yet."""
    return jax.jit(lambda x: x * 2 + 1)


@pytest.mark.parametrize("work", [lambda: fresh()(np.float32(1)), lambda: jnp.zeros(17) + 1], ids=["jit", "eager"])
def test_tracing_raises_on_the_guarded_thread(work):
    with CompileGuard().forbid_tracing(), pytest.raises(Exception, match="(?i)trac"):
        work()
    work()


def test_other_threads_may_trace_and_are_not_counted():
    guard = CompileGuard()
    with guard.forbid_tracing(), ThreadPoolExecutor() as pool:
        assert pool.submit(lambda: float(fresh()(np.float32(1)))).result() == 3.0
    assert guard.events == 0


def test_compilation_on_the_guarded_thread_is_counted():
    guard, lowered = CompileGuard(), fresh().lower(np.float32(1))
    with guard.forbid_tracing():
        lowered.compile()
    counted = guard.events
    assert counted > 0
    fresh()(np.float32(1))  # after the guard nothing is counted
    assert guard.events == counted
