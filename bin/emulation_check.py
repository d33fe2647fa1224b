"""`dflash-bundle verify --execute`: runs what the compiler made of a TPU bundle's programs on this machine's CPU.

docs/tpu.md says what that shows and what not.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from dflash_aot.bin.bundle_self_test import EmulationReport
from dflash_aot.bin.golden import GoldenOptions
from dflash_aot.bin.golden_check import check_answers
from dflash_aot.bin.precompile_report import TerminalObserver
from dflash_aot.cache.bundle.manifest import Entry, Manifest, read_manifest
from dflash_aot.cache.bundle.self_test import ExecutableDifference, OutputDifference
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.errors import IncompatibleBundle
from dflash_aot.compile.pipeline.build_self_tests import find_lack_of_memory
from dflash_aot.compile.pipeline.emulated_build import (
    build_plain_bundle,
    emulate_bundle,
    find_topology,
    provide_cpu_devices,
)
from dflash_aot.runtime.executables.executable import Executable, load_executable
from dflash_aot.runtime.executables.loaded_bundle import bundle_devices
from dflash_aot.runtime.executables.self_test import (
    AGREEING_TOKENS,
    TOLERANCE,
    Output,
    SelfTestCaller,
)

BLOCK = "block"  # the anchors and the drafted tokens, int32 [B, T]
LIKELIEST = "top_tokens"  # of every position, by their logits, int32 [.., C]

# -- comparison of two bundles with equal signatures
#
# Every executable is called in both bundles, with the inputs of the self-test.


def compare_bundles(
    bundle: Path, manifest: Manifest, expected: Path, other: Manifest
) -> Iterator[ExecutableDifference]:
    """Yields the differences of each executable of `bundle` from its counterpart in `expected`.

    Raises CorruptBundle, IncompatibleBundle, and passes out-of-memory errors through.
    """
    known = manifest.arrays_by_name()
    vocab = manifest.target.facts.decoder.vocab
    caller = SelfTestCaller(known, vocab, bundle_devices(manifest))
    chained = manifest.draft.facts.heads.chains
    others: Mapping[str, Entry] = {entry.signature.label: entry for entry in other.entries}
    for entry in manifest.entries:
        found = caller.run(_load(bundle, manifest, entry))
        wanted = caller.run(_load(expected, other, others[entry.signature.label]))
        pairs = zip(found, wanted, strict=True)
        yield ExecutableDifference(
            entry.signature.label,
            tuple(compare_outputs(one, right, chained) for one, right in pairs),
        )


def _load(bundle: Path, manifest: Manifest, entry: Entry) -> Executable:
    store = Store(bundle)
    where = str(store.executable_path(entry))
    return load_executable(
        store.read_executable(entry), entry.signature, bundle_devices(manifest), where
    )


def compare_outputs(found: Output, wanted: Output, chained: bool = False) -> OutputDifference:
    """Returns how two arrays of equal shape differ.

    chained: a drafted token depends on the one before it, so of each block [B, T] only the first difference counts. Of
    the likeliest tokens [.., C] it counts which they are, not their order, which rounding changes.
    """
    if found.values.dtype.kind in "ib":
        differs = found.values != wanted.values
        if found.name == LIKELIEST:
            differs = ~(found.values[..., None] == wanted.values[..., None, :]).any(axis=-1)
        if chained and found.name == BLOCK:
            differs &= np.cumsum(differs, axis=1) == 1
        return OutputDifference(found.name, int(differs.sum()), differs.size, True)
    one = found.values.astype(np.float64)
    right = wanted.values.astype(np.float64)
    if not one.size:
        return OutputDifference(found.name, 0.0, 0.0, False)
    return OutputDifference(
        found.name, float(np.abs(one - right).max()), float(np.abs(right).max()), False
    )


def exceeds_rounding(output: OutputDifference, dtype: str) -> bool:
    """Whether executables of this dtype should not differ so much. NaN exceeds."""
    allowed = 1 - AGREEING_TOKENS[dtype] if output.whole else TOLERANCE[dtype]
    return not output.largest <= allowed * output.scale


# -- the check


def check_emulation(
    bundle: Path, manifest: Manifest, keep: Path | None, options: GoldenOptions
) -> EmulationReport:
    """Emulates every executable of a verified TPU bundle, and compares with the same programs built for the CPU.

    Args:
        keep: where the emulated bundle stays; None: it is removed.
        options: with a golden file or checkpoints, an engine also generates answers; without a golden file they are
            compared with those of the CPU's own programs.

    Raises BadInput, BuildFailed, IncompatibleBundle; what `emulate_bundle` and `check_answers` raise.
    """
    find_topology(bundle, manifest)
    if obstacle := find_lack_of_memory(manifest):
        raise IncompatibleBundle(
            f"executables cannot be called: {obstacle}. Use a machine with more, or a bundle with a smaller grid"
        )
    provide_cpu_devices(manifest.environment.device_count)
    select_jax_platforms("cpu")
    with _temporary_directory() as scratch:
        emulated = keep or scratch / "emulated"
        plain = scratch / "plain"
        emulate_bundle(bundle, manifest, emulated, TerminalObserver())
        build_plain_bundle(manifest, plain, TerminalObserver())
        found = read_manifest(emulated)
        wanted = read_manifest(plain)
        executables = tuple(compare_bundles(emulated, found, plain, wanted))
        failures = tuple(describe_failures(executables, manifest.dtype))
        golden = None
        if not failures and (options.wanted or options.target or options.draft):
            golden = check_answers(emulated, found, _record_plain(plain, wanted, options, scratch))
    return EmulationReport(str(keep) if keep else None, executables, failures, golden)


def _record_plain(
    plain: Path, manifest: Manifest, options: GoldenOptions, scratch: Path
) -> GoldenOptions:
    """The options, with the answers of the CPU's own programs where no golden file was given."""
    if options.wanted:
        return options
    golden = scratch / "golden.json"
    own = check_answers(plain, manifest, msgspec.structs.replace(options, record=golden))
    if own.failures:
        raise IncompatibleBundle(
            "the CPU's own programs give wrong answers on this machine:", *own.failures
        )
    return msgspec.structs.replace(options, golden=golden)


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
        wrong = [
            describe_output(output)
            for output in executable.outputs
            if exceeds_rounding(output, dtype)
        ]
        if wrong:
            yield f"{executable.label}: {'; '.join(wrong)}"


def describe_output(output: OutputDifference) -> str:
    if output.whole:
        return f"{output.largest:.0f} of {output.scale:.0f} numbers of {output.name} differ"
    return (
        f"{output.name} differs by {output.largest:.3g}, its largest number is {output.scale:.3g}"
    )
