"""Output files that a user names: never a file that the same command reads, and errors that name flag and file."""

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dflash_aot.cache.errors import BadInput


def check_output(flag: str, output: str | Path | int, inputs: Mapping[str, str | Path | None]) -> None:
    """Raises BadInput if an output is one of the files that the command reads, however either of them is spelled.

    To be called before the output is opened: opening it for writing empties it.

    Args:
        flag: the output's name in the message.
        output: a path, or the file descriptor of a stream that the caller of the command has opened.
        inputs: by flag, the files that are read; None for a flag that is not given.
    """
    try:
        written = os.stat(output)
    except (OSError, ValueError):  # does not exist, or cannot be opened either
        return
    if not stat.S_ISREG(written.st_mode):  # a terminal may be both
        return
    for name, path in inputs.items():
        try:
            same = path is not None and os.path.samestat(written, os.stat(path))
        except (OSError, ValueError):
            continue
        if same:
            shown = flag if isinstance(output, int) else f"{flag} {output}"
            raise BadInput(f"{shown} is the same file as {name} {path}, which it would overwrite: name another file")


@contextmanager
def open_output(flag: str, path: str) -> Iterator[Callable[[str], None]]:
    """Creates or empties a text file, and yields a function that writes to it at once. Raises BadInput."""

    def refuse(error: OSError) -> BadInput:
        return BadInput(f"{flag} {path}: {error.strerror}")

    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as error:
        raise refuse(error) from error

    def write(text: str) -> None:
        try:
            file.write(text)
            file.flush()
        except OSError as error:
            raise refuse(error) from error

    try:
        yield write
    finally:
        try:
            file.close()
        except OSError as error:
            if sys.exc_info()[1] is None:  # otherwise the first error is the one to report
                raise refuse(error) from error
