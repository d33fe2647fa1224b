"""A bundle against its manifest, file by file: everything that is wrong, at once. Nothing of it is loaded."""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.atomic_files import file_kind, is_temporary_file, read_plain
from dflash_aot.cache.bundle.blob import MAX_BLOB_BYTES, find_blob_flaw
from dflash_aot.cache.bundle.manifest import MANIFEST_FILE, Blob, Entry, Manifest
from dflash_aot.cache.bundle.quarantine import QUARANTINE_DIRECTORY, FaultKind, quarantine_file
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadInput, BuildFailed
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.signing import signatures as signature_files

RECORD_NAME = re.compile(r"[0-9a-f]{64}\.json")
BLOB_NAME = re.compile(r"[0-9a-f]{64}")


class ExpectedFile(msgspec.Struct, frozen=True):
    """A file that the manifest promises, and whose it is."""

    path: Path
    blob: Blob
    label: str

    @property
    def pickled(self) -> bool:
        """Executables are, programs are not."""
        return isinstance(self.blob, Entry)


class FileFlaw(msgspec.Struct, frozen=True):
    """What is wrong with a promised file: what was promised, what was found.

    `content`: the bytes themselves are wrong, so that it is of no use to anybody.
    """

    path: Path
    label: str
    field: str
    promised: str
    found: str
    content: bool


class UnexpectedFile(msgspec.Struct, frozen=True):
    """A file that the manifest does not promise. Nothing reads it; `what` it is, as far as its place tells."""

    path: Path
    what: str
    bytes: int


def list_expected_files(bundle: Path, manifest: Manifest) -> list[ExpectedFile]:
    """Every file once, however many entries share it."""
    store = Store(bundle)
    promises = (
        promise
        for entry in manifest.entries
        for promise in (
            ExpectedFile(store.executable_path(entry), entry, entry.signature.label),
            ExpectedFile(store.program_path(entry), entry.program, f"program of {entry.signature.label}"),
        )
    )
    return list({promise.path: promise for promise in promises}.values())


def find_file_flaws(bundle: Path, manifest: Manifest) -> list[FileFlaw]:
    """In the order of the manifest; the first of each file, then keys that do not belong to what they stand beside."""
    flaws = [flaw for promise in list_expected_files(bundle, manifest) if (flaw := check_file(promise))]
    broken = {flaw.path for flaw in flaws}
    store = Store(bundle)
    for entry in manifest.entries:
        if store.program_path(entry) not in broken and (flaw := check_key(store, entry, manifest.environment)):
            flaws.append(flaw)
    return flaws


def check_key(store: Store, entry: Entry, environment: Environment) -> FileFlaw | None:
    """The key is of what the manifest says: a signature that was changed by hand has another."""
    key = executable_key(store.read_program(entry), entry.signature, environment)
    if key == entry.key:
        return None
    label = f"program of {entry.signature.label}"
    return FileFlaw(store.program_path(entry), label, "key", entry.key, key, content=False)


def check_file(promise: ExpectedFile) -> FileFlaw | None:
    """What kind of file it is, and whether it is whole, see `unpack`."""
    blob, path = promise.blob, promise.path

    def flaw(promised: str, found: str, content: bool) -> FileFlaw:
        return FileFlaw(path, promise.label, "file", promised, found, content)

    if path.parent.is_symlink():
        return flaw("a directory of the bundle", f"{path.parent.name} is a symbolic link", content=False)
    try:
        content = read_plain(path, MAX_BLOB_BYTES)
    except FileNotFoundError:
        return flaw(f"a file of {blob.bytes} bytes", "missing", content=False)
    except OSError as error:
        # A link or a fifo is no file of the bundle's; a disk that does not answer, or permission, proves nothing.
        return flaw(f"a file of {blob.bytes} bytes", str(error.strerror), content=_is_strange(path))
    if broken := find_blob_flaw(blob, content):
        return FileFlaw(path, promise.label, broken.field, broken.promised, broken.found, broken.content)
    return None


def quarantine_flaws(bundle: Path, manifest: Manifest, flaws: list[FileFlaw]) -> tuple[dict[Path, Path], str | None]:
    """Moves away what is of no use, unless a builder has mended it by now. Where things are, or why they were left."""
    broken = {flaw.path for flaw in flaws if flaw.content}

    def find_still_broken() -> Iterator[tuple[Path, FaultKind, str]]:
        for promise in list_expected_files(bundle, manifest):
            if promise.path in broken and (flaw := check_file(promise)) and flaw.content:
                yield promise.path, "bytes", f"{flaw.field} is {flaw.found}, the manifest promises {flaw.promised}"

    return quarantine_files(bundle, find_still_broken()) if broken else ({}, None)


def quarantine_files(bundle: Path, found: Iterable[tuple[Path, FaultKind, str]]) -> tuple[dict[Path, Path], str | None]:
    """Moves away files, each with what is wrong with it; `found` is asked under the lock of all who write there.

    Where things are, or why they were left.
    """
    moved: dict[Path, Path] = {}
    try:
        with Store(bundle).hold_lock():
            for path, kind, words in found:
                if place := quarantine_file(bundle, path, kind, words):
                    moved[path] = place
    except (BadInput, BuildFailed, OSError) as error:
        return moved, str(error)
    return moved, None


def find_unexpected_files(bundle: Path, manifest: Manifest) -> list[UnexpectedFile]:
    """Everything else that lies there, in the order of its names; links are not followed."""
    promised = {promise.path for promise in list_expected_files(bundle, manifest)}
    keys = {f"{entry.key}.json" for entry in manifest.entries}
    own = {bundle / MANIFEST_FILE, bundle / signature_files.SIGNATURE_FILE, bundle / ".lock"}
    found = []
    for path in list_files(bundle):
        if path in promised or path in own or (path.parent == bundle / "entries" and path.name in keys):
            continue
        with suppress(FileNotFoundError):  # a builder at work has just finished it
            status = path.lstat()
            found.append(UnexpectedFile(path, _describe(bundle, path, status.st_mode), status.st_size))
    return found


def list_files(directory: Path) -> Iterator[Path]:
    """What is no directory, below this one. Raises OSError for one that cannot be listed."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(directory, onerror=refuse):
        folders.sort()
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from (Path(folder) / name for name in sorted([*files, *links]))


def _describe(bundle: Path, path: Path, mode: int) -> str:
    kinds: dict[str, Callable[[str], object]] = {
        "entries": RECORD_NAME.fullmatch,
        "executables": BLOB_NAME.fullmatch,
        "programs": BLOB_NAME.fullmatch,
    }
    if (bundle / QUARANTINE_DIRECTORY) in path.parents:
        return "set aside"
    if is_temporary_file(path):
        return "unfinished: a builder was killed, or is at work"
    if not stat.S_ISREG(mode):
        return f"unknown, a {file_kind(mode)}"
    known = kinds.get(path.parent.name) if path.parent.parent == bundle else None
    return "not referred to" if known and known(path.name) else "unknown"


def _is_strange(path: Path) -> bool:
    """Whether something lies there that is no file."""
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
