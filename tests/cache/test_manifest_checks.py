"""Manifest checks: invalid grids are refused before any bucket is created."""

import tracemalloc
from pathlib import Path

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.verification import check_consistent
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.weight_recipe import WeightFormats


def check(manifest, **axes: tuple[int, ...]) -> None:
    check_consistent(Path("b"), structs.replace(manifest, grid=structs.replace(manifest.grid, **axes)))


def test_built_manifest_is_consistent(manifest):
    check(manifest)


def test_second_entry_of_an_executable_is_refused(manifest):
    first = manifest.entries[0]
    with pytest.raises(CorruptBundle, match=f"two entries for {first.signature.label}"):
        check(structs.replace(manifest, entries=(*manifest.entries, first)))


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("page", 0), ("page", -1), ("page", 1 << 60), ("kv_positions", 1), ("kv_positions", 1 << 60)],
)
def test_impossible_pages_are_refused(manifest, field, value):
    with pytest.raises(CorruptBundle, match=f"grid: {field} is {value}, expected .* to 16777216"):
        check(manifest, **{field: value})


def test_invalid_or_missing_rounds_are_refused(manifest):
    with pytest.raises(CorruptBundle, match="grid: rounds is 0"):
        check(manifest, rounds=0)
    with pytest.raises(CorruptBundle, match="no entry for rounds batch=1"):
        check(manifest, rounds=4)


def test_weight_formats_that_contradict_the_weights_are_refused(manifest):
    with pytest.raises(CorruptBundle, match="weights: those of the draft contradict weight_formats"):
        check_consistent(Path("b"), structs.replace(manifest, weight_formats=WeightFormats(draft="int8")))
