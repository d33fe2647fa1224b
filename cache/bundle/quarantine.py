"""Quarantine: corrupt and misbehaving files of a bundle, moved away with a record of the reason.

quarantine/<name>.<n>         the file as it was found
quarantine/<name>.<n>.json    its record: where the file was, and what is wrong with it
"""

import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from dflash_aot.cache.errors import MALFORMED
from dflash_aot.cache.files.atomic_files import read_plain

QUARANTINE_DIRECTORY = "quarantine"
MAX_QUARANTINE_RECORD_BYTES = 1 << 20
FaultKind = Literal["bytes", "self_test", "crash"]


class QuarantineRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a file was quarantined.

    Attributes:
        kind: "bytes" for content other than the manifest says; "self_test" for an executable
            whose results are wrong; "crash" for an executable that ends the process that calls
            it.
        file: path relative to the bundle.
        reason: what is wrong, for people.
    """

    kind: FaultKind
    file: str
    reason: str


def quarantine_file(bundle: Path, file: Path, kind: FaultKind, reason: str) -> Path | None:
    """Moves a file, or whatever else has its name, and returns its new path; None if it is gone already.

    Raises OSError if the bundle cannot be written; the file stays where it is.
    """
    directory = bundle / QUARANTINE_DIRECTORY
    directory.mkdir(exist_ok=True)
    record = QuarantineRecord(kind, str(file.relative_to(bundle)), reason)
    path = _claim_path(directory, file.name, msgspec.json.encode(record))
    try:
        os.rename(file, path)
    except OSError as error:
        _record_path(path).unlink()
        if isinstance(error, FileNotFoundError):
            return None
        raise
    return path


def find_quarantine_record(bundle: Path, sha256: str) -> tuple[Path, QuarantineRecord] | None:
    """Returns the record that this very content misbehaves, and its path; None if there is none.

    A record of kind "bytes" does not count: the content with this hash was never found.
    """
    for path in sorted((bundle / QUARANTINE_DIRECTORY).glob(f"{sha256}.*.json")):
        try:
            record = msgspec.json.decode(
                read_plain(path, MAX_QUARANTINE_RECORD_BYTES), type=QuarantineRecord
            )
        except (OSError, *MALFORMED):
            continue  # a damaged record proves nothing
        if record.kind != "bytes":
            return path, record
    return None


def _claim_path(directory: Path, name: str, record: bytes) -> Path:
    """Returns the first free path for a file, after writing its record."""
    for number in itertools.count():
        path = directory / f"{name}.{number}"
        if not os.path.lexists(path):
            try:
                with _record_path(path).open("xb") as file:
                    file.write(record)
            except FileExistsError:
                continue
            except OSError:
                with suppress(OSError):  # the first error is the one to report
                    _record_path(path).unlink(missing_ok=True)
                raise
            return path
    raise AssertionError("unreachable")


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
