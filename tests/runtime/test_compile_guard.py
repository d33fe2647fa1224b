"""Tracing is forbidden on one thread, and compile events count there and nowhere else."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_aot.runtime.executables.compile_guard import CompileGuard


def fresh():
    """A function that JAX has never seen."""
    return jax.jit(lambda x: x * 2 + 1)


def in_thread(work) -> list:
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results


@pytest.mark.parametrize(
    "work",
    [
        lambda: fresh()(np.float32(1)),
        lambda: jnp.zeros(17) + 1,
        lambda: jax.device_put(np.arange(19.0))[2:5],
        lambda: fresh().lower(np.float32(1)),
    ],
    ids=["jit", "eager", "slice", "lower"],
)
def test_tracing_raises_where_it_is_forbidden(work):
    with CompileGuard().forbid_tracing(), pytest.raises(Exception, match="(?i)trac"):
        work()
    work()


def test_another_thread_traces_and_compiles_as_it_likes_and_is_not_counted():
    watch = CompileGuard()
    with watch.forbid_tracing():
        assert in_thread(lambda: float(fresh()(np.float32(1)))) == [3.0]
    assert watch.events == 0


def test_a_compilation_on_the_watched_thread_is_counted():
    watch, lowered = CompileGuard(), fresh().lower(np.float32(1))
    with watch.forbid_tracing():
        lowered.compile()
    counted = watch.events
    assert counted > 0
    fresh()(np.float32(1))  # behind the ban nothing counts
    assert watch.events == counted


def test_compiled_calls_and_transfers_are_neither_forbidden_nor_counted():
    compiled, watch = fresh().lower(np.zeros(3, np.float32)).compile(), CompileGuard()
    compiled(jax.device_put(np.zeros(3, np.float32)))  # the first call of an executable prepares its dispatch
    with watch.forbid_tracing():
        result = compiled(jax.device_put(np.arange(3, dtype=np.float32)))
        assert np.asarray(result).tolist() == [1, 3, 5]
    assert watch.events == 0


def test_two_watches_count_their_own_threads():
    outer, inner, lowered = CompileGuard(), CompileGuard(), [fresh().lower(np.float32(1)) for _ in range(2)]

    def compile_watched() -> None:
        with inner.forbid_tracing():
            lowered[0].compile()

    with outer.forbid_tracing():
        in_thread(compile_watched)
        assert (outer.events, inner.events > 0) == (0, True)
        counted = inner.events
        lowered[1].compile()
    assert (outer.events > 0, inner.events) == (True, counted)


def test_the_ban_ends_with_an_error_too():
    watch = CompileGuard()
    with pytest.raises(ZeroDivisionError), watch.forbid_tracing():
        raise ZeroDivisionError
    assert float(fresh()(np.float32(1))) == 3
    assert watch.events == 0
