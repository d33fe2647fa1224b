"""What a benchmark's flags set: the fields of its `Settings`, each with what `--help` says of it."""

import dataclasses
from typing import Any


def setting(default: Any, description: str, least: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of a frozen dataclass, and a flag of that name.

    Its type says what the flag takes: int, float, bool, str, `str | None`, or numbers with commas between them for
    `tuple[int, ...]` and `tuple[float, ...]`. `least`: of a number, or of each of several.
    """
    return dataclasses.field(default=default, metadata={"description": description, "least": least, "choices": choices})
