"""How many rounds of a single row one dispatch runs on the device."""

from dflash_aot.cache.grid import Bucket

BURST = 0.05  # seconds: tokens come that far apart at most, and who arrives meanwhile waits for two of these at most
WEIGHT = 0.25  # of the latest time in the mean


class BurstLength:
    """As many as pass within a burst, by how long rounds of a bucket took; until that is known, one at a time."""

    def __init__(self, most: int, burst: float = BURST):
        self._most, self._burst = most, burst
        self._seconds: dict[Bucket, float] = {}

    def note(self, bucket: Bucket, seconds: float) -> None:
        """A round of it took so long, right behind another one."""
        before = self._seconds.get(bucket, seconds)
        self._seconds[bucket] = before + WEIGHT * (seconds - before)

    def choose(self, bucket: Bucket, room: int) -> int:
        """Rounds, at least 1 and at most `room`, for which there are positions."""
        seconds = self._seconds.get(bucket)
        if seconds is None:
            return 1
        return max(1, min(self._most, room, int(self._burst / seconds)))
