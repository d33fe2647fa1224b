"""Error classes of the project, each with the exit code of a command that ends with it."""

import msgspec

from dflash_aot.cache.printable import escape_line

# What msgspec raises for text that is not JSON of the expected type; its DecodeError is no ValueError in msgspec 0.20.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class DflashError(Exception):
    """Base class of all errors of the project; `exit_code` is a command's exit code.

    `args` are the lines of the message. Messages quote text from outside, which cannot add lines: each line is escaped
    and bounded by `escape_line`.
    """

    exit_code = 1

    def __init__(self, *lines: str):
        super().__init__(*map(escape_line, lines))

    def __str__(self) -> str:
        return "\n".join(self.args)


class BadInput(DflashError):
    """A flag, a request or a line of an input file cannot be used."""

    exit_code = 2


class BadCheckpoint(BadInput):
    """A checkpoint is missing, malformed, not supported, or does not match the other checkpoint of its pair."""


class StoreFailed(BadInput):
    """A shared store, or another location at a URL, is missing, unknown or unreachable."""


class StoreRefused(StoreFailed):
    """A store does not permit the operation."""


class StoreFull(StoreFailed):
    """A store has no space for an object."""


class CorruptBundle(DflashError):
    """The files of a bundle differ from its manifest, or the manifest is invalid or not signed as required."""

    exit_code = 3


class NewerBundle(CorruptBundle):
    """A manifest of a later version."""


class MissingBundle(CorruptBundle):
    """There is no bundle at the given location."""

    exit_code = 2


class IncompatibleBundle(DflashError):
    """A sound bundle cannot be served here: another environment, other weights, or too little memory."""

    exit_code = 4


class BuildFailed(DflashError):
    """A build, or another change of a bundle, could not be completed; the message gives every reason."""

    exit_code = 5


class GridMiss(DflashError):
    """A request lies outside the precompiled grid."""

    exit_code = 6


class RequestsFailed(DflashError):
    """Some requests of a file failed, and the others are answered."""

    exit_code = 7


class EngineFailed(DflashError):
    """The engine failed: for one request, or for good. The message says which."""


class HostFailed(EngineFailed):
    """A host of a group failed or vanished, and with it the group: a supervisor starts all of its hosts again."""

    exit_code = 8


class QueueFull(DflashError):
    """The request queue is full; retry later, or wait for a place in the queue."""


class VoidRecord(DflashError):
    """A benchmark ran, but its figures are invalid; the message says why."""


class PeerFailed(DflashError):
    """A benchmark's subprocess ended or sent an invalid reply; the message holds its last lines of output."""
