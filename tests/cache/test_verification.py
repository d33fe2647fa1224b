"""A bundle against its manifest: everything that is wrong, at once, and nothing that is right."""

import os
import pickle
import shutil

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.verification import (
    check_file,
    find_file_flaws,
    find_unexpected_files,
    list_expected_files,
    quarantine_flaws,
)
from dflash_aot.cache.errors import CorruptBundle
from tests.cache.damage import cut, directory, fifo, flip


class Calls:
    """What a pickle must not be able to do."""

    def __reduce__(self):
        return os.system, ("true",)


@pytest.fixture
def bundle(store):
    return store.bundle


@pytest.fixture
def paths(bundle, manifest):
    """All that is promised."""
    return [promise.path for promise in list_expected_files(bundle, manifest)]


def link(path):
    path.symlink_to(path.rename(path.parents[1] / "elsewhere"))


def describe(flaws):
    return [(flaw.path, flaw.field, flaw.content) for flaw in flaws]


def test_a_whole_bundle_has_no_flaws_and_no_strays(bundle, manifest, paths):
    assert find_file_flaws(bundle, manifest) == []
    assert find_unexpected_files(bundle, manifest) == []
    assert set(paths) == {path for name in ("executables", "programs") for path in (bundle / name).iterdir()}


def test_a_copy_elsewhere_without_its_times_is_as_good(bundle, manifest, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "a path, mit Umlauten äöü ☃" / "bundle", copy_function=shutil.copyfile)
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    assert find_file_flaws(copy, manifest) == []
    assert find_unexpected_files(copy, manifest) == []


def test_everything_that_is_wrong_is_told_at_once(bundle, manifest, paths):
    damages = [cut, flip, link, fifo, directory, os.unlink]
    for damage, path in zip(damages, paths, strict=False):
        damage(path)
    fields = ["bytes", "sha256", "file", "file", "file", "file"]
    content = [True, True, True, True, True, False]  # what is missing is of no use, and nothing to move
    assert describe(find_file_flaws(bundle, manifest)) == list(zip(paths, fields, content, strict=False))


def test_a_flaw_has_both_values_and_says_whose_file_it_is(bundle, manifest, paths):
    entry = manifest.entries[0]
    cut(paths[0])
    (flaw,) = find_file_flaws(bundle, manifest)
    assert (flaw.promised, flaw.found) == (str(entry.bytes), str(entry.bytes - 1))
    assert flaw.label == entry.signature.label


def test_two_that_changed_places_are_both_found(bundle, manifest, paths):
    first, second = (path.read_bytes() for path in paths[:2])
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    assert [flaw.path for flaw in find_file_flaws(bundle, manifest)] == paths[:2]


def promise_instead(manifest, content, serialized_bytes):
    """A manifest that promises just this content, by its first entry."""
    blob, packed = pack_blob(content)
    entry = structs.replace(
        manifest.entries[0], sha256=blob.sha256, bytes=blob.bytes, serialized_bytes=serialized_bytes
    )
    return structs.replace(manifest, entries=(entry, *manifest.entries[1:])), packed


def test_a_forged_blob_whose_hash_is_right_is_found_by_what_it_unpacks_to(bundle, manifest, store):
    forged, packed = promise_instead(manifest, bytes(10**6), 100)
    store.executable_path(forged.entries[0]).write_bytes(packed)
    (flaw,) = find_file_flaws(bundle, forged)
    assert (flaw.field, flaw.promised) == ("serialized_bytes", "100")


def test_a_forged_blob_whose_hash_is_right_is_found_by_what_its_pickle_names(bundle, manifest, store):
    attack = pickle.dumps(Calls())
    forged, packed = promise_instead(manifest, attack, len(attack))
    store.executable_path(forged.entries[0]).write_bytes(packed)
    (flaw,) = find_file_flaws(bundle, forged)
    assert flaw.field == "pickle" and "system" in flaw.found


def test_a_folder_that_is_a_link_is_not_the_bundles_own(bundle, manifest, tmp_path):
    moved = (bundle / "executables").rename(tmp_path / "elsewhere")
    (bundle / "executables").symlink_to(moved)
    flaws = find_file_flaws(bundle, manifest)
    assert {(flaw.field, flaw.content) for flaw in flaws} == {("file", False)}
    assert len(flaws) == len(manifest.entries)
    assert [stray.path for stray in find_unexpected_files(bundle, manifest)] == [bundle / "executables"]


