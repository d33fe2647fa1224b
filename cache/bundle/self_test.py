"""Self-test of executables: runs each in a subprocess, so that an executable that crashes is reported and others run.

The subprocess is `dflash_aot.runtime.executables.self_test_worker`. Its messages and its supervisor are here.
"""

import shlex
from pathlib import Path
from types import TracebackType
from typing import TypeGuard

import msgspec

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.bundle.manifest import (
    Entry,
    Manifest,
    SelfTest,
    can_rebuild,
    rebuild_command,
)
from dflash_aot.cache.bundle.quarantine import FaultKind
from dflash_aot.cache.environment import Environment, EnvironmentDifference
from dflash_aot.cache.errors import EngineFailed, IncompatibleBundle
from dflash_aot.cache.json_process import JsonProcess, ProcessEnded

WORKER = "dflash_aot.runtime.executables.self_test_worker"
INPUTS_VERSION = 5  # of the inputs in `runtime.executables.self_test`: results of other inputs cannot be compared


class SelfTestSetup(msgspec.Struct, frozen=True):
    """What the executables of a bundle have in common; the first message to the worker.

    Attributes:
        bundle: its directory.
        environment: the one that the bundle was built for.
        known: weights and state that signatures name.
        vocab: the target's vocabulary size.
        dtype: that of the bundle, "float32" or "bfloat16".
    """

    bundle: str
    environment: Environment
    known: tuple[ArraySpec, ...]
    vocab: int
    dtype: str


class DeviceCheck(msgspec.Struct, frozen=True):
    """The worker's answer to a SelfTestSetup.

    Attributes:
        differences: between the environment of this machine and the bundle's.
        failure: why there are no such devices.
    """

    differences: tuple[EnvironmentDifference, ...] = ()
    failure: str = ""


class SelfTestResult(msgspec.Struct, frozen=True):
    """The worker's answer to an Entry. Without record and fault, the executable could not run: memory was short.

    Attributes:
        record: what the executable computed.
        fault: the kind of fault found.
        reason: the fault, or why the executable could not run, in words.
        compared: whether the entry holds a record of the same inputs, which the result was compared with.
    """

    record: SelfTest | None
    fault: FaultKind | None = None
    reason: str = ""
    compared: bool = False


class OutputDifference(msgspec.Struct, frozen=True):
    """How an output of two executables differs.

    Attributes:
        name: of the output.
        largest: the largest difference of two numbers; for whole numbers, how many differ.
        scale: the largest absolute number; for whole numbers, how many there are.
        whole: whether the output holds whole numbers, such as tokens.
    """

    name: str
    largest: float
    scale: float
    whole: bool


class ExecutableDifference(msgspec.Struct, frozen=True):
    """How the outputs of an executable differ from those of another bundle.

    Attributes:
        label: its program and sizes.
        outputs: in the order of the signature.
    """

    label: str
    outputs: tuple[OutputDifference, ...]


class SelfTests:
    """Runs executables of a bundle, in one worker until it crashes, then in the next.

    Needs the devices: no other process may hold a TPU's.
    """

    def __init__(self, setup: SelfTestSetup):
        self._setup = setup
        self._worker: JsonProcess | None = None

    def __enter__(self) -> "SelfTests":
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._end_worker()

    def run(self, entry: Entry) -> SelfTestResult:
        """Runs an executable once.

        Raises IncompatibleBundle on another machine, or one without the memory; EngineFailed where no worker starts.
        """
        worker = self._worker or self._start_worker()
        try:
            result = worker.ask(entry, SelfTestResult)
        except ProcessEnded as end:
            self._end_worker()
            if end.was_killed:  # not by the executable: a system that is short of memory kills so
                raise IncompatibleBundle(
                    f"{entry.signature.label} cannot be called here: the process that called it was killed, "
                    "probably because memory ran out"
                ) from end
            return SelfTestResult(
                None, "crash", f"the process that called it {end.how}{_quote_log(end)}"
            )
        if result.record is None and result.fault is None:
            raise IncompatibleBundle(
                f"{entry.signature.label} cannot be called here: {result.reason}"
            )
        return result

    def _start_worker(self) -> JsonProcess:
        self._worker = JsonProcess(WORKER)
        try:
            check = self._worker.ask(self._setup, DeviceCheck)
        except ProcessEnded as end:
            raise EngineFailed(f"no executable can be called here{_quote_log(end)}") from end
        self._check_devices(check)
        return self._worker

    def _check_devices(self, check: DeviceCheck) -> None:
        """An executable for another machine may crash on this one without being broken."""
        lines = [
            f"  {one.field}: built for {one.built!r}, here {one.here!r}"
            for one in check.differences
        ]
        if check.failure:
            lines.append(f"  {check.failure}")
        if lines:
            raise IncompatibleBundle(
                f"{self._setup.bundle} was built for another machine, no executable was called:",
                *lines,
                self._advise(check),
            )

    def _advise(self, check: DeviceCheck) -> str:
        bundle = Path(self._setup.bundle)
        if not check.failure and can_rebuild(self._setup.environment, check.differences):
            return f"Build it for this one: {rebuild_command(bundle)}"
        return f"What fits it: {shlex.join(['dflash-bundle', 'inspect', str(bundle)])}"

    def _end_worker(self) -> None:
        worker = self._worker
        self._worker = None
        if worker:
            worker.close(kill=True)


def _quote_log(end: ProcessEnded) -> str:
    return "".join(f": {line.strip()}" for line in end.last_lines())


def set_up_self_tests(bundle: Path, manifest: Manifest) -> SelfTestSetup:
    """The setup of self-tests of a bundle's executables, on the devices that it was built for."""
    return SelfTestSetup(
        bundle=str(bundle),
        environment=manifest.environment,
        known=tuple(manifest.arrays_by_name().values()),
        vocab=manifest.target.facts.decoder.vocab,
        dtype=manifest.dtype,
    )


def is_shared(faults: int, called: int) -> bool:
    """Whether every executable failed. Then the environment is at fault: executables don't break all together."""
    return called > 1 and faults == called


def is_comparable(record: SelfTest | None) -> TypeGuard[SelfTest]:
    """Whether the record is of the inputs that this version makes."""
    return record is not None and record.version == INPUTS_VERSION
