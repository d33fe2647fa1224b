"""Writing so that a reader, or a crash, sees the whole file or none of it."""

import os
import tempfile
from pathlib import Path

UNFINISHED = ".unfinished"


def write_atomically(path: Path, content: bytes) -> None:
    """Temporary name in the same directory, fsync, rename, fsync the directory."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    _sync_directory(path.parent)


def temporaries(directory: Path) -> list[Path]:
    """What writers that were killed left behind in `directory`."""
    return [path for path in directory.iterdir() if path.name.startswith(".") and path.name.endswith(UNFINISHED)]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
