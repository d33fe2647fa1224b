"""Comparison of two bundles with equal signatures: every executable is called with the self-test's inputs in both."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dflash_aot.cache.bundle.manifest import Entry, Manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.self_test import ExecutableDifference, OutputDifference
from dflash_aot.runtime.executables.executable import Executable, load_executable
from dflash_aot.runtime.executables.loaded_bundle import bundle_devices
from dflash_aot.runtime.self_test.self_test import AGREEING_TOKENS, TOLERANCE, Output, SelfTestCaller


def compare_bundles(
    bundle: Path, manifest: Manifest, expected: Path, other: Manifest
) -> Iterator[ExecutableDifference]:
    """Yields the differences of each executable of `bundle` from that of the same signature in `expected`.

    Raises CorruptBundle, IncompatibleBundle, and passes out-of-memory errors through.
    """
    known, vocab = manifest.arrays_by_name(), manifest.target.facts.decoder.vocab
    caller = SelfTestCaller(known, vocab, bundle_devices(manifest))
    others: Mapping[str, Entry] = {entry.signature.label: entry for entry in other.entries}
    for entry in manifest.entries:
        found = caller.run(_load(bundle, manifest, entry))
        wanted = caller.run(_load(expected, other, others[entry.signature.label]))
        pairs = zip(found, wanted, strict=True)
        yield ExecutableDifference(entry.signature.label, tuple(compare_outputs(one, right) for one, right in pairs))


def _load(bundle: Path, manifest: Manifest, entry: Entry) -> Executable:
    store = Store(bundle)
    where = str(store.executable_path(entry))
    return load_executable(store.read_executable(entry), entry.signature, bundle_devices(manifest), where)


def compare_outputs(found: Output, wanted: Output) -> OutputDifference:
    """Returns how two arrays of equal shape differ."""
    if found.values.dtype.kind in "ib":
        different = int(np.count_nonzero(found.values != wanted.values))
        return OutputDifference(found.name, different, found.values.size, True)
    one, right = found.values.astype(np.float64), wanted.values.astype(np.float64)
    if not one.size:
        return OutputDifference(found.name, 0.0, 0.0, False)
    return OutputDifference(found.name, float(np.abs(one - right).max()), float(np.abs(right).max()), False)


def exceeds_rounding(output: OutputDifference, dtype: str) -> bool:
    """Whether executables of this dtype should not differ so much. NaN exceeds."""
    allowed = 1 - AGREEING_TOKENS[dtype] if output.whole else TOLERANCE[dtype]
    return not output.largest <= allowed * output.scale
