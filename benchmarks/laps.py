"""The phases of a process's life, from the moment its parent started it."""

import time


class Laps:
    """Seconds by phase; one begins where the one before ends."""

    def __init__(self, started: int):
        """`started`: what `read_clock` said in the parent, just before."""
        self.seconds: dict[str, float] = {}
        self._started = self._last = started

    @property
    def total(self) -> float:
        """Seconds from the start until now."""
        return (read_clock() - self._started) / 1e9

    def end(self, phase: str) -> None:
        """Of what began where the last phase ended."""
        now = read_clock()
        self.seconds[phase] = (now - self._last) / 1e9
        self._last = now

    def split(self, phase: str, parts: dict[str, float]) -> None:
        """Ends a phase of which `parts` are known by their own clock; what is left of it is `phase`."""
        self.end(phase)
        self.seconds[phase] -= sum(parts.values())
        rest = {phase: self.seconds.pop(phase)}
        self.seconds |= parts | rest


def read_clock() -> int:
    """Nanoseconds, the same for all processes of a machine."""
    return time.monotonic_ns()