def test_files_that_nobody_promised_are_told_with_what_they_are(bundle, manifest):
    (bundle / "executables" / ("0" * 64)).write_bytes(b"12345")
    (bundle / "entries" / f"{'0' * 64}.json").touch()
    (bundle / "executables" / ".x.unfinished").touch()
    (bundle / "notes.txt").touch()
    (bundle / "executables" / "notes.txt").touch()
    (bundle / "more").mkdir()
    (bundle / "more" / ("0" * 64)).touch()
    os.mkfifo(bundle / "pipe")
    (bundle / "way out").symlink_to("/")
    (bundle / "set-aside").mkdir()
    (bundle / "set-aside" / "x.0").touch()
    strays = {str(stray.path.relative_to(bundle)): stray for stray in find_unexpected_files(bundle, manifest)}
    assert {name: stray.what for name, stray in strays.items()} == {
        f"executables/{'0' * 64}": "not referred to",
        f"entries/{'0' * 64}.json": "not referred to",
        "executables/.x.unfinished": "unfinished: a build was killed, or is running",
        "notes.txt": "unknown",
        "executables/notes.txt": "unknown",
        f"more/{'0' * 64}": "unknown",
        "pipe": "unknown, a fifo",
        "way out": "unknown, a symbolic link",
        "set-aside/x.0": "set aside",
    }
    assert strays[f"executables/{'0' * 64}"].bytes == 5


@pytest.mark.parametrize(("damage", "words"), [(link, "a symbolic link"), (fifo, "a fifo"), (directory, "a directory")])
def test_a_manifest_that_is_no_file_of_its_own_is_refused_at_once(bundle, damage, words):
    damage(bundle / "manifest.json")
    with pytest.raises(CorruptBundle, match=f"manifest.json: {words}, where a file"):
        read_manifest(bundle)


# -- setting aside


def test_only_what_is_of_no_use_is_set_aside(bundle, manifest, paths):
    for damage, path in zip([cut, link, directory, os.unlink], paths, strict=False):
        damage(path)
    moved, left = quarantine_flaws(bundle, manifest, find_file_flaws(bundle, manifest))
    assert (list(moved), left) == (paths[:3], None)
    assert all(os.path.lexists(place) for place in moved.values())
    assert not any(os.path.lexists(path) for path in paths[:4])
    assert all(path.is_file() for path in paths[4:])


def test_a_sound_bundle_is_not_even_locked(bundle, manifest):
    (bundle / ".lock").unlink()
    assert quarantine_flaws(bundle, manifest, []) == ({}, None)
    assert not (bundle / ".lock").exists()


def test_while_a_builder_is_at_work_nothing_is_moved(store, bundle, manifest, paths):
    cut(paths[0])
    flaws = find_file_flaws(bundle, manifest)
    with store.open_for_building():
        moved, left = quarantine_flaws(bundle, manifest, flaws)
    assert moved == {} and "another dflash-precompile or dflash-bundle is at work here" in left
    assert paths[0].exists()


def test_what_a_builder_has_mended_meanwhile_stays(bundle, manifest, paths):
    whole = paths[0].read_bytes()
    cut(paths[0])
    flaws = find_file_flaws(bundle, manifest)
    paths[0].write_bytes(whole)
    assert quarantine_flaws(bundle, manifest, flaws) == ({}, None)
    assert check_file(list_expected_files(bundle, manifest)[0]) is None


def test_nothing_is_moved_to_where_a_link_leads(bundle, manifest, paths, tmp_path):
    cut(paths[0])
    (tmp_path / "elsewhere").mkdir()
    (bundle / "set-aside").symlink_to(tmp_path / "elsewhere")
    moved, left = quarantine_flaws(bundle, manifest, find_file_flaws(bundle, manifest))
    assert moved == {} and "set-aside is a symbolic link" in left
    assert paths[0].exists() and list((tmp_path / "elsewhere").iterdir()) == []


def test_where_nothing_can_be_moved_that_is_said(bundle, manifest, paths):
    cut(paths[0])
    (bundle / "set-aside").touch()
    moved, left = quarantine_flaws(bundle, manifest, find_file_flaws(bundle, manifest))
    assert moved == {} and "set-aside" in left
    assert paths[0].exists()
