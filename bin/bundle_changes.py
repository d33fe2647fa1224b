"""`dflash-bundle verify`, `sign`, `gc`, `push` and `fetch`: the sub-commands that check, change or copy a bundle."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from dflash_aot.bin.bundle_reports import format_signers
from dflash_aot.bin.bundle_self_test import (
    SHARED,
    EmulationReport,
    SelfTestReport,
    format_emulation,
    format_self_tests,
    self_test_bundle,
)
from dflash_aot.bin.command_line import print_json, print_lines
from dflash_aot.bin.golden import AnswerReport, GoldenOptions, format_answers
from dflash_aot.cache.bundle import manifest_signature
from dflash_aot.cache.bundle.manifest import (
    MANIFEST_FILE,
    Manifest,
    parse_manifest,
    read_manifest,
    read_manifest_bytes,
    rebuild_command,
)
from dflash_aot.cache.bundle.manifest_signature import Signers, check_signature, list_signers
from dflash_aot.cache.bundle.quarantine import QUARANTINE_DIRECTORY
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import (
    BLOB_NAME,
    RECORD_NAME,
    FileFlaw,
    UnexpectedFile,
    check_consistent,
    find_file_flaws,
    find_unexpected_files,
    list_expected_files,
    quarantine_flaws,
)
from dflash_aot.cache.errors import BadInput, CorruptBundle, IncompatibleBundle, MissingBundle
from dflash_aot.cache.files.atomic_files import list_temporary_files
from dflash_aot.cache.printable import format_bytes
from dflash_aot.cache.remote.transfer import fetch_bundle, push_bundle

HOUR = 3600.0  # seconds
NO_GOLDEN = GoldenOptions()


# -- verify


class VerificationReport(msgspec.Struct, frozen=True):
    """The report of `verify`.

    Attributes:
        bundle: its directory, as given.
        files: how many files the manifest lists.
        bytes: their size.
        flaws: listed files that are missing or differ from the manifest.
        strays: files that the manifest does not list.
        signers: keys named in the signature file; None without such a file.
        verified_key: the key whose signature was verified; None where --key was not given.
        quarantined: where each broken file was moved to.
        not_quarantined: why broken files were left in place; None where none was left.
        rebuild: command that replaces the broken files.
        calls: what calling the executables showed; None without --deep, or where a file is broken.
        golden: answers compared; None without --golden and --record_golden, or where something is broken.
        emulation: what the emulated executables compute; None without --execute, or where something is broken.
    """

    bundle: str
    files: int
    bytes: int
    flaws: tuple[FileFlaw, ...]
    strays: tuple[UnexpectedFile, ...]
    signers: Signers | None
    verified_key: str | None
    quarantined: dict[str, str]
    not_quarantined: str | None
    rebuild: str
    calls: SelfTestReport | None = None
    golden: AnswerReport | None = None
    emulation: EmulationReport | None = None


class VerificationOptions(msgspec.Struct, frozen=True):
    """Flags of `verify`.

    Attributes:
        key: public key that must have signed the bundle.
        quarantine: move broken files to quarantine/.
        deep: also call every executable.
        record: also add missing self-test results to the manifest; implies `deep`.
        execute: also emulate the executables of a TPU bundle.
        emulated: where the emulated bundle stays.
        golden: answers to compare or record.
    """

    key: Path | None = None
    quarantine: bool = True
    deep: bool = False
    record: bool = False
    execute: bool = False
    emulated: Path | None = None
    golden: GoldenOptions = NO_GOLDEN


def report_verification(bundle: Path, options: VerificationOptions, as_json: bool) -> int:
    """Prints the report of `verify` and returns the exit code.

    The code is 0 if nothing is wrong, 4 (incompatible) if only answers are wrong or every executable fails, and
    otherwise 3 (corrupt).
    """
    report = verify_bundle(bundle, options)
    if as_json:
        print_json(report)
    else:
        print_lines(*format_verification(report))
    emulation = report.emulation
    if report.calls and report.calls.not_quarantined == SHARED:
        return IncompatibleBundle.exit_code
    if report.flaws or (report.calls and report.calls.faults) or (emulation and emulation.failures):
        return CorruptBundle.exit_code
    answers = (report.golden, emulation.golden if emulation else None)
    return IncompatibleBundle.exit_code if any(one and one.failures for one in answers) else 0


def verify_bundle(bundle: Path, options: VerificationOptions) -> VerificationReport:
    """Compares every file of a bundle with its manifest; moves broken files away if `quarantine` is set.

    With a public key the signature is verified first: an unsigned manifest is not parsed. Executables are called or
    emulated if all files are sound, answers compared if the executables are. Raises MissingBundle, CorruptBundle,
    BadInput, and what `self_test_bundle`, `check_emulation` and `check_answers` raise.
    """
    content = read_manifest_bytes(bundle)
    signer = check_signature(bundle, content, options.key) if options.key is not None else None
    manifest = parse_manifest(bundle, content)
    check_consistent(bundle, manifest)
    # A corrupt signature file is reported before anything is moved or run.
    signers = list_signers(bundle, content)
    promises = list_expected_files(bundle, manifest)
    flaws = find_file_flaws(bundle, manifest)
    moved, left = quarantine_flaws(bundle, manifest, flaws) if options.quarantine else ({}, None)
    calls = emulation = golden = None
    if options.deep and not flaws:
        calls = self_test_bundle(bundle, manifest, options.quarantine, options.record)
    sound = not flaws and not (calls and calls.faults)
    if options.execute and sound:
        emulation = _check_emulation(bundle, manifest, options)
    elif options.golden.wanted and sound:
        golden = _check_answers(bundle, manifest, options.golden)
    return VerificationReport(
        bundle=str(bundle),
        files=len(promises),
        bytes=sum(promise.blob.bytes for promise in promises),
        flaws=tuple(flaws),
        strays=tuple(find_unexpected_files(bundle, manifest)),
        signers=signers,
        verified_key=signer.id if signer else None,
        quarantined={str(path): str(place) for path, place in moved.items()},
        not_quarantined=left,
        rebuild=_choose_rebuild(bundle, manifest, flaws),
        calls=calls,
        golden=golden,
        emulation=emulation,
    )


def _check_emulation(
    bundle: Path, manifest: Manifest, options: VerificationOptions
) -> EmulationReport:
    from dflash_aot.bin.emulation_check import check_emulation  # noqa: PLC0415  imports JAX

    return check_emulation(bundle, manifest, options.emulated, options.golden)


def _check_answers(bundle: Path, manifest: Manifest, options: GoldenOptions) -> AnswerReport:
    from dflash_aot.bin.golden_check import check_answers  # noqa: PLC0415  imports JAX

    return check_answers(bundle, manifest, options)


def _choose_rebuild(bundle: Path, manifest: Manifest, flaws: list[FileFlaw]) -> str:
    """The command that replaces broken files: from the bundle's programs, or from the checkpoints if one is broken."""
    programs = {
        promise.path for promise in list_expected_files(bundle, manifest) if not promise.pickled
    }
    lost = any(flaw.path in programs for flaw in flaws)
    return manifest.build_command(bundle) if lost else rebuild_command(bundle)


