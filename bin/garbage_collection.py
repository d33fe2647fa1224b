"""Garbage collection: files of a bundle that nothing refers to any more."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import MANIFEST_FILE, Manifest
from dflash_aot.cache.bundle.quarantine import QUARANTINE_DIRECTORY
from dflash_aot.cache.bundle.verification import BLOB_NAME, RECORD_NAME, list_expected_files
from dflash_aot.cache.files.atomic_files import list_temporary_files

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
