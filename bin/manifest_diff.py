"""Differences of two manifests: field by field, and executable by executable."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from dflash_aot.cache.bundle.manifest import Entry, Manifest

ABSENT = "absent"


class FieldChange(msgspec.Struct, frozen=True):
    """A field that differs.

    Attributes:
        field: its dotted name.
        a, b: its value in each manifest, ABSENT if there is none.
    """

    field: str
    a: Any
    b: Any


class ExecutableChange(msgspec.Struct, frozen=True):
    """An executable that differs.

    Attributes:
        label: program and sizes.
        what: how it differs.
        parts: the parts of the cache key that differ.
        changes: the fields of the signature that differ.
    """

    label: str
    what: Literal["only in a", "only in b", "another key", "other bytes"]
    parts: tuple[str, ...] = ()
    changes: tuple[FieldChange, ...] = ()


class ManifestDiff(msgspec.Struct, frozen=True):
    """All differences; compile times and compiler reports are not compared.

    Attributes:
        changes: fields.
        executables: executables.
    """

    changes: tuple[FieldChange, ...]
    executables: tuple[ExecutableChange, ...]

    @property
    def equal(self) -> bool:
        """Whether there are no differences."""
        return not (self.changes or self.executables)


def compare_manifests(a: Manifest, b: Manifest) -> ManifestDiff:
    """Returns the differences of two manifests, in the order of the manifest's fields."""
    fields = [
        name for name in Manifest.__struct_fields__ if name not in ("schema", "entries", "digest")
    ]
    changes = [
        change
        for name in fields
        for change in compare_values(name, _read_field(a, name), _read_field(b, name))
    ]
    return ManifestDiff(tuple(changes), tuple(_compare_entries(a, b)))


def compare_values(field: str, a: Any, b: Any) -> Iterator[FieldChange]:
    """Yields the innermost differing values. Lists of named objects are compared by name, other lists as a whole."""
    a = _by_name(a)
    b = _by_name(b)
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from compare_values(
                f"{field}.{key}".lstrip("."), a.get(key, ABSENT), b.get(key, ABSENT)
            )
    elif a != b:
        yield FieldChange(field, a, b)


def _compare_entries(a: Manifest, b: Manifest) -> Iterator[ExecutableChange]:
    ones, others = (
        {entry.signature.label: entry for entry in manifest.entries} for manifest in (a, b)
    )
    for label in dict.fromkeys((*ones, *others)):
        if label not in others:
            yield ExecutableChange(label, "only in a")
        elif label not in ones:
            yield ExecutableChange(label, "only in b")
        elif ones[label].key != others[label].key:
            yield _explain_key(ones[label], others[label], a.environment != b.environment)
        elif ones[label].sha256 != others[label].sha256:
            yield ExecutableChange(label, "other bytes")


def _explain_key(a: Entry, b: Entry, elsewhere: bool) -> ExecutableChange:
    changes = tuple(compare_values("", _builtins(a.signature), _builtins(b.signature)))
    differs = {
        "signature": changes,
        "environment": elsewhere,
        "program": a.program.sha256 != b.program.sha256,
        "compiler options": a.compiler_options != b.compiler_options,
    }
    parts = tuple(part for part, found in differs.items() if found)
    return ExecutableChange(a.signature.label, "another key", parts, changes)


def _by_name(value: Any) -> Any:
    """Returns a list of named objects as a mapping from their names, any other value unchanged."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(one, dict) and "name" in one for one in value)
    ):
        named = {one["name"]: one for one in value}
        return named if len(named) == len(value) else value
    return value


def _read_field(manifest: Manifest, name: str) -> Any:
    """Returns a field as JSON represents it; weight formats also where the file leaves them out."""
    return _builtins(manifest.formats if name == "weight_formats" else getattr(manifest, name))


def _builtins(value: object) -> Any:
    """Returns a value as JSON represents it, ABSENT for a field that is left out."""
    if value is msgspec.UNSET:
        return ABSENT
    return msgspec.json.decode(msgspec.json.encode(value))
