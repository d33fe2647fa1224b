"""Every refusal of this project, each with the exit code the command lines end with."""


class DflashError(Exception):
    """Base of all our errors; `exit_code` is what a command ends with when it meets one."""

    exit_code = 1


class BadInput(DflashError):
    """What the user gave cannot be used: a flag, a request, a line of a file."""

    exit_code = 2


class BadCheckpoint(BadInput):
    """A checkpoint that is missing, malformed, of another architecture, or not a pair with the other one."""


class StoreFailed(BadInput):
    """A shared store, or what else lies behind a URL, that cannot be used: not there, unknown, not reachable."""


class StoreRefused(StoreFailed):
    """One that does not allow what was asked of it."""


class CorruptBundle(DflashError):
    """An artefact whose bytes are not what its manifest promises."""

    exit_code = 3


class MissingBundle(CorruptBundle):
    """There is no bundle where one was asked for."""

    exit_code = 2


class IncompatibleBundle(DflashError):
    """A sound artefact, made for another environment or other weights."""

    exit_code = 4


class BuildFailed(DflashError):
    """At least one executable could not be built; the message lists every one."""

    exit_code = 5


class GridMiss(DflashError):
    """A request outside the precompiled grid."""

    exit_code = 6


class EngineFailed(DflashError):
    """A request ended in an error that is not its own, or the engine cannot serve any more: the message says which."""


class QueueFull(DflashError):
    """As many requests are waiting as may wait: try again later, or ask for a place in line."""


class VoidRecord(DflashError):
    """A benchmark was run, and its figures mean nothing: the message says why."""


class PeerFailed(DflashError):
    """A process that a benchmark compares with ended, or said what is no answer: the message has its last lines."""
