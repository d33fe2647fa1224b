"""A process that calls executables which may end it: python -m dflash_aot.runtime.self_test.worker

JSON lines. In: an Order, then an Entry at a time. Out: Devices, then a Trial of each.
"""

import os
import sys
from pathlib import Path
from typing import BinaryIO

import jax
import msgspec

from dflash_aot.cache.bundle.manifest import Entry, SelfTest
from dflash_aot.cache.bundle.quarantine import FaultKind
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.devices import attached_devices, read_environment
from dflash_aot.cache.environment import Environment, EnvironmentDifference, find_differences
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.signature import ArraySpec
from dflash_aot.runtime.executables.executable import is_out_of_memory, load_executable
from dflash_aot.runtime.self_test.self_test import CanaryBench, find_deviations, is_comparable


class Order(msgspec.Struct, frozen=True):
    """What all executables have in common: where they lie, on what they run, what they name, how they count."""

    bundle: str
    environment: Environment
    known: tuple[ArraySpec, ...]
    vocab: int
    dtype: str


class Devices(msgspec.Struct, frozen=True):
    """In what those here differ from the ones that were built for, or why there are none."""

    differences: tuple[EnvironmentDifference, ...] = ()
    failure: str = ""


class Trial(msgspec.Struct, frozen=True):
    """What an executable computed, or what is wrong with it and what kind of wrong; neither where memory is short.

    `compared`: with what is known of it, that is, something of the same inputs.
    """

    canary: SelfTest | None
    kind: FaultKind | None = None
    words: str = ""
    compared: bool = False


def main() -> None:
    answers, lines = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # what libraries print is no answer
    order = msgspec.json.decode(lines.readline(), type=Order)
    platform, count = order.environment.platform, order.environment.device_count
    jax.config.update("jax_platforms", {"tpu": "tpu,cpu", "gpu": "cuda,cpu"}.get(platform, platform))
    try:
        here = read_environment(platform, count)
    except RuntimeError as error:
        _send(answers, Devices(failure=str(error)))
        return
    _send(answers, Devices(tuple(find_differences(order.environment, here))))
    devices = attached_devices(platform, count)
    bench = CanaryBench({array.name: array for array in order.known}, order.vocab, devices)
    for line in lines:
        entry = msgspec.json.decode(line, type=Entry)
        _send(answers, _try(entry, bench, order, devices))


def _try(entry: Entry, bench: CanaryBench, order: Order, devices: tuple[jax.Device, ...]) -> Trial:
    store = Store(Path(order.bundle))
    try:
        executable = load_executable(
            store.read_executable(entry), entry.signature, devices, str(store.executable_path(entry))
        )
    except (CorruptBundle, IncompatibleBundle) as error:
        return Trial(None, "bytes", str(error))
    except Exception as error:  # memory is short
        return Trial(None, None, _describe(error))
    try:
        found = bench.call(executable)
    except Exception as error:  # whatever the executable, or its runtime, raises
        return Trial(None, None if is_out_of_memory(error) else "canary", _describe(error.__cause__ or error))
    if not is_comparable(entry.self_test):
        return Trial(found)
    deviations = find_deviations(entry.self_test, found, order.dtype)
    return Trial(found, "canary" if deviations else None, "; ".join(deviations), compared=True)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _send(answers: BinaryIO, message: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
