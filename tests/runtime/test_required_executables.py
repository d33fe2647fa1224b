"""Which executables a round needs, and in which order they load: by hand and against a bundle."""

import itertools

import pytest

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.grid import Bucket, Chunk, parse_grid
from dflash_aot.runtime.executables.loaded_bundle import (
    list_chunk_executables,
    list_round_executables,
    list_round_shapes,
    list_shape_executables,
    order_loading,
)

BLOCK = 8


def order(buckets: str, ks: list[int], sampling: tuple[str, ...] = ("greedy",)) -> list[str]:
    """Each once, as "program sizes"."""
    needs = itertools.chain.from_iterable(order_loading(parse_grid(buckets, BLOCK), sampling, ks))
    return [f"{program} {','.join(map(str, sizes))}".strip() for program, sizes in dict.fromkeys(needs)]


def test_loading_order_by_hand():
    assert order("batch=1,2 length=16,32 k=0,3 prefill=4,32", [3, 0]) == [
        *("prefill 4,16", "kv_write 1,4", "draft 1,16,3", "verify 1,16,3"),  # its kv_write is the one of the chunk
        *("prefill 4,32", "prefill 32,32", "kv_write 1,32", "draft 1,32,3", "verify 1,32,3"),
        *("draft 2,16,3", "verify 2,16,3", "kv_write 2,4", "draft 2,32,3", "verify 2,32,3"),
        *("verify 1,16,0", "kv_write 1,1", "verify 1,32,0"),
        *("verify 2,16,0", "kv_write 2,1", "verify 2,32,0"),
        "move",
    ]


def test_multi_round_executable_loads_first():
    """A greedy request alone needs no single rounds."""
    found = order("batch=1 length=16 k=0,3 prefill=4 rounds=8", [3, 0])
    rest = ["draft 1,16,3", "verify 1,16,3", "rounds 1,16,0,8", "verify 1,16,0", "kv_write 1,1", "move"]
    assert found == ["prefill 4,16", "kv_write 1,4", "rounds 1,16,3,8", *rest]


def test_executables_of_a_round():
    bucket, grid = Bucket(2, 16, 3), parse_grid("batch=1,2 length=16 k=0,3 prefill=2,4 rounds=8 mixed=1", BLOCK)
    assert list_round_executables(Bucket(2, 16, 0), "greedy", drafts=False) == [("verify", (2, 16, 0))]
    assert list_shape_executables((bucket, "sample"), grid, drafts=True) == [
        ("admit", ()),
        ("sampled_rounds", (2, 16, 3, 8)),
        ("draft", (2, 16, 3)),
        ("sampled_verify", (2, 16, 3)),
        ("kv_write", (2, 4)),
        ("sampled_mixed", (2, 16, 3, 4)),
    ]
    assert list_shape_executables((bucket, "constrain"), grid, drafts=True) == [
        ("admit", ()),
        *list_round_executables(bucket, "constrain", drafts=True),
        ("constrained_mixed", (2, 16, 3, 4)),
    ]
    assert list_chunk_executables(Chunk(4, 16), drafts=False) == [("prefill", (4, 16))]


@pytest.mark.parametrize("name", ["tiny", "tied"])
def test_loading_order_covers_every_executable(bundle, name):
    """And no other executable, except `move` where there is one slot."""
    manifest = read_manifest(bundle(name))
    grid = manifest.grid
    needed = set(itertools.chain.from_iterable(order_loading(grid, manifest.sampling, grid.k)))
    there = {entry.signature.executable_id for entry in manifest.entries}
    assert there <= needed
    assert needed - there <= {("move", ())}
    kinds = list_round_shapes(grid, manifest.sampling, grid.k[-1])
    assert len(kinds) == len(set(kinds)) == len(grid.buckets()) * len(manifest.sampling)
