"""An executable in a shared store: the record under its key, and the blobs that the record vouches for.

executables/<sha256>, programs/<sha256>, entries/<key>.json     as in a bundle
"""

import msgspec

from dflash_aot.cache.bundle.blob import read_blob_file
from dflash_aot.cache.bundle.build_record import OTHER_PROGRAM, find_record
from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.remote.object_store import ObjectStore, read_blob
from dflash_aot.cache.signature import Signature

MAX_RECORD_BYTES = 1 << 24
READ_ATTEMPTS = 2  # what was replaced while it was read is whole the next time


class SharedExecutable(msgspec.Struct, frozen=True):
    """A record with the files that it speaks of, verified."""

    entry: Entry
    executable: bytes
    program: bytes


def has_shared(objects: ObjectStore, key: str) -> bool:
    """Nothing of it is verified. Raises StoreFailed."""
    return objects.size(_record_name(key)) is not None


def read_shared(objects: ObjectStore, key: str, signature: Signature, program: bytes) -> SharedExecutable | None:
    """What was compiled from this program. None where there is no record.

    Raises StoreFailed, CorruptBundle for what is wrong twice in a row.
    """
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return _read(objects, key, signature, program)
        except CorruptBundle:
            continue
    return _read(objects, key, signature, program)


def write_shared(objects: ObjectStore, store: Store, entry: Entry) -> None:
    """From a bundle. Blobs first: a record never speaks of what is not there. Raises StoreFailed, CorruptBundle."""
    program = read_blob_file(entry.program, store.program_path(entry))
    executable = read_blob_file(entry, store.executable_path(entry))
    objects.write(f"programs/{entry.program.sha256}", program)
    objects.write(f"executables/{entry.sha256}", executable)
    objects.write(_record_name(entry.key), msgspec.json.encode(entry))


def _read(objects: ObjectStore, key: str, signature: Signature, program: bytes) -> SharedExecutable | None:
    where = f"{objects.url}/{_record_name(key)}"
    record = objects.read(_record_name(key), MAX_RECORD_BYTES)
    if record is None:
        return None
    try:
        entry = find_record(record, key, signature, program)
    except ValueError as flaw:
        raise CorruptBundle(f"{where}: {flaw}") from flaw
    packed, unpacked = read_blob(objects, f"programs/{entry.program.sha256}", entry.program)
    if unpacked != program:
        raise CorruptBundle(f"{where}: {OTHER_PROGRAM}")
    return SharedExecutable(entry, read_blob(objects, f"executables/{entry.sha256}", entry)[0], packed)


def _record_name(key: str) -> str:
    return f"entries/{key}.json"
