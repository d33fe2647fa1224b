"""Executable store of a bundle: blobs named by the sha256 of their content, and a build record for each under its key.

manifest.json            what is served; written last
executables/<sha256>     serialized executables, compressed
programs/<sha256>        the StableHLO that each was compiled from, as `jax.export` writes it, compressed
entries/<key>.json       build records: a killed build continues from them, a build for another grid reuses them
build_inputs.json        what the programs of the manifest were made from; not part of a bundle that is pushed or signed
quarantine/              quarantined files, with the reason
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.blob import (
    MAX_BLOB_BYTES,
    BrokenBlob,
    check_blob_hash,
    decompress_blob,
    unpack_blob,
)
from dflash_aot.cache.bundle.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    Blob,
    Entry,
    Manifest,
    encode_manifest,
    rebuild_command,
)
from dflash_aot.cache.bundle.manifest_signature import remove_outdated
from dflash_aot.cache.bundle.quarantine import (
    QUARANTINE_DIRECTORY,
    FaultKind,
    find_quarantine_record,
    quarantine_file,
)
from dflash_aot.cache.errors import MALFORMED, BadInput, BuildFailed, CorruptBundle
from dflash_aot.cache.files.atomic_files import list_temporary_files, read_plain, write_atomically
from dflash_aot.cache.files.directory_lock import LOCK_FILE, LockHeld, hold_directory_lock
from dflash_aot.cache.signature import Signature

INPUTS_FILE = "build_inputs.json"
MAX_RECORD_BYTES = 1 << 22  # a build record takes some 10 KB
OTHER_PROGRAM_FLAW = "the build record of an executable that was compiled from another program"


class RecordedInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of `build_inputs.json`, which tells whether a build has to trace programs.

    Attributes:
        manifest: sha256 of the manifest's file.
        inputs: a digest of each input of its programs that the manifest does not have, by name.
    """

    manifest: str
    inputs: dict[str, str]