def format_verification(report: VerificationReport) -> list[str]:
    """The report of `verify` as lines of text."""
    lines = [
        f"{flaw.path} ({flaw.label}): {flaw.field} is {flaw.found}, the manifest says {flaw.expected}"
        + (
            f"; moved to {report.quarantined[str(flaw.path)]}"
            if str(flaw.path) in report.quarantined
            else ""
        )
        for flaw in report.flaws
    ]
    lines += [
        f"{stray.path}: {stray.what}, {format_bytes(stray.bytes)}; never read"
        for stray in report.strays
    ]
    if report.not_quarantined:
        lines.append(f"broken files were left in place: {report.not_quarantined}")
    signed = (
        f"by {report.verified_key}, verified"
        if report.verified_key
        else format_signers(report.signers)
    )
    lines.append(f"signed: {signed}")
    if report.flaws:
        broken = f"{len(report.flaws)} of {report.files} files differ from the manifest"
        return [*lines, f"{broken}. Rebuild: {report.rebuild}"]
    lines.append(f"{report.files} files, {format_bytes(report.bytes)}: all match the manifest")
    if report.calls:
        lines += format_self_tests(report.calls)
    if report.emulation:
        lines += format_emulation(report.emulation)
    for answers in (report.golden, report.emulation.golden if report.emulation else None):
        lines += format_answers(answers) if answers else []
    return lines


# -- sign


