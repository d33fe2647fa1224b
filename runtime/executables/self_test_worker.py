"""Self-test worker: a subprocess that calls executables, which may crash it.

    python -m dflash_aot.runtime.executables.self_test_worker

Receives a SelfTestSetup, then one Entry at a time; sends a DeviceCheck, then a SelfTestResult for each (see
`cache.bundle.self_test`).
"""

from pathlib import Path

import jax

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.self_test import (
    DeviceCheck,
    SelfTestResult,
    SelfTestSetup,
    is_comparable,
)
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.devices import attached_devices, ignore_jax_switches, read_environment
from dflash_aot.cache.environment import find_differences
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.json_process import JsonPipe
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.runtime.executables.executable import is_out_of_memory, load_executable
from dflash_aot.runtime.executables.self_test import SelfTestCaller, find_deviations


@ignore_jax_switches()
def main() -> None:
    pipe = JsonPipe()
    pipe.exit_with_input()  # also while an executable hangs
    if not (setup := pipe.receive(SelfTestSetup)):
        return
    platform = setup.environment.platform
    count = setup.environment.device_count
    jax.config.update(
        "jax_platforms", {"tpu": "tpu,cpu", "gpu": "cuda,cpu"}.get(platform, platform)
    )
    try:
        here = read_environment(platform, count)
    except RuntimeError as error:
        pipe.send(DeviceCheck(failure=str(error)))
        return
    pipe.send(DeviceCheck(tuple(find_differences(setup.environment, here))))
    devices = attached_devices(platform, count)
    caller = SelfTestCaller({array.name: array for array in setup.known}, setup.vocab, devices)
    while entry := pipe.receive(Entry):
        pipe.send(_test(entry, caller, setup, devices))


def _test(
    entry: Entry, caller: SelfTestCaller, setup: SelfTestSetup, devices: tuple[jax.Device, ...]
) -> SelfTestResult:
    store = Store(Path(setup.bundle))
    try:
        executable = load_executable(
            store.read_executable(entry),
            entry.signature,
            devices,
            str(store.executable_path(entry)),
        )
    except (CorruptBundle, IncompatibleBundle) as error:
        # A file that cannot be read now, or not unpacked because memory is short, is not proved corrupt.
        cause = error.__cause__
        proves = not isinstance(cause, OSError) and getattr(cause, "content", True)
        return SelfTestResult(None, "bytes" if proves else None, str(error))
    except Exception as error:  # memory is short
        return SelfTestResult(None, None, _format_error(error))
    try:
        found = caller.call(executable)
    except Exception as error:  # whatever the executable, or its runtime, raises
        return SelfTestResult(
            None,
            None if is_out_of_memory(error) else "self_test",
            _format_error(error.__cause__ or error),
        )
    if not is_comparable(entry.self_test):
        return SelfTestResult(found)
    deviations = find_deviations(entry.self_test, found, setup.dtype)
    return SelfTestResult(
        found, "self_test" if deviations else None, "; ".join(deviations), compared=True
    )


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {quote_first_line(str(error))}"


if __name__ == "__main__":
    main()
