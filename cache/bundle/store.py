"""The executables of a bundle: blobs under the hash of their content, and a record for each under its key.

manifest.json            what is served, written last
executables/<sha256>     serialized executables, compressed
programs/<sha256>        what each was compiled from, compressed: StableHLO as `jax.export` writes it
entries/<key>.json       what each build left behind: a killed build goes on from here, a changed grid reuses it
set-aside/               what was found broken, and why
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.atomic_files import list_temporary_files, read_plain, write_atomically
from dflash_aot.cache.bundle.blob import MAX_BLOB_BYTES, BrokenBlob, check_blob_hash, decompress_blob, unpack_blob
from dflash_aot.cache.bundle.build_record import OTHER_PROGRAM, decode_record, find_record
from dflash_aot.cache.bundle.manifest import MANIFEST_FILE, Blob, Entry, Manifest, encode_manifest, rebuild_command
from dflash_aot.cache.bundle.quarantine import QUARANTINE_DIRECTORY, FaultKind, find_quarantine_record, quarantine_file
from dflash_aot.cache.errors import BadInput, BuildFailed, CorruptBundle
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.signing.signatures import remove_outdated

LOCK = ".lock"


class Store:
    """A bundle directory being built or read."""

    def __init__(self, bundle: Path):
        self.bundle = bundle
        self._executables = bundle / "executables"
        self._programs = bundle / "programs"
        self._entries = bundle / "entries"

    @contextmanager
    def open_for_building(self) -> Iterator[None]:
        """Makes the directories, holds the builders' lock, and removes what killed builders had begun to write.

        Raises BadInput where nothing can be written, BuildFailed where somebody else is at work.
        """
        with self._writing(self.bundle):
            self.bundle.mkdir(parents=True, exist_ok=True)
        with self.hold_lock():
            for room in (self._executables, self._programs, self._entries):
                with self._writing(room):
                    room.mkdir(exist_ok=True)
                    _probe(room)
            with self._writing(self.bundle):
                self._sweep()
            yield

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """The lock of all who write here, which dies with its process, in a directory that can be written.

        Raises BadInput where it cannot, BuildFailed where somebody else is at work.
        """
        with self._writing(self.bundle):
            lock = os.open(self.bundle / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            with self._writing(self.bundle):
                self._take(lock)
                _probe(self.bundle)
            yield
        finally:
            os.close(lock)

    @contextmanager
    def _writing(self, directory: Path) -> Iterator[None]:
        """Nothing is written to where a link leads: that is somebody else's. Raises BadInput, also for OSError."""
        for own in (
            self._executables,
            self._programs,
            self._entries,
            self.bundle / QUARANTINE_DIRECTORY,
            self.bundle / LOCK,
        ):
            if own.is_symlink():
                raise BadInput(
                    f"cannot write to {self.bundle}: {own.name} is a symbolic link, and may lead to what is somebody "
                    "else's. Remove it, or name another bundle"
                )
        try:
            yield
        except OSError as error:
            raise BadInput(f"cannot write to {directory}: {error.strerror}") from error

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BuildFailed(
                f"{self.bundle}: another dflash-precompile or dflash-bundle is at work here. Wait for it, or name "
                "another bundle"
            ) from error

    def _sweep(self) -> None:
        """Removes what builders that were killed had begun to write; only the lock's holder writes here."""
        for directory in (self.bundle, self._executables, self._programs, self._entries):
            for temporary in list_temporary_files(directory):
                temporary.unlink()

    def find(self, key: str, signature: Signature, program: bytes) -> Entry | None:
        """The record of what was compiled from this program before, if its blobs are whole.

        For a builder, who sets aside what is not. What is not there, or cannot be read just now, is built anew.
        """
        record = self._entries / f"{key}.json"
        if (content := self._read_or_set_aside(record)) is None:
            return None
        try:
            entry = find_record(content, key, signature, program)
        except ValueError as flaw:
            quarantine_file(self.bundle, record, "bytes", str(flaw))
            return None
        executable = self._unpack_or_set_aside(entry, self.executable_path(entry))
        found = self._unpack_or_set_aside(entry.program, self.program_path(entry))
        if executable is None or found is None:
            return None
        if found != program:
            quarantine_file(self.bundle, record, "bytes", OTHER_PROGRAM)
            return None
        return entry

    def _unpack_or_set_aside(self, blob: Blob, path: Path) -> bytes | None:
        if (content := self._read_or_set_aside(path)) is None:
            return None
        try:
            return unpack_blob(blob, content)
        except BrokenBlob as flaw:
            if flaw.content:
                quarantine_file(self.bundle, path, "bytes", str(flaw))
            return None

    def _read_or_set_aside(self, path: Path) -> bytes | None:
        """Links and the like are set aside, too; a disk that does not answer proves nothing."""
        try:
            return read_plain(path, MAX_BLOB_BYTES)
        except OSError as error:
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                quarantine_file(self.bundle, path, "bytes", str(error.strerror))
            return None

    def executable_path(self, entry: Entry) -> Path:
        """Where its executable lies."""
        return self._executables / entry.sha256

    def program_path(self, entry: Entry) -> Path:
        """Where that lies which it was compiled from."""
        return self._programs / entry.program.sha256

    def quarantine(self, entry: Entry, kind: FaultKind, words: str) -> Path | None:
        """Its blob, see `set_aside`: one that does not what it should will not be taken again."""
        return quarantine_file(self.bundle, self.executable_path(entry), kind, words)

    def stored_bytes(self, signatures: Iterable[Signature]) -> int:
        """What executables of these, and their programs, take here; one of each, for they may be of another compiler.

        By what their records say: none of it is read, or verified.
        """
        wanted, held = list(signatures), dict[Path, Blob]()
        for entry in self._list_records():
            if entry.signature in wanted:
                wanted.remove(entry.signature)
                held |= {self.executable_path(entry): entry, self.program_path(entry): entry.program}
        return sum(blob.bytes for path, blob in held.items() if _has_size(path, blob))

    def _list_records(self) -> Iterator[Entry]:
        """Those that can be read."""
        for record in self._entries.glob("*.json"):
            with suppress(OSError, ValueError):
                yield decode_record(read_plain(record))

    def add(self, entry: Entry, executable: bytes, program: bytes) -> None:
        """Blobs, as `pack` makes them, first, record second: a record never speaks of a blob that is not there.

        Raises BuildFailed for an executable that was set aside for what it does.
        """
        if refusal := find_quarantine_record(self.bundle, entry.sha256):
            record, finding = refusal
            raise BuildFailed(
                f"the compiler made again what was set aside ({finding.kind}): {finding.words}. Another compiler or "
                f"other flags may help; if the machine was at fault, remove {record} and build again"
            )
        write_atomically(self.program_path(entry), program)
        write_atomically(self.executable_path(entry), executable)
        self.write_record(entry)

    def write_record(self, entry: Entry) -> None:
        """What is known of an executable, anew; its blobs are there."""
        write_atomically(self._entries / f"{entry.key}.json", msgspec.json.encode(entry))

    def restore_records(self, manifest: Manifest) -> None:
        """What a manifest names is found again, also where records were not copied along. Raises BadInput."""
        with self._writing(self._entries):
            self._entries.mkdir(exist_ok=True)
            for entry in manifest.entries:
                if not (self._entries / f"{entry.key}.json").exists():
                    self.write_record(entry)

    def publish(self, manifest: Manifest) -> None:
        """From here on readers see the new bundle; signatures over another manifest go."""
        content = encode_manifest(manifest)
        write_atomically(self.bundle / MANIFEST_FILE, content)
        remove_outdated(self.bundle, content)  # last: where the new bundle cannot be written, the old one stays signed

    def read_executable(self, entry: Entry) -> bytes:
        """A serialized executable that is what was promised. Its pickle is scanned when it is loaded, not here as well.

        Raises CorruptBundle.
        """
        return self.unpack_executable(entry, self.read_packed(entry))

    def read_packed(self, entry: Entry) -> bytes:
        """An executable's file as it lies there, of the size and sha256 that were promised. Raises CorruptBundle."""
        with self._reading(entry):
            content = read_plain(self.executable_path(entry), MAX_BLOB_BYTES)
            check_blob_hash(entry, content)
            return content

    def unpack_executable(self, entry: Entry, packed: bytes) -> bytes:
        """What such a file holds, see `read`."""
        with self._reading(entry):
            return decompress_blob(entry, packed)

    def read_program(self, entry: Entry) -> bytes:
        """What an executable was compiled from, as it was promised. Raises CorruptBundle."""
        path = self.program_path(entry)
        with _refusing(path, f"program of {entry.signature.label}", "Build it again from its checkpoints"):
            return unpack_blob(entry.program, read_plain(path, MAX_BLOB_BYTES))

    def _reading(self, entry: Entry) -> AbstractContextManager[None]:
        return _refusing(self.executable_path(entry), entry.signature.label, f"Mend it: {rebuild_command(self.bundle)}")


@contextmanager
def _refusing(path: Path, label: str, remedy: str) -> Iterator[None]:
    """What cannot be read, or is not what was promised. Raises CorruptBundle."""
    try:
        yield
    except OSError as error:
        raise CorruptBundle(f"{path} ({label}): {error.strerror}. {remedy}") from error
    except BrokenBlob as flaw:
        remedy = remedy if flaw.content else "Make room"
        raise CorruptBundle(f"{path} ({label}): {flaw}. {remedy}") from flaw


def _probe(directory: Path) -> None:
    """Raises OSError where nothing can be written."""
    with tempfile.TemporaryFile(dir=directory):
        pass


def _has_size(path: Path, blob: Blob) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == blob.bytes
