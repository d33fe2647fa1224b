"""Export window: which JAX releases can compile the programs that a bundle holds.

JAX promises to read a program of `jax.export` up to six months after the release that wrote it. The release dates of
both versions count, not the day of the build and not today: a JAX version that reads a program will always read it.
"""

import re
from datetime import date, timedelta

import msgspec

# Release dates of jaxlib on PyPI, for the tested versions. Any other version counts as the last one of these before it,
# so that its window ends too early rather than too late.
RELEASES = {"0.10.2": date(2026, 6, 17), "0.12.0.1": date(2026, 10, 21)}
PROMISED = timedelta(days=180)
NOTICE = timedelta(days=60)


class ExportWindow(msgspec.Struct, frozen=True):
    """Until when the programs of a bundle can be rebuilt.

    exporter: version of the jaxlib that wrote the programs.
    until: last day of the window. Every JAX version that was released by then reads the programs; later ones may refuse
        them. None if the release date of `exporter` is unknown.
    """

    exporter: str
    until: date | None

    def ends_soon(self, today: date) -> bool:
        """Whether the window has ended, or ends within NOTICE."""
        return self.until is not None and today > self.until - NOTICE

    def is_newer_than(self, version: str) -> bool:
        """Whether a newer jaxlib than this version wrote the programs."""
        return _parse(self.exporter) > _parse(version)

    def describe(self) -> str:
        """Returns the window as text."""
        if self.until is None:
            return f"exported by JAX {self.exporter}, whose release date is unknown: newer versions may refuse them"
        return (
            f"exported by JAX {self.exporter}: this and newer versions that were released by {self.until} compile them"
        )


def find_window(exporter: str) -> ExportWindow:
    """Returns the window of programs that this version of jaxlib wrote."""
    released = find_release(exporter)
    return ExportWindow(exporter, released and released + PROMISED)


def find_release(version: str) -> date | None:
    """Returns the release date of a jaxlib version: its own or that of the last tested version before it."""
    number = _parse(version)
    earlier = [listed for listed in RELEASES if _parse(listed) <= number]
    return RELEASES[max(earlier, key=_parse)] if earlier else None


def find_rebuild_doubt(window: ExportWindow, installed: str, today: date) -> str | None:
    """Returns why a rebuild is outside of the window, now or soon, and what to do; None if it is inside.

    installed: version of the jaxlib that compiles.
    """
    released = find_release(installed)
    if window.is_newer_than(installed):
        return f"the programs were exported by JAX {window.exporter}. JAX {installed} is older: better export them anew"
    if window.until and released and released > window.until:
        return f"the programs were {window.describe()}. JAX {installed} was released later: better export them anew"
    if window.ends_soon(today):
        return (
            f"the programs were {window.describe()}. Later versions may refuse them: then export them anew with these"
        )
    return None


def explain_refusal(window: ExportWindow, installed: str) -> str:
    """Returns why the installed version of jaxlib does not read programs, as far as versions tell it."""
    if window.is_newer_than(installed):
        return f"They were exported by JAX {window.exporter}, which is newer: rebuild with that version, or later"
    return f"They were {window.describe()}"


def _parse(version: str) -> tuple[int, ...]:
    """Returns the numbers at the start of a version, () if there are none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
