"""Burst length: how many rounds of a single request one multi-round step runs on the device."""

from dflash_aot.cache.grid import Bucket

BURST_SECONDS = 0.05  # between two deltas at most; a request that arrives meanwhile waits for two bursts at most
NEW_TIME_WEIGHT = 0.25  # of the latest time in the running mean


class BurstLength:
    """As many rounds as fit into a burst, by the bucket's round times so far; one round until a time is known."""

    def __init__(self, max_rounds: int, burst_seconds: float = BURST_SECONDS):
        self._max_rounds, self._burst_seconds = max_rounds, burst_seconds
        self._seconds: dict[Bucket, float] = {}

    def note_round_time(self, bucket: Bucket, seconds: float) -> None:
        """A round of this bucket took `seconds`, back to back with the previous one."""
        before = self._seconds.get(bucket, seconds)
        self._seconds[bucket] = before + NEW_TIME_WEIGHT * (seconds - before)

    def choose(self, bucket: Bucket, room: int) -> int:
        """Rounds, at least 1, and at most `room`, for which there are positions."""
        seconds = self._seconds.get(bucket)
        if seconds is None:
            return 1
        return max(1, min(self._max_rounds, room, int(self._burst_seconds / seconds)))
