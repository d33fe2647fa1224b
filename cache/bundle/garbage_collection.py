"""What a bundle has no use for any more."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.atomic_files import list_temporary_files
from dflash_aot.cache.bundle.manifest import MANIFEST_FILE, Manifest
from dflash_aot.cache.bundle.quarantine import QUARANTINE_DIRECTORY
from dflash_aot.cache.bundle.verification import BLOB_NAME, RECORD_NAME, list_expected_files

DIRECTORIES = ("entries", "executables", "programs")  # records first: they never speak of a blob that is not there


class Garbage(msgspec.Struct, frozen=True):
    """Something to remove: `age` in seconds, negative where clocks disagree."""

    path: Path
    why: str
    bytes: int
    age: float


def find_garbage(bundle: Path, manifest: Manifest, now: float) -> list[Garbage]:
    """In the order in which it is to be removed; nothing that is not known to be ours.

    Whoever opened the bundle before the manifest was replaced may still read what only the old one refers to: that
    is no older than the new manifest.
    """
    published = _last_change(bundle / MANIFEST_FILE)
    found = [
        Garbage(path, why, _size(path), now - max(_last_change(path), published))
        for path, why in _unreferenced(bundle, manifest)
    ]
    left = [(path, "unfinished") for folder in _folders(bundle) for path in list_temporary_files(folder)]
    left += [(path, "set aside") for path in _list(bundle / QUARANTINE_DIRECTORY)]
    return found + [Garbage(path, why, _size(path), now - _last_change(path)) for path, why in left]


def remove_garbage(garbage: Iterable[Garbage]) -> None:
    """Raises OSError."""
    for one in garbage:
        if one.path.is_dir() and not one.path.is_symlink():
            shutil.rmtree(one.path)
        else:
            one.path.unlink(missing_ok=True)


def _unreferenced(bundle: Path, manifest: Manifest) -> Iterator[tuple[Path, str]]:
    keep = {promise.path for promise in list_expected_files(bundle, manifest)}
    keep |= {bundle / "entries" / f"{entry.key}.json" for entry in manifest.entries}
    for folder in DIRECTORIES:
        pattern = RECORD_NAME if folder == "entries" else BLOB_NAME
        for path in _list(bundle / folder):
            if path not in keep and pattern.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
                yield path, "not referred to"


def _folders(bundle: Path) -> list[Path]:
    return [bundle, *(bundle / name for name in DIRECTORIES if _is_folder(bundle / name))]


def _list(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if _is_folder(folder) else []


def _is_folder(path: Path) -> bool:
    """One of the bundle's own: what a link leads to is somebody else's."""
    return path.is_dir() and not path.is_symlink()


def _last_change(path: Path) -> float:
    """Of content, name or attributes: a copy that keeps old times is new all the same."""
    status = path.lstat()
    return max(status.st_mtime, status.st_ctime)


def _size(path: Path) -> int:
    if _is_folder(path):
        return sum(os.lstat(inner).st_size for inner in path.rglob("*"))
    return path.lstat().st_size