def report_signing(bundle: Path, key: Path | None, as_json: bool) -> int:
    """Signs a bundle and prints the signers."""
    if key is None:
        raise BadInput(
            "sign needs --key PRIVATE.pem. Make one: openssl genpkey -algorithm ed25519 -out private.pem"
        )
    signer, signers = sign_bundle(bundle, key)
    path = bundle / manifest_signature.SIGNATURE_FILE
    if as_json:
        print_json({"bundle": bundle, "file": path, "key": signer, "signers": signers})
    else:
        print_lines(
            f"signed by {signer}: {path}, {len(signers)} signature{'s' * (len(signers) > 1)}"
        )
    return 0


def sign_bundle(bundle: Path, key: Path) -> tuple[str, list[str]]:
    """Signs a bundle whose files all match its manifest; returns the id of the key and the ids of all signers.

    Raises MissingBundle, CorruptBundle, BadInput, and BuildFailed while another process builds in the bundle.
    """
    # Imports `cryptography`, which only signing and verifying need.
    from dflash_aot.cache.bundle.ed25519 import read_private_key  # noqa: PLC0415

    signer = read_private_key(key)
    read_manifest_bytes(bundle)  # taking the lock would create a missing directory
    with Store(bundle).hold_lock():
        content = read_manifest_bytes(bundle)
        manifest = parse_manifest(bundle, content)
        check_consistent(bundle, manifest)
        if flaws := find_file_flaws(bundle, manifest):
            raise CorruptBundle(
                f"{bundle}: nothing is signed, because {len(flaws)} files differ from the manifest, for example "
                f"{flaws[0].path}. dflash-bundle verify {shlex.quote(str(bundle))} lists them"
            )
        envelope = manifest_signature.sign_manifest(bundle, content, signer)
    return signer.public.id, [signature.keyid for signature in envelope.signatures]


# -- gc

# In the order of removal: build records first, so that a record never names a missing blob.
DIRECTORIES = ("entries", "executables", "programs")


class Garbage(msgspec.Struct, frozen=True):
    """A file or directory to remove.

    Attributes:
        path: the file or directory.
        why: "not referred to", "unfinished" or "quarantined".
        bytes: its size.
        age: seconds since its last change; negative if clocks disagree.
    """

    path: Path
    why: str
    bytes: int
    age: float


def has_build_files(bundle: Path) -> bool:
    """Whether a build has written to a directory, with or without a manifest."""
    return any(map(_is_directory, (bundle / name for name in DIRECTORIES)))


def find_garbage(bundle: Path, manifest: Manifest | None, now: float) -> list[Garbage]:
    """Returns the garbage of a bundle in the order of removal; never a file that no version of this project writes.

    Without a manifest, the files of a build that never ended are garbage.

    A process that opened the bundle before its manifest was replaced may still read files of the old manifest, so that
    such a file counts as no older than the new manifest.
    """
    published = _last_change(bundle / MANIFEST_FILE) if manifest else 0.0
    found = [
        Garbage(path, why, _size(path), now - max(_last_change(path), published))
        for path, why in _find_unreferenced(bundle, manifest)
    ]
    left = [
        (path, "unfinished")
        for directory in _directories(bundle)
        for path in list_temporary_files(directory)
    ]
    left += [(path, "quarantined") for path in _list(bundle / QUARANTINE_DIRECTORY)]
    return found + [Garbage(path, why, _size(path), now - _last_change(path)) for path, why in left]


def remove_garbage(garbage: Iterable[Garbage]) -> None:
    """Removes files and directories. Raises OSError."""
    for one in garbage:
        if one.path.is_dir() and not one.path.is_symlink():
            shutil.rmtree(one.path)
        else:
            one.path.unlink(missing_ok=True)


def _find_unreferenced(bundle: Path, manifest: Manifest | None) -> Iterator[tuple[Path, str]]:
    keep = (
        {expected.path for expected in list_expected_files(bundle, manifest)} if manifest else set()
    )
    keep |= (
        {bundle / "entries" / f"{entry.key}.json" for entry in manifest.entries}
        if manifest
        else set()
    )
    for name in DIRECTORIES:
        pattern = RECORD_NAME if name == "entries" else BLOB_NAME
        for path in _list(bundle / name):
            if (
                path not in keep
                and pattern.fullmatch(path.name)
                and (path.is_symlink() or path.is_file())
            ):
                yield path, "not referred to"


def _directories(bundle: Path) -> list[Path]:
    return [bundle, *(bundle / name for name in DIRECTORIES if _is_directory(bundle / name))]


