"""Bundle verification: flaws, unexpected files, and the quarantine of corrupt files."""

import os
import tracemalloc
from pathlib import Path

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.verification import (
    check_consistent,
    find_file_flaw,
    find_file_flaws,
    find_unexpected_files,
    list_expected_files,
    quarantine_flaws,
)
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.weight_recipe import WeightFormats
from tests.cache.damage import cut, directory, fifo, flip


@pytest.fixture
def bundle(store):
    return store.bundle


@pytest.fixture
def paths(bundle, manifest):
    return [expected.path for expected in list_expected_files(bundle, manifest)]


def link(path):
    path.symlink_to(path.rename(path.parents[1] / "elsewhere"))


def test_whole_bundle_has_no_flaws_and_no_unexpected_files(bundle, manifest, paths):
    assert find_file_flaws(bundle, manifest) == []
    assert find_unexpected_files(bundle, manifest) == []
    assert set(paths) == {path for name in ("executables", "programs") for path in (bundle / name).iterdir()}


def test_all_flaws_are_reported_together(bundle, manifest, paths):
    damages = [cut, flip, link, fifo, directory, os.unlink]
    for damage, path in zip(damages, paths, strict=False):
        damage(path)
    fields = ["bytes", "sha256", "file", "file", "file", "file"]
    content = [True, True, True, True, True, False]  # a missing file cannot be moved
    found = [(flaw.path, flaw.field, flaw.content) for flaw in find_file_flaws(bundle, manifest)]
    assert found == list(zip(paths, fields, content, strict=False))


def forge_entry(manifest, content, serialized_bytes):
    blob, packed = pack_blob(content)
    entry = structs.replace(
        manifest.entries[0], sha256=blob.sha256, bytes=blob.bytes, serialized_bytes=serialized_bytes
    )
    return structs.replace(manifest, entries=(entry, *manifest.entries[1:])), packed


def test_forged_blob_is_found_by_its_unpacked_size(bundle, manifest, store):
    forged, packed = forge_entry(manifest, bytes(10**6), 100)
    store.executable_path(forged.entries[0]).write_bytes(packed)
    (flaw,) = find_file_flaws(bundle, forged)
    assert (flaw.field, flaw.expected) == ("serialized_bytes", "100")


def test_linked_directory_is_a_flaw(bundle, manifest, tmp_path):
    moved = (bundle / "executables").rename(tmp_path / "elsewhere")
    (bundle / "executables").symlink_to(moved)
    flaws = find_file_flaws(bundle, manifest)
    assert {(flaw.field, flaw.content) for flaw in flaws} == {("file", False)}
    assert len(flaws) == len(manifest.entries)
    assert [file.path for file in find_unexpected_files(bundle, manifest)] == [bundle / "executables"]


def test_unexpected_files_are_listed_with_their_kind(bundle, manifest):
    (bundle / "executables" / ("0" * 64)).write_bytes(b"12345")
    (bundle / "entries" / f"{'0' * 64}.json").touch()
    (bundle / "executables" / ".x.unfinished").touch()
    (bundle / "notes.txt").touch()
    (bundle / "executables" / "notes.txt").touch()
    (bundle / "more").mkdir()
    (bundle / "more" / ("0" * 64)).touch()
    os.mkfifo(bundle / "pipe")
    (bundle / "way out").symlink_to("/")
    (bundle / "quarantine").mkdir()
    (bundle / "quarantine" / "x.0").touch()
    unexpected = {str(file.path.relative_to(bundle)): file for file in find_unexpected_files(bundle, manifest)}
    assert {name: file.what for name, file in unexpected.items()} == {
        f"executables/{'0' * 64}": "not referred to",
        f"entries/{'0' * 64}.json": "not referred to",
        "executables/.x.unfinished": "unfinished: a build was killed, or is running",
        "notes.txt": "unknown",
        "executables/notes.txt": "unknown",
        f"more/{'0' * 64}": "unknown",
        "pipe": "unknown, a fifo",
        "way out": "unknown, a symbolic link",
        "quarantine/x.0": "quarantined",
    }
    assert unexpected[f"executables/{'0' * 64}"].bytes == 5


def test_file_that_was_rebuilt_meanwhile_stays(bundle, manifest, paths):
    whole = paths[0].read_bytes()
    cut(paths[0])
    flaws = find_file_flaws(bundle, manifest)
    paths[0].write_bytes(whole)
    assert quarantine_flaws(bundle, manifest, flaws) == ({}, None)
    assert find_file_flaw(list_expected_files(bundle, manifest)[0]) is None


def test_nothing_is_quarantined_through_a_link(bundle, manifest, paths, tmp_path):
    cut(paths[0])
    (tmp_path / "elsewhere").mkdir()
    (bundle / "quarantine").symlink_to(tmp_path / "elsewhere")
    moved, left = quarantine_flaws(bundle, manifest, find_file_flaws(bundle, manifest))
    assert moved == {} and "quarantine is a symbolic link" in left
    assert paths[0].exists() and list((tmp_path / "elsewhere").iterdir()) == []


def check(manifest, **axes: tuple[int, ...]) -> None:
    check_consistent(Path("b"), structs.replace(manifest, grid=structs.replace(manifest.grid, **axes)))


@pytest.mark.parametrize(
    ("axes", "count"),
    [
        ({"batch": 60, "length": 60, "k": 60}, 60**3 + 45),  # 45 chunks: 16 tokens, with lengths of 16 to 60
        ({"length": 600, "prefill": 600}, 600 * 2 + 600 * 601 // 2),
    ],
)
def test_grid_with_more_buckets_than_entries_is_refused_without_listing_buckets(manifest, axes, count):
    numbers = {axis: tuple(range(1, size + 1)) for axis, size in axes.items()}
    tracemalloc.start()
    with pytest.raises(CorruptBundle) as refused:
        check(manifest, **numbers)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    words = f"the grid has {count} buckets and chunks, but there are {len(manifest.entries)} entries"
    assert str(refused.value).startswith(f"b/manifest.json: {words}. Build it again: dflash-precompile --bundle b (")


@pytest.mark.parametrize("axis", ["batch", "length", "k", "prefill"])
@pytest.mark.parametrize("sizes", [(), (32, 16), (16, 16)])
def test_empty_or_unsorted_axis_is_refused(manifest, axis, sizes):
    with pytest.raises(CorruptBundle, match=f"grid: {axis} is empty or not ascending"):
        check(manifest, **{axis: sizes})


def test_impossible_pages_are_refused(manifest):
    more = ("page", 1 << 60), ("kv_positions", 1 << 60), ("packed", 1), ("offload", 2)
    for field, value in (("page", 0), ("kv_positions", 1), ("saved_states", -1), ("mixed", 2), *more):
        with pytest.raises(CorruptBundle, match=f"grid: {field} is {value}, expected"):
            check(manifest, **{field: value})


def test_invalid_or_missing_rounds_are_refused(manifest):
    check(manifest)
    with pytest.raises(CorruptBundle, match="grid: rounds is 0"):
        check(manifest, rounds=0)
    with pytest.raises(CorruptBundle, match="no entry for rounds batch=1"):
        check(manifest, rounds=4)


def test_contradicting_weight_formats_and_repeated_entries_are_refused(manifest):
    with pytest.raises(CorruptBundle, match="has two entries for"):
        check_consistent(Path("b"), structs.replace(manifest, entries=(*manifest.entries, manifest.entries[0])))
    with pytest.raises(CorruptBundle, match="weights: those of the draft contradict weight_formats"):
        check_consistent(Path("b"), structs.replace(manifest, weight_formats=WeightFormats(draft="int8")))