class Store:
    """The executables of one bundle directory, for building or reading."""

    def __init__(self, bundle: Path):
        self.bundle = bundle
        self._executables = bundle / "executables"
        self._programs = bundle / "programs"
        self._entries = bundle / "entries"
        self._trusted: Mapping[str, bytes] | None = None  # build records by key, instead of files

    def trust_only(self, entries: Iterable[Entry]) -> None:
        """Makes `find` take only these build records, and none of the directory's."""
        self._trusted = {entry.key: msgspec.json.encode(entry) for entry in entries}

    @property
    def is_read_only(self) -> bool:
        """Whether this process may read a bundle that is there, and write nothing to its directory."""
        return (self.bundle / MANIFEST_FILE).exists() and not os.access(
            self.bundle, os.W_OK, effective_ids=True
        )

    def check_writable(self) -> None:
        """Raises BadInput for a read-only bundle, before an executable is compiled that could not be stored."""
        if self.is_read_only:
            raise BadInput(f"it is missing, and {self.bundle} is read-only")

    @contextmanager
    def open_for_building(self) -> Iterator[None]:
        """Creates the directories, holds the build lock and removes temporary files of killed builds.

        Does nothing of this for a read-only bundle, which may be complete. Raises BadInput if the bundle cannot be
        written, BuildFailed if another process holds the lock.
        """
        if self.is_read_only:
            yield
            return
        with self._writing(self.bundle):
            self.bundle.mkdir(parents=True, exist_ok=True)
        with self.hold_lock():
            for directory in (self._executables, self._programs, self._entries):
                with self._writing(directory):
                    directory.mkdir(exist_ok=True)
                    _probe_writing(directory)
            with self._writing(self.bundle):
                self._remove_temporary_files()
            yield

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Holds the lock that every writer of the bundle takes. The operating system drops it when a process dies.

        Raises BadInput if the bundle cannot be written, BuildFailed if another process holds the lock.
        """
        with ExitStack() as held:
            with self._writing(self.bundle):
                self._enter_lock(held)
                _probe_writing(self.bundle)
            yield

    @contextmanager
    def _writing(self, directory: Path) -> Iterator[None]:
        """Raises BadInput if a directory of the bundle is a symbolic link, and for every OSError."""
        own = (self._executables, self._programs, self._entries)
        for path in (*own, self.bundle / QUARANTINE_DIRECTORY, self.bundle / LOCK_FILE):
            if path.is_symlink():
                raise BadInput(
                    f"cannot write to {self.bundle}: {path.name} is a symbolic link, and its target may not belong to "
                    "the bundle. Remove the link, or name another bundle"
                )
        try:
            yield
        except OSError as error:
            raise BadInput(f"cannot write to {directory}: {error.strerror}") from error

    def _enter_lock(self, held: ExitStack) -> None:
        try:
            held.enter_context(hold_directory_lock(self.bundle))
        except LockHeld as error:
            raise BuildFailed(
                f"{self.bundle}: another dflash-precompile or dflash-bundle is at work here: {error.holder}. Wait for "
                "it, or name another bundle"
            ) from error

    def _remove_temporary_files(self) -> None:
        """Removes what killed builds left. Safe under the lock, because only its holder writes here."""
        for directory in (self.bundle, self._executables, self._programs, self._entries):
            for temporary in list_temporary_files(directory):
                temporary.unlink()

    def find(self, key: str, signature: Signature, program: bytes) -> Entry | None:
        """Returns the build record of an executable that was compiled from this program, if its blobs are whole.

        Quarantines corrupt files where it can. Returns None for files that are missing or cannot be read at the moment.
        """
        record = self._entries / f"{key}.json"
        trusted = self._trusted
        content = self._read_or_quarantine(record) if trusted is None else trusted.get(key)
        if content is None:
            return None
        try:
            entry = find_build_record(content, key, signature, program)
        except ValueError as flaw:
            self._quarantine_corrupt(record, str(flaw))
            return None
        executable = self._unpack_or_quarantine(entry, self.executable_path(entry))
        found = self._unpack_or_quarantine(entry.program, self.program_path(entry))
        if executable is None or found is None:
            return None
        if found != program:
            self._quarantine_corrupt(record, OTHER_PROGRAM_FLAW)
            return None
        return entry

    def _unpack_or_quarantine(self, blob: Blob, path: Path) -> bytes | None:
        if (content := self._read_or_quarantine(path)) is None:
            return None
        try:
            return unpack_blob(blob, content)
        except BrokenBlob as flaw:
            if flaw.content:
                self._quarantine_corrupt(path, str(flaw))
            return None

    def _read_or_quarantine(self, path: Path) -> bytes | None:
        """Also quarantines links, fifos and other special files. A read error does not prove a regular file corrupt."""
        try:
            return read_plain(path, MAX_BLOB_BYTES)
        except OSError as error:
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                self._quarantine_corrupt(path, str(error.strerror))
            return None

    def _quarantine_corrupt(self, path: Path, flaw: str) -> None:
        """Quarantines a file where the disk has space and may be written; else the next build replaces the file."""
        with suppress(OSError):
            quarantine_file(self.bundle, path, "bytes", flaw)

    def executable_path(self, entry: Entry) -> Path:
        """Path of the serialized executable."""
        return self._executables / entry.sha256

    def program_path(self, entry: Entry) -> Path:
        """Path of the StableHLO that the executable was compiled from."""
        return self._programs / entry.program.sha256

    def quarantine(self, entry: Entry, kind: FaultKind, words: str) -> Path | None:
        """Quarantines an executable that fails its self-test, so that no build uses it again; see `quarantine_file`."""
        return quarantine_file(self.bundle, self.executable_path(entry), kind, words)

    def list_stored(self, signatures: Iterable[Signature]) -> list[Signature]:
        """Returns the signatures that have a build record and files of the right sizes."""
        return [
            entry.signature
            for entry in self._list_records_of(signatures)
            if all(_has_size(path, blob) for path, blob in self._list_blobs(entry).items())
        ]

    def _list_blobs(self, entry: Entry) -> dict[Path, Blob]:
        return {self.executable_path(entry): entry, self.program_path(entry): entry.program}

    def _list_records_of(self, signatures: Iterable[Signature]) -> Iterator[Entry]:
        """Yields one build record for each signature that has any."""
        wanted = list(signatures)
        for entry in self._list_build_records():
            if entry.signature in wanted:
                wanted.remove(entry.signature)
                yield entry

    def _list_build_records(self) -> Iterator[Entry]:
        """Yields the records that can be read."""
        for record in self._entries.glob("*.json"):
            with suppress(OSError, ValueError):
                yield decode_build_record(read_plain(record, MAX_RECORD_BYTES))

    def add(self, entry: Entry, executable: bytes, program: bytes) -> None:
        """Writes both blobs, as `pack_blob` makes them, then the build record: a record never names a missing blob.

        Raises BuildFailed for an executable that was quarantined because it failed its self-test.
        """
        if quarantined := find_quarantine_record(self.bundle, entry.sha256):
            path, record = quarantined
            raise BuildFailed(
                f"the compiler produced an executable that was quarantined here ({record.kind}): {record.reason}. "
                f"Another compiler or other flags may help; if the machine was at fault, remove {path} and build again"
            )
        write_atomically(self.program_path(entry), program)
        write_atomically(self.executable_path(entry), executable)
        self.write_record(entry)

    def write_record(self, entry: Entry) -> None:
        """Writes or replaces the build record of an executable whose blobs are stored."""
        write_atomically(self._entries / f"{entry.key}.json", msgspec.json.encode(entry))

    def restore_records(self, manifest: Manifest) -> None:
        """Writes the missing build records of a manifest, which a copy of the bundle may lack. Raises BadInput."""
        with self._writing(self._entries):
            self._entries.mkdir(exist_ok=True)
            for entry in manifest.entries:
                if not (self._entries / f"{entry.key}.json").exists():
                    self.write_record(entry)

    def hash_manifest(self) -> str | None:
        """The sha256 of the manifest's file, whatever is in it; None where none can be read."""
        try:
            return hashlib.sha256(
                read_plain(self.bundle / MANIFEST_FILE, MAX_MANIFEST_BYTES)
            ).hexdigest()
        except OSError:
            return None

    def read_build_inputs(self) -> dict[str, str] | None:
        """The recorded inputs of the manifest's programs; None if none are recorded, or for another manifest."""
        try:
            content = read_plain(self.bundle / INPUTS_FILE, MAX_RECORD_BYTES)
            recorded = msgspec.json.decode(content, type=RecordedInputs)
        except (OSError, *MALFORMED):
            return None
        return recorded.inputs if recorded.manifest == self.hash_manifest() else None

    def write_build_inputs(self, inputs: Mapping[str, str]) -> None:
        """Records the inputs of the published manifest's programs, unless the bundle is read-only.

        Without the record the next build traces all programs, so an error of the file system is ignored.
        """
        manifest = self.hash_manifest()
        if self.is_read_only or manifest is None:
            return
        content = msgspec.json.encode(RecordedInputs(manifest, dict(inputs)))
        with suppress(OSError):
            write_atomically(self.bundle / INPUTS_FILE, content)

    def find_flawed_file(self, entries: Iterable[Entry]) -> Path | None:
        """The first blob or build record of these executables that is missing or corrupt; None if all are whole.

        Reads and hashes every blob, and moves none.
        """
        for entry in entries:
            record = self._entries / f"{entry.key}.json"
            try:
                if decode_build_record(read_plain(record, MAX_RECORD_BYTES)).key != entry.key:
                    return record
            except (OSError, ValueError):
                return record
            for path, blob in self._list_blobs(entry).items():
                try:
                    check_blob_hash(blob, read_plain(path, MAX_BLOB_BYTES))
                except (OSError, BrokenBlob):
                    return path
        return None

    def publish(self, manifest: Manifest) -> None:
        """Replaces the manifest, and removes signatures over an older one.

        Raises BadInput for a read-only bundle with another manifest.
        """
        content = encode_manifest(manifest)
        if self.is_read_only:
            if read_plain(self.bundle / MANIFEST_FILE, MAX_MANIFEST_BYTES) != content:
                raise BadInput(
                    f"{self.bundle} is read-only, and its manifest would change: name another bundle"
                )
            return
        if self.hash_manifest() != hashlib.sha256(content).hexdigest():
            write_atomically(self.bundle / MANIFEST_FILE, content)
        # Last: if the write fails, the old manifest stays signed.
        remove_outdated(self.bundle, content)

    def read_executable(self, entry: Entry) -> bytes:
        """Returns a serialized executable with the size and sha256 of the manifest. Raises CorruptBundle.

        Its pickle is not scanned here, because loading scans it.
        """
        return self.unpack_executable(entry, self.read_packed(entry))

    def read_packed(self, entry: Entry) -> bytes:
        """Returns an executable's compressed file after checking its size and sha256. Raises CorruptBundle."""
        with self._reading(entry):
            content = read_plain(self.executable_path(entry), MAX_BLOB_BYTES)
            check_blob_hash(entry, content)
            return content

    def unpack_executable(self, entry: Entry, packed: bytes) -> bytes:
        """Decompresses the result of `read_packed`. Raises CorruptBundle."""
        with self._reading(entry):
            return decompress_blob(entry, packed)

    def read_program(self, entry: Entry) -> bytes:
        """Returns the verified StableHLO that an executable was compiled from. Raises CorruptBundle."""
        path = self.program_path(entry)
        with _as_corrupt_bundle(
            path, f"program of {entry.signature.label}", "Build it again from its checkpoints"
        ):
            return unpack_blob(entry.program, read_plain(path, MAX_BLOB_BYTES))

    def _reading(self, entry: Entry) -> AbstractContextManager[None]:
        remedy = f"Rebuild it: {rebuild_command(self.bundle)}"
        return _as_corrupt_bundle(self.executable_path(entry), entry.signature.label, remedy)


