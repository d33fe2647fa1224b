"""Whether the server can be asked, from its start to its end."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dflash_aot.server.api_errors import Problem, shutting_down
from dflash_aot.server.api_keys import Keys
from dflash_aot.server.limits import Limits
from dflash_aot.server.served_model import Model, Serving, open_model
from dflash_aot.server.watchdog import StallWatch

Status = Literal["loading", "ready", "draining", "stalled", "failed"]


@dataclass
class Service:
    """Made before anything is opened, so that a health check can be answered meanwhile.

    phase: of opening. draining: nothing new is taken any more. opened: what is served, whatever its state.
    """

    serving: Serving
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=Keys)
    phase: str = "start"
    draining: bool = False
    started: float = field(default_factory=time.time)
    opened: Model | None = None
    stall: StallWatch = field(default_factory=StallWatch)

    def open(self, on_phase: Callable[[str], None] = lambda _: None) -> None:
        """In a thread of its own. Raises what `Engine.open` raises."""

        def follow(phase: str) -> None:
            self.phase = phase
            on_phase(phase)

        self.opened = open_model(self.serving, follow)

    def close(self) -> None:
        """Takes nothing more; what is under way has its time. Returns when the engine has ended."""
        self.draining = True
        if self.opened:
            self.opened.engine.close(drain_seconds=self.limits.drain_seconds)

    @property
    def status(self) -> Status:
        if self.draining:
            return "draining"
        if self.opened is None:
            return "loading"
        if self.failure is not None:
            return "failed"
        return "stalled" if self.stall.is_stalled(self.opened.engine.stats(), time.monotonic()) else "ready"

    @property
    def failure(self) -> str | None:
        """Why the engine takes nothing any more, though nobody has closed it."""
        return self.opened.engine.failure if self.opened and not self.draining else None

    @property
    def model(self) -> Model:
        """Raises Problem while nothing can be asked of it."""
        if self.draining:
            raise shutting_down()
        if self.opened is None:
            raise Problem(503, f"the server is starting ({self.phase}). Try again later", "loading", retry=True)
        if self.failure is not None:
            raise Problem(503, "the engine has failed, and this server is about to end", "failed", retry=True)
        return self.opened
