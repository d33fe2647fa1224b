"""`dflash-bundle verify --execute`: runs what the compiler made of a TPU bundle's programs on this machine's CPU.

docs/tpu.md says what that shows and what not.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dflash_aot.bin.bundle_emulation import EmulationReport
from dflash_aot.bin.golden import GoldenOptions
from dflash_aot.bin.golden_check import check_answers
from dflash_aot.bin.precompile_report import TerminalObserver
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.errors import IncompatibleBundle
from dflash_aot.cache.self_test import ExecutableDifference, OutputDifference
from dflash_aot.cache.units import format_bytes
from dflash_aot.compile.pipeline.emulated_build import (
    build_plain_bundle,
    emulate_bundle,
    find_topology,
    provide_cpu_devices,
)
from dflash_aot.compile.pipeline.self_tests import available_memory
from dflash_aot.runtime.self_test.comparison import compare_bundles, exceeds_rounding


def check_emulation(bundle: Path, manifest: Manifest, keep: Path | None, options: GoldenOptions) -> EmulationReport:
    """Emulates every executable of a verified TPU bundle, and compares with the same programs built for the CPU.

    Args:
        keep: where the emulated bundle stays; None: it is removed.
        options: with a golden file or checkpoints, an engine also generates answers; without a golden file they are
            compared with those of the CPU's own programs.

    Raises BadInput, BuildFailed, IncompatibleBundle; what `emulate_bundle` and `check_answers` raise.
    """
    find_topology(bundle, manifest)
    check_memory(manifest)
    provide_cpu_devices(manifest.environment.device_count)
    select_jax_platforms("cpu")
    with _temporary_directory() as scratch:
        emulated, plain = keep or scratch / "emulated", scratch / "plain"
        emulate_bundle(bundle, manifest, emulated, TerminalObserver())
        build_plain_bundle(manifest, plain, TerminalObserver())
        found, wanted = read_manifest(emulated), read_manifest(plain)
        executables = tuple(compare_bundles(emulated, found, plain, wanted))
        failures = tuple(describe_failures(executables, manifest.dtype))
        golden = None
        if not failures and (options.wanted or options.target or options.draft):
            golden = check_answers(emulated, found, _record_plain(plain, wanted, options, scratch))
    return EmulationReport(str(keep) if keep else None, executables, failures, golden)


def _record_plain(plain: Path, manifest: Manifest, options: GoldenOptions, scratch: Path) -> GoldenOptions:
    """The options, with the answers of the CPU's own programs where no golden file was given."""
    if options.wanted:
        return options
    golden = scratch / "golden.json"
    own = check_answers(plain, manifest, msgspec.structs.replace(options, record=golden))
    if own.failures:
        raise IncompatibleBundle("the CPU's own programs give wrong answers on this machine:", *own.failures)
    return msgspec.structs.replace(options, golden=golden)


def check_memory(manifest: Manifest) -> None:
    """Raises IncompatibleBundle where this machine lacks the memory to call the executables."""
    needed = sum(array.bytes for array in manifest.arrays_by_name().values()) + sum(one.bytes for one in manifest.state)
    available = available_memory()
    if available is not None and needed > available:
        raise IncompatibleBundle(
            f"calling the executables takes {format_bytes(needed)} of memory, and {format_bytes(available)} are "
            "available. Use a machine with more, or a bundle with a smaller grid"
        )


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="dflash-emulated-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def describe_failures(executables: Sequence[ExecutableDifference], dtype: str) -> Iterator[str]:
    """What differs more than rounding explains, one line per executable."""
    for executable in executables:
        wrong = [describe_output(output) for output in executable.outputs if exceeds_rounding(output, dtype)]
        if wrong:
            yield f"{executable.label}: {'; '.join(wrong)}"


def describe_output(output: OutputDifference) -> str:
    if output.whole:
        return f"{output.largest:.0f} of {output.scale:.0f} numbers of {output.name} differ"
    return f"{output.name} differs by {output.largest:.3g}, its largest number is {output.scale:.3g}"