def _list(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if _is_directory(directory) else []


def _is_directory(path: Path) -> bool:
    """Whether a path is a directory itself; a link may lead out of the bundle."""
    return path.is_dir() and not path.is_symlink()


def _last_change(path: Path) -> float:
    """Returns the last change of content, name or attributes, because a copy may keep an old modification time."""
    status = path.lstat()
    return max(status.st_mtime, status.st_ctime)


def _size(path: Path) -> int:
    if _is_directory(path):
        return sum(os.lstat(inner).st_size for inner in path.rglob("*"))
    return path.lstat().st_size


class GarbageReport(msgspec.Struct, frozen=True):
    """The report of `gc`.

    Attributes:
        bundle: its directory, as given.
        dry_run: nothing was removed.
        removed: files that were removed, or would be.
        kept: unreferenced files that are younger than --keep_hours.
        bytes: size of `removed`.
    """

    bundle: str
    dry_run: bool
    removed: tuple[Garbage, ...]
    kept: tuple[Garbage, ...]
    bytes: int


def report_garbage(bundle: Path, keep_hours: float, dry_run: bool, as_json: bool) -> int:
    """Removes unreferenced files of a bundle and prints them."""
    report = collect_garbage(bundle, keep_hours, dry_run, time.time())
    if as_json:
        print_json(report)
    else:
        print_lines(*format_garbage(report, keep_hours))
    return 0


def collect_garbage(bundle: Path, keep_hours: float, dry_run: bool, now: float) -> GarbageReport:
    """Removes files that the manifest does not refer to and that did not change for `keep_hours`; 0 means any age.

    Holds the builders' lock, except for a dry run. A first build that was killed leaves no manifest: then nothing is
    referred to. Raises MissingBundle, CorruptBundle, BadInput where the bundle cannot be written, and BuildFailed while
    another process builds in it.
    """
    _read_manifest_of_builds(bundle)  # taking the lock would create a missing directory
    with nullcontext() if dry_run else Store(bundle).hold_lock():
        garbage = find_garbage(bundle, _read_manifest_of_builds(bundle), now)
        removed = [item for item in garbage if not keep_hours or item.age >= keep_hours * HOUR]
        if not dry_run:
            remove_garbage(removed)
    kept = [item for item in garbage if item not in removed]
    return GarbageReport(
        str(bundle), dry_run, tuple(removed), tuple(kept), sum(item.bytes for item in removed)
    )


def _read_manifest_of_builds(bundle: Path) -> Manifest | None:
    """The manifest; None where a first build did not get to write it. Raises MissingBundle, CorruptBundle."""
    try:
        return read_manifest(bundle)
    except MissingBundle:
        if has_build_files(bundle):
            return None
        raise


def format_garbage(report: GarbageReport, keep_hours: float) -> list[str]:
    """The report of `gc` as lines of text."""
    lines = [f"{item.path}: {item.why}, {format_bytes(item.bytes)}" for item in report.removed]
    if report.kept:
        young = f"they, or the manifest, changed less than {keep_hours:g} hours ago"
        lines.append(
            f"{len(report.kept)} unreferenced files are kept: {young}. --keep_hours 0 removes them too"
        )
    done = "would be removed" if report.dry_run else "removed"
    count = f"{len(report.removed)} file{'s' * (len(report.removed) != 1)}"
    return [*lines, f"{count}, {format_bytes(report.bytes)} {done}"]


# -- push and fetch


def report_push(bundle: Path, url: str, as_json: bool) -> int:
    """Copies a bundle to a URL and prints how many files were sent."""
    pushed = push_bundle(bundle, url)
    if as_json:
        print_json({"bundle": bundle, **msgspec.to_builtins(pushed)})
    else:
        sent = (
            f"{pushed.sent} files sent, {format_bytes(pushed.bytes)}; {pushed.kept} existed already"
        )
        print_lines(f"{pushed.url}: {sent}")
    return 0


def report_fetch(url: str, key: Path | None, as_json: bool) -> int:
    """Fetches a bundle and prints the directory of the local copy."""
    bundle = fetch_with_progress(url, key)
    if as_json:
        print_json({"bundle": bundle})
    else:
        print_lines(str(bundle))
    return 0


def fetch_with_progress(url: str, signed_by: Path | None) -> Path:
    """Fetches a bundle as `fetch_bundle` does, on a terminal with a progress bar if it takes longer than a second."""
    shape: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False}
    with tqdm(desc="fetching", delay=1, disable=None, file=sys.stderr, **shape) as bar:

        def observe(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return fetch_bundle(url, signed_by, observe)