def decode_build_record(content: bytes) -> Entry:
    """Parses a build record, which is a manifest entry as JSON. Raises ValueError."""
    try:
        return msgspec.json.decode(content, type=Entry)
    except MALFORMED as error:
        raise ValueError(str(error)) from error


def find_build_record(content: bytes, key: str, signature: Signature, program: bytes) -> Entry:
    """Parses a build record and checks that it is of this key, signature and program size. Raises ValueError."""
    entry = decode_build_record(content)
    if entry.key != key:
        raise ValueError(f"the build record of another key, {entry.key}")
    if entry.signature != signature:
        raise ValueError(
            f"the build record of {entry.signature.label} with a signature other than the requested one"
        )
    # Before anything is decompressed to a size that may be forged.
    if entry.program.serialized_bytes != len(program):
        raise ValueError(OTHER_PROGRAM_FLAW)
    return entry


@contextmanager
def _as_corrupt_bundle(path: Path, label: str, remedy: str) -> Iterator[None]:
    """Turns OSError and BrokenBlob into CorruptBundle."""
    try:
        yield
    except OSError as error:
        raise CorruptBundle(f"{path} ({label}): {error.strerror}. {remedy}") from error
    except BrokenBlob as flaw:
        remedy = remedy if flaw.content else "Free some memory"
        raise CorruptBundle(f"{path} ({label}): {flaw}. {remedy}") from flaw


def _probe_writing(directory: Path) -> None:
    """Raises OSError if nothing can be written to a directory."""
    with tempfile.TemporaryFile(dir=directory):
        pass


def _has_size(path: Path, blob: Blob) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == blob.bytes
