"""Supervises a subprocess that exchanges JSON lines: both ends of the pipes, and what is known of a process that ended.

The parent starts a module with `JsonProcess`; the module's `main` opens `JsonPipe`. Each message is a msgspec Struct,
as one line of JSON. The process ends after its standard input does, so it does not outlive its parent; with
`JsonPipe.exit_with_input` it ends at once.
"""

import io
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

# Time for a process to end after its standard input was closed; then it is killed.
SHUTDOWN_SECONDS = 10.0
T = TypeVar("T")


class ProcessEnded(Exception):
    """The subprocess ended before it sent a message.

    Attributes:
        returncode: as `subprocess` has it, negative for a signal.
        log: what the process wrote to standard error since it started, or since `JsonProcess.skip_log`.
    """

    def __init__(self, returncode: int, log: str):
        self.returncode = returncode
        self.log = log
        super().__init__(f"the process {self.how}")

    @property
    def how(self) -> str:
        """How the process ended: "was ended by SIGABRT", "ended with 1"."""
        if self.returncode < 0:
            return f"was ended by {signal.Signals(-self.returncode).name}"
        return f"ended with {self.returncode}"

    @property
    def was_killed(self) -> bool:
        """Whether by SIGKILL: by a person, or by a system that is short of memory."""
        return self.returncode == -signal.SIGKILL

    def last_lines(self, count: int = 1) -> list[str]:
        """The last lines of the log that are not blank, stripped at the right."""
        return [line.rstrip() for line in self.log.splitlines() if line.strip()][-count:]


class JsonProcess:
    """The parent's end: one process, from construction to `close`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        variables: Mapping[str, str] | None = None,
        log: Path | None = None,
    ):
        """Starts `python -m module arguments`.

        Args:
            module: dotted name; its `main` opens a `JsonPipe`.
            variables: environment variables in addition to those of this process.
            log: the file that gets standard error; None to discard it.
        """
        self._log = log.open("w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115  until `close`
        self._skipped = 0
        self._process = subprocess.Popen(
            # -P: imports nothing from the current directory.
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(variables or {})},
            process_group=0,  # Ctrl-C is for the parent: when it ends, so does this process's standard input
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: msgspec.Struct) -> None:
        """Writes a message. Does not raise if the process has ended: `receive` then does."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def receive(self, kind: type[T], most: int = -1) -> T:
        """Waits for the next message. Raises ProcessEnded, or msgspec.DecodeError for an invalid message.

        most: bytes of a message; the process is killed if it sends a longer one. -1: no limit.
        """
        assert self._process.stdout
        line = self._process.stdout.readline(most)
        if not line.endswith(b"\n"):
            if len(line) == most:
                self.kill()
            raise ProcessEnded(self._process.wait(), self._read_log())
        return msgspec.json.decode(line, type=kind)

    def ask(self, message: msgspec.Struct, kind: type[T], most: int = -1) -> T:
        """Sends a message and waits for the answer; arguments and errors as in `receive`."""
        self.send(message)
        return self.receive(kind, most)

    def kill(self) -> None:
        """Kills the process, also while another thread waits for a message."""
        self._process.kill()

    def send_signal(self, number: int) -> None:
        """Sends a signal, also while another thread waits for a message."""
        self._process.send_signal(number)

    def skip_log(self) -> None:
        """Leaves out of ProcessEnded what the process has written to standard error so far."""
        self._skipped = os.fstat(self._log.fileno()).st_size

    def close(self, kill: bool = False) -> None:
        """Closes standard input and waits for the end; kills the process at once, or after SHUTDOWN_SECONDS."""
        assert self._process.stdin and self._process.stdout
        if kill:
            self._process.kill()
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _read_log(self) -> str:
        self._log.seek(self._skipped)
        return self._log.read().decode(errors="replace")


class JsonPipe:
    """The subprocess's end. Takes over standard output: what libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        # A process that crashes leaves what it printed, in order.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        self._lines: Iterator[bytes] = iter(sys.stdin.buffer.readline, b"")

    def receive(self, kind: type[T]) -> T | None:
        """Waits for the next message; None at the end of standard input."""
        line = next(self._lines, None)
        return None if line is None else msgspec.json.decode(line, type=kind)

    def send(self, message: msgspec.Struct) -> None:
        self._output.write(msgspec.json.encode(message) + b"\n")
        self._output.flush()

    def exit_with_input(self, before_exit: Callable[[], None] = lambda: None) -> None:
        """From here on the end of standard input ends this process at once, whatever its other threads are doing.

        Nothing is read ahead: the next message may be for another process with this standard input.
        """
        ends = select.poll()
        ends.register(sys.stdin, 0)  # only the end

        def follow() -> None:
            ends.poll()
            before_exit()
            os._exit(0)

        threading.Thread(target=follow, daemon=True).start()
