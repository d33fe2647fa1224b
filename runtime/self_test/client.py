"""Calls executables in a process of its own: one that takes its process down is named, and the others are tried."""

import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, Manifest, rebuild_command
from dflash_aot.cache.errors import EngineFailed, IncompatibleBundle
from dflash_aot.runtime.self_test.worker import Devices, Order, Trial


class Canaries:
    """A process as long as it lives, then the next. Needs the devices: nobody else may hold a TPU's."""

    def __init__(self, order: Order):
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  until the context is left

    def __enter__(self) -> "Canaries":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._end()
        self._log.close()

    def try_one(self, entry: Entry) -> Trial:
        """Raises IncompatibleBundle on another machine, or one without the memory; EngineFailed where none starts."""
        answer = self._ask(entry)
        if answer.endswith(b"\n"):
            trial = msgspec.json.decode(answer, type=Trial)
            if trial.canary is None and trial.kind is None:
                raise IncompatibleBundle(f"{entry.signature.label} cannot be called here: {trial.words}")
            return trial
        assert self._process
        code = self._process.wait()
        self._end()
        if code == -signal.SIGKILL:  # not its own doing: whoever has too little memory is killed so
            raise IncompatibleBundle(
                f"{entry.signature.label} cannot be called here: the process that called it was killed. Where nobody "
                "did that, memory was short"
            )
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return Trial(None, "crash", f"the process that called it {how}{self._read_last_words()}")

    def _ask(self, entry: Entry) -> bytes:
        process = self._process or self._begin()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(msgspec.json.encode(entry) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        return process.stdout.readline()

    def _begin(self) -> "subprocess.Popen[bytes]":
        self._log.truncate(0)
        self._process = subprocess.Popen(
            # -P: the folder that the user is in is no place to import from.
            [sys.executable, "-P", "-m", "dflash_aot.runtime.self_test.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(msgspec.json.encode(self._order) + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            raise EngineFailed(f"no executable can be called here{self._read_last_words()}")
        self._check(msgspec.json.decode(answer, type=Devices))
        return self._process

    def _check(self, devices: Devices) -> None:
        """What is made for another machine may crash on this one, and be none the worse for it."""
        lines = [f"  {one.field}: built for {one.built!r}, here {one.here!r}" for one in devices.differences]
        if devices.failure:
            lines.append(f"  {devices.failure}")
        if lines:
            raise IncompatibleBundle(
                f"{self._order.bundle} was built for another machine, no executable was called:\n"
                + "\n".join([*lines, f"Build it for this one: {rebuild_command(Path(self._order.bundle))}"])
            )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process:
            assert process.stdin and process.stdout
            process.kill()
            process.wait()
            process.stdout.close()
            with suppress(BrokenPipeError):  # what was not read
                process.stdin.close()

    def _read_last_words(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1].strip()}" if lines else ""


def order_canaries(bundle: Path, manifest: Manifest) -> Order:
    """For the executables of a bundle, on the devices that it is for."""
    return Order(
        bundle=str(bundle),
        environment=manifest.environment,
        known=tuple(manifest.arrays_by_name().values()),
        vocab=manifest.target.facts.decoder.vocab,
        dtype=manifest.dtype,
    )
