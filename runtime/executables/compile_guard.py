"""Nothing is traced or compiled while serving: forbidden on the engine's thread, and counted."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.monitoring

COMPILE_EVENTS = "/jax/core/compile/"


class CompileGuard:
    """Counts trace, lowering and compile events of one thread; others may use JAX as they like."""

    def __init__(self) -> None:
        self.events = 0
        self._thread: int | None = None

    @contextmanager
    def forbid_tracing(self) -> Iterator[None]:
        """On the calling thread, until it leaves: tracing raises, and every compile event counts."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._note)
        try:
            with jax.no_tracing(True):
                yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(COMPILE_EVENTS) and threading.get_ident() == self._thread:
            self.events += 1
