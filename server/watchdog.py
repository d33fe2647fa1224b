"""A device that hangs raises nothing: it is noticed by what does not happen."""

from dataclasses import dataclass

from dflash_aot.runtime.metrics.counters import Counters

STALL_SECONDS = 60.0


@dataclass
class StallWatch:
    """Looks at the engine's counters now and then, at monotonic times in seconds."""

    patience: float = STALL_SECONDS
    _work: int = -1
    _since: float = 0.0

    def is_stalled(self, stats: Counters, now: float) -> bool:
        """Whether requests have been in slots for so long, and nothing has come of any of them."""
        work = stats.rounds + stats.prefill_chunks + sum(stats.finished.values())
        if work != self._work or not stats.running:
            self._work, self._since = work, now
        return now - self._since > self.patience
