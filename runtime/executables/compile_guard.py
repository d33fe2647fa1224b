"""Compile guard: forbids JAX tracing on the engine's thread while it serves, and counts compile events there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.monitoring

COMPILE_EVENTS = "/jax/core/compile/"  # prefix of JAX's monitoring events of tracing, lowering and compiling


class CompileGuard:
    """Forbids tracing on one thread and counts trace, lowering and compile events there. Other threads may trace.

    Attributes:
        events: how many such events happened on the guarded thread.
    """

    def __init__(self) -> None:
        self.events = 0
        self._thread: int | None = None

    @contextmanager
    def forbid_tracing(self) -> Iterator[None]:
        """Guards the calling thread until the context ends: tracing raises, and compile events are counted."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._count_event)
        try:
            with jax.no_tracing(True):
                yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._count_event)

    def _count_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(COMPILE_EVENTS) and threading.get_ident() == self._thread:
            self.events += 1
