"""An executable in a shared store: the record under its key, and the blobs that the record vouches for.

executables/<sha256>, programs/<sha256>, entries/<key>.json     as in a bundle
"""

from pathlib import Path

import msgspec

from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.files import read_plain
from dflash_aot.cache.manifest import Blob, Entry
from dflash_aot.cache.objects import Objects
from dflash_aot.cache.signature import Signature
from dflash_aot.cache.store import Store, find_flaw, unpack

LARGEST_RECORD = 1 << 24
TRIES = 2  # what was replaced while it was read is whole the next time


class Shared(msgspec.Struct, frozen=True):
    """A record with the files that it speaks of, verified."""

    entry: Entry
    executable: bytes
    program: bytes


def has_record(objects: Objects, key: str) -> bool:
    """Nothing of it is verified. Raises StoreFailed."""
    return objects.size(_record_name(key)) is not None


def read_shared(objects: Objects, key: str, signature: Signature, program: bytes) -> Shared | None:
    """What was compiled from this program. None where there is no record.

    Raises StoreFailed, CorruptBundle for what is wrong twice in a row.
    """
    for _ in range(TRIES - 1):
        try:
            return _read(objects, key, signature, program)
        except CorruptBundle:
            continue
    return _read(objects, key, signature, program)


def write_shared(objects: Objects, store: Store, entry: Entry) -> None:
    """From a bundle. Blobs first: a record never speaks of what is not there. Raises StoreFailed, CorruptBundle."""
    program, executable = _read_file(entry.program, store.program_path(entry)), _read_file(entry, store.path(entry))
    objects.write(f"programs/{entry.program.sha256}", program)
    objects.write(f"executables/{entry.sha256}", executable)
    objects.write(_record_name(entry.key), msgspec.json.encode(entry))


def _read(objects: Objects, key: str, signature: Signature, program: bytes) -> Shared | None:
    where = f"{objects.url}/{_record_name(key)}"
    record = objects.read(_record_name(key), LARGEST_RECORD)
    if record is None:
        return None
    try:
        entry = msgspec.json.decode(record, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptBundle(f"{where}: {error}") from error
    if entry.key != key:
        raise CorruptBundle(f"{where}: the record of {entry.key}")
    if entry.signature != signature:
        raise CorruptBundle(
            f"{where}: the record of {entry.signature.label}, with another signature than was asked for"
        )
    packed, unpacked = _read_blob(objects, "programs", entry.program)
    if unpacked != program:
        raise CorruptBundle(f"{where}: the record of {entry.signature.label}, compiled from another program")
    return Shared(entry, _read_blob(objects, "executables", entry)[0], packed)


def _read_blob(objects: Objects, folder: str, blob: Blob) -> tuple[bytes, bytes]:
    """As it lies there, and unpacked."""
    name = f"{folder}/{blob.sha256}"
    content = objects.read(name, blob.bytes, blob.bytes)
    if content is None:
        raise CorruptBundle(f"{objects.url}/{name}: not there, though its record is")
    try:
        return content, unpack(blob, content)
    except ValueError as flaw:
        raise CorruptBundle(f"{objects.url}/{name}: {flaw}") from flaw


def _read_file(blob: Blob, path: Path) -> bytes:
    try:
        content = read_plain(path)
    except OSError as error:
        raise CorruptBundle(f"{path}: {error.strerror}") from error
    if flaw := find_flaw(blob, content):
        raise CorruptBundle(f"{path}: {flaw}")
    return content


def _record_name(key: str) -> str:
    return f"entries/{key}.json"
