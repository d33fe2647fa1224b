"""Server state: loading, ready, draining, failed, or stalled, as the watchdog of the device finds."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.server.api_errors import ApiError, shutting_down
from dflash_aot.server.api_keys import ApiKeys
from dflash_aot.server.limits import ServerLimits
from dflash_aot.server.served_model import ServedModel, ServingConfig, open_model

Status = Literal["loading", "ready", "draining", "stalled", "failed"]
STALL_SECONDS = 60.0


@dataclass
class Watchdog:
    """Detects a device that hangs, which raises nothing, by counters that no longer change."""

    stall_seconds: float = STALL_SECONDS
    _work: int = -1
    _since: float = 0.0
    _was_busy: bool = False  # at the last call

    def is_stalled(self, stats: Counters, now: float) -> bool:
        """Whether requests have run or waited without any progress for longer than `stall_seconds`.

        now: monotonic seconds. To be called now and then: progress is measured from call to call.
        """
        work = stats.rounds + stats.prefill_chunks + sum(stats.finished.values())
        is_busy = bool(stats.running or stats.waiting)
        if work != self._work or not (is_busy and self._was_busy):
            self._work, self._since = work, now
        self._was_busy = is_busy
        return now - self._since > self.stall_seconds


@dataclass
class ServerState:
    """The state of one server. Created before the model is opened, so that /health answers meanwhile."""

    config: ServingConfig
    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: ApiKeys = field(default_factory=ApiKeys)
    phase: str = "start"  # of opening the model
    draining: bool = False  # whether new requests are refused
    started: float = field(default_factory=time.time)
    opened: ServedModel | None = None  # whatever the status
    watchdog: Watchdog = field(default_factory=Watchdog)

    def open(self, on_phase: Callable[[str], None] = lambda _: None) -> None:
        """Opens the model; to be called in another thread. Raises what `Engine.open` raises."""

        def follow(phase: str) -> None:
            self.phase = phase
            on_phase(phase)

        self.opened = open_model(self.config, follow)

    def close(self) -> None:
        """Refuses new requests, waits up to `drain_seconds` for open requests, returns when the engine has ended."""
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
        return "stalled" if self.watchdog.is_stalled(self.opened.engine.stats(), time.monotonic()) else "ready"

    @property
    def failure(self) -> str | None:
        """Why the engine ended by itself; None while it serves, or after `close`."""
        return self.opened.engine.failure if self.opened and not self.draining else None

    @property
    def model(self) -> ServedModel:
        """The model, while it serves. Raises ApiError otherwise."""
        if self.draining:
            raise shutting_down()
        if self.opened is None:
            raise ApiError(503, f"the server is starting ({self.phase}). Try again later", "loading", retry=True)
        if self.failure is not None:
            raise ApiError(503, "the engine has failed, and this server is about to exit", "failed", retry=True)
        return self.opened
