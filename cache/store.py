"""The executables of a bundle: blobs under the hash of their content, and a record for each under its key.

manifest.json            what is served, written last
executables/<sha256>     serialized executables, compressed
programs/<sha256>        what each was compiled from, compressed: StableHLO as `jax.export` writes it
entries/<key>.json       what each build left behind: a killed build goes on from here, a changed grid reuses it
set-aside/               what was found broken, and why
"""

import fcntl
import hashlib
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dflash_aot.cache.attestation import remove_outdated
from dflash_aot.cache.errors import BadInput, BuildFailed, CorruptBundle
from dflash_aot.cache.files import read_plain, temporaries, write_atomically
from dflash_aot.cache.manifest import FILE, Blob, Entry, Manifest, encode_manifest, mend_command
from dflash_aot.cache.set_aside import Kind, find_refusal, set_aside


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

        Raises BadInput where nothing can be written, BuildFailed where another builder is at work.
        """
        try:
            for directory in (self._executables, self._programs, self._entries):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot write to {self.bundle}: {error.strerror}") from error
        with self.hold_lock():
            try:
                self._sweep()
            except OSError as error:
                raise BadInput(f"cannot write to {self.bundle}: {error.strerror}") from error
            yield

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """The builders' lock, which dies with its process, in a directory that can be written.

        Raises BadInput where it cannot, BuildFailed where a builder is at work.
        """
        try:
            lock = os.open(self.bundle / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BadInput(f"cannot write to {self.bundle}: {error.strerror}") from error
        try:
            self._take(lock)
            yield
        finally:
            os.close(lock)

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BuildFailed(
                f"{self.bundle}: another dflash-precompile is building here. Wait for it, or give another --bundle"
            ) from error
        try:
            write_atomically(self.bundle / ".writable", b"")
            (self.bundle / ".writable").unlink()
        except OSError as error:
            raise BadInput(f"cannot write to {self.bundle}: {error.strerror}") from error

    def _sweep(self) -> None:
        """Removes what builders that were killed had begun to write; only the lock's holder writes here."""
        for directory in (self.bundle, self._executables, self._programs, self._entries):
            for temporary in temporaries(directory):
                temporary.unlink()

    def find(self, key: str) -> Entry | None:
        """The record of an executable built before, if its blobs are whole; for a builder, who sets aside what is not.

        What is not there, or cannot be read just now, is built anew.
        """
        record = self._entries / f"{key}.json"
        if (content := self._read_or_set_aside(record)) is None:
            return None
        try:
            entry = msgspec.json.decode(content, type=Entry)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            set_aside(self.bundle, record, "bytes", str(error))
            return None
        if entry.key != key:
            set_aside(self.bundle, record, "bytes", f"the record of {entry.key}")
            return None
        blobs = ((entry, self.path(entry)), (entry.program, self.program_path(entry)))
        return entry if all([self._is_whole(blob, path) for blob, path in blobs]) else None

    def _is_whole(self, blob: Blob, path: Path) -> bool:
        if (content := self._read_or_set_aside(path)) is None:
            return False
        try:
            unpack(blob, content)
        except ValueError as flaw:
            set_aside(self.bundle, path, "bytes", str(flaw))
            return False
        return True

    def _read_or_set_aside(self, path: Path) -> bytes | None:
        """Links and the like are set aside, too; a disk that does not answer proves nothing."""
        try:
            return read_plain(path)
        except OSError as error:
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                set_aside(self.bundle, path, "bytes", str(error.strerror))
            return None

    def path(self, entry: Entry) -> Path:
        """Where its executable lies."""
        return self._executables / entry.sha256

    def program_path(self, entry: Entry) -> Path:
        """Where that lies which it was compiled from."""
        return self._programs / entry.program.sha256

    def set_aside(self, entry: Entry, kind: Kind, words: str) -> Path | None:
        """Its blob, see `set_aside`: one that does not what it should will not be taken again."""
        return set_aside(self.bundle, self.path(entry), kind, words)

    def held_bytes(self) -> int:
        """What executables and programs take here."""
        return sum(path.stat().st_size for room in (self._executables, self._programs) for path in room.iterdir())

    def add(self, entry: Entry, executable: bytes, program: bytes) -> None:
        """Blobs, as `pack` makes them, first, record second: a record never speaks of a blob that is not there.

        Raises BuildFailed for an executable that was set aside for what it does.
        """
        if refusal := find_refusal(self.bundle, entry.sha256):
            record, finding = refusal
            raise BuildFailed(
                f"the compiler made again what was set aside ({finding.kind}): {finding.words}. Another compiler or "
                f"other flags may help; if the machine was at fault, remove {record} and build again"
            )
        write_atomically(self.program_path(entry), program)
        write_atomically(self.path(entry), executable)
        self.record(entry)

    def record(self, entry: Entry) -> None:
        """What is known of an executable, anew; its blobs are there."""
        write_atomically(self._entries / f"{entry.key}.json", msgspec.json.encode(entry))

    def recall(self, manifest: Manifest) -> None:
        """What a manifest names is found again, also where records were not copied along. Raises BadInput."""
        try:
            self._entries.mkdir(exist_ok=True)
            for entry in manifest.entries:
                if not (self._entries / f"{entry.key}.json").exists():
                    self.record(entry)
        except OSError as error:
            raise BadInput(f"cannot write to {self.bundle}: {error.strerror}") from error

    def publish(self, manifest: Manifest) -> None:
        """From here on readers see the new bundle; signatures over another manifest go."""
        content = encode_manifest(manifest)
        remove_outdated(self.bundle, content)
        write_atomically(self.bundle / FILE, content)

    def read(self, entry: Entry) -> bytes:
        """A serialized executable, whose blob has the size and sha256 that the manifest promises.

        Unpacked no further than to the size that it promises as well. Raises CorruptBundle.
        """
        return self._read(entry, self.path(entry), entry.signature.label, f"Mend it: {mend_command(self.bundle)}")

    def read_program(self, entry: Entry) -> bytes:
        """What an executable was compiled from, likewise."""
        label, remedy = f"program of {entry.signature.label}", "Build it again from its checkpoints"
        return self._read(entry.program, self.program_path(entry), label, remedy)

    def _read(self, blob: Blob, path: Path, label: str, remedy: str) -> bytes:
        try:
            content = read_plain(path)
        except OSError as error:
            raise CorruptBundle(f"{path} ({label}): {error.strerror}. {remedy}") from error
        try:
            return unpack(blob, content)
        except ValueError as flaw:
            raise CorruptBundle(f"{path} ({label}): {flaw}. {remedy}") from flaw


def find_flaw(blob: Blob, content: bytes) -> str | None:
    """In what a file's content is not what the manifest promises."""
    if len(content) != blob.bytes:
        return f"{len(content)} bytes, the manifest promises {blob.bytes}"
    if (found := hashlib.sha256(content).hexdigest()) != blob.sha256:
        return f"its sha256 is {found}"
    return None


def pack(serialized: bytes) -> tuple[Blob, bytes]:
    """What is serialized, as a file: a fifth of its size, unpacked in 3 ms per MB."""
    content = zlib.compress(serialized)
    return Blob(hashlib.sha256(content).hexdigest(), len(content), len(serialized)), content


def unpack(blob: Blob, content: bytes) -> bytes:
    """What a file holds, never more than it should. Raises ValueError with what is wrong with it."""
    if flaw := find_flaw(blob, content):
        raise ValueError(flaw)
    unpacking = zlib.decompressobj()
    try:
        serialized = unpacking.decompress(content, blob.serialized_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(serialized) != blob.serialized_bytes or not unpacking.eof or unpacking.unused_data:
        raise ValueError(f"does not unpack to {blob.serialized_bytes} bytes, as the manifest promises")
    return serialized
