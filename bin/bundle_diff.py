"""`dflash-bundle diff`: why one bundle is not the other."""

import json
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.manifest_diff import Change, Comparison, ExecutableChange, compare_manifests

DIFFERENT = 1  # as diff(1) ends
LONGEST = 200  # of a value, in characters, for people


def report_diff(a: Path, b: Path, as_json: bool) -> int:
    """On standard output; 0 if they are the same."""
    found = compare_manifests(read_manifest(a), read_manifest(b))
    if as_json:
        print(json.dumps({"a": str(a), "b": str(b), "equal": found.equal, **msgspec.to_builtins(found)}))
    else:
        print(format_comparison(found, str(a), str(b)))
    return 0 if found.equal else DIFFERENT


def format_comparison(found: Comparison, a: str, b: str) -> str:
    """For people: `-` is what a has, `+` what b has."""
    if found.equal:
        return f"{a} and {b} hold the same executables, for the same models and environment"
    lines = [f"- {a}", f"+ {b}", *(line for change in found.changes for line in _format_change(change))]
    return "\n".join([*lines, *(line for one in found.executables for line in _format_executable(one))])


def _format_change(change: Change, indent: str = "") -> list[str]:
    return [
        f"{indent}{change.field}",
        f"{indent}  - {_shorten(change.a)}",
        f"{indent}  + {_shorten(change.b)}",
    ]


def _format_executable(one: ExecutableChange) -> list[str]:
    sign = {"only in a": "-", "only in b": "+"}.get(one.what, " ")
    why = f", because of {', '.join(one.parts)}" if one.parts else ""
    return [
        f"{sign} {one.label}: {one.what}{why}",
        *(line for change in one.changes for line in _format_change(change, "    ")),
    ]


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… (--json has all of it)"
