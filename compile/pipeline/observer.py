"""Build progress: what a build reports to its caller while it runs."""

from typing import Literal

import msgspec

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.compile.pipeline.deployment import Deployment

BuildPhase = Literal["compile", "self-test"]


class Progress(msgspec.Struct, frozen=True):
    """An executable that a phase has begun or finished.

    Attributes:
        done: executables that the phase has finished, failures included.
        total: executables of the phase.
        label: the executable's program and sizes.
        compiled: whether this build compiled the executable; False for one that was found.
        entry: the executable's entry; None when it begins, and in the self-test phase.
    """

    done: int
    total: int
    label: str
    compiled: bool = False
    entry: Entry | None = None


class BuildObserver:
    """Receives a build's progress, in the thread that called the build. Does nothing: subclasses override methods.

    An exception that a method raises ends the build.
    """

    def on_plan(self, deployment: Deployment) -> None:
        """The pair, grid and devices are known; nothing is compiled yet."""

    def on_phase(self, phase: BuildPhase, total: int) -> None:
        """A phase begins, with this number of executables."""

    def on_executable(self, progress: Progress) -> None:
        """An executable of the current phase begins or is finished."""

    def on_phase_end(self, phase: BuildPhase) -> None:
        """The phase has ended, possibly by an error."""

    def on_info(self, message: str) -> None:
        """Where executables are compiled, or why self-tests were left out."""

    def on_warning(self, message: str) -> None:
        """The build goes on, with a doubt: memory that may not suffice, a read-only store."""
