"""Export window: until when programs can be rebuilt, and what a rebuild outside of it says."""

from datetime import date

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.export_window import RELEASES, explain_refusal, find_rebuild_doubt, find_window
from dflash_aot.cache.bundle.manifest import encode_manifest, parse_manifest
from dflash_aot.cache.environment import jaxlib_version

EARLY = date(2026, 7, 1)


@pytest.mark.parametrize(
    ("exporter", "until"),
    [
        ("0.10.2", date(2026, 12, 14)),  # 180 days behind its release on 2026-06-17
        ("0.12.0.1", date(2027, 4, 19)),  # behind 2026-10-21
        ("0.10.10", date(2026, 12, 14)),  # not listed: as the last tested version before it
        ("0.13.0.dev20270101+abc", date(2027, 4, 19)),
        ("0.10.1", None),  # older than all tested versions
        ("", None),
    ],
)
def test_window_ends_six_months_behind_the_release_of_the_exporter(exporter, until):
    assert find_window(exporter).until == until


def test_installed_jaxlib_has_a_release_date():
    assert jaxlib_version() in RELEASES


@pytest.mark.parametrize(
    ("day", "soon"), [(date(2026, 10, 15), False), (date(2026, 10, 16), True), (date(2028, 1, 1), True)]
)
def test_window_ends_soon_from_sixty_days_before_its_end(day, soon):
    assert find_window("0.10.2").ends_soon(day) is soon
    assert not find_window("0.1").ends_soon(day)


@pytest.mark.parametrize(
    ("exporter", "installed", "today", "words"),
    [
        ("0.10.2", "0.10.2", EARLY, None),
        ("0.10.2", "0.12.0.1", EARLY, None),
        (
            "0.10.2",
            "0.12.0.1",
            date(2026, 12, 1),
            "released by 2026-12-14 compile them. Later versions may refuse them",
        ),
        ("0.12.0.1", "0.10.2", EARLY, "exported by JAX 0.12.0.1. JAX 0.10.2 is older: better export them anew"),
        ("0.1", "0.12.0.1", EARLY, None),
    ],
)
def test_rebuild_outside_of_the_window_or_near_its_end_is_doubtful(exporter, installed, today, words):
    doubt = find_rebuild_doubt(find_window(exporter), installed, today)
    assert doubt is None if words is None else words in doubt


def test_rebuild_by_a_version_released_after_the_window_is_doubtful(monkeypatch):
    monkeypatch.setitem(RELEASES, "0.14.0", date(2027, 3, 1))
    doubt = find_rebuild_doubt(find_window("0.10.2"), "0.14.1", EARLY)
    assert "JAX 0.14.1 was released later: better export them anew" in doubt


def test_refusal_says_whether_the_programs_are_too_new():
    assert "which is newer: rebuild with that version" in explain_refusal(find_window("0.12.0.1"), "0.10.2")
    assert "released by 2026-12-14" in explain_refusal(find_window("0.10.2"), "0.14.0")
    assert "whose release date is unknown" in explain_refusal(find_window("0.7.2"), "0.12.0.1")


def test_manifest_names_the_exporter_only_if_it_differs_from_the_compiler(manifest, tmp_path):
    assert b"exporter" not in encode_manifest(manifest)
    assert manifest.export_window().exporter == manifest.environment.jaxlib
    content = encode_manifest(structs.replace(manifest, exporter="0.10.2"))
    assert parse_manifest(tmp_path, content).export_window() == find_window("0.10.2")
