"""Files of a bundle that were found broken: out of the way, with the reason beside them.

set-aside/<name>.<n>         as it was found
set-aside/<name>.<n>.json    where it lay, and what is wrong with it
"""

import itertools
import os
from pathlib import Path
from typing import Literal

import msgspec

QUARANTINE_DIRECTORY = "set-aside"
FaultKind = Literal["bytes", "canary", "crash"]


class QuarantineRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wrong with a file.

    bytes: it is not what was promised. canary: it is, and computes something else. crash: it is, and ends the process
    that calls it. `file` is relative to the bundle.
    """

    kind: FaultKind
    file: str
    words: str


def quarantine_file(bundle: Path, file: Path, kind: FaultKind, words: str) -> Path | None:
    """Moves `file`, whatever lies there, and says where it is now; None if somebody else was faster.

    Raises OSError, where nothing can be written; then it lies where it lay.
    """
    directory = bundle / QUARANTINE_DIRECTORY
    directory.mkdir(exist_ok=True)
    finding = QuarantineRecord(kind, str(file.relative_to(bundle)), words)
    place = _claim(directory, file.name, msgspec.json.encode(finding))
    try:
        os.rename(file, place)
    except OSError as error:
        _record(place).unlink()
        if isinstance(error, FileNotFoundError):
            return None
        raise
    return place


def find_quarantine_record(bundle: Path, sha256: str) -> tuple[Path, QuarantineRecord] | None:
    """The record that this very content does wrong, if there is one: to build it again would change nothing."""
    for record in sorted((bundle / QUARANTINE_DIRECTORY).glob(f"{sha256}.*.json")):
        try:
            finding = msgspec.json.decode(record.read_bytes(), type=QuarantineRecord)
        except (OSError, msgspec.DecodeError):
            continue  # a note that was damaged itself accuses nobody
        if finding.kind != "bytes":
            return record, finding
    return None


def _claim(directory: Path, name: str, record: bytes) -> Path:
    """The first free place; its record is there before the file is."""
    for number in itertools.count():
        place = directory / f"{name}.{number}"
        if not os.path.lexists(place):
            try:
                with _record(place).open("xb") as file:
                    file.write(record)
            except FileExistsError:
                continue
            return place
    raise AssertionError("unreachable")


def _record(place: Path) -> Path:
    return place.with_name(f"{place.name}.json")
