"""Grids: parsing, refusals, and the choice of buckets and chunks."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.cache.grid import Bucket, Grid, check_positions, default_grid, find_named, parse_grid

BLOCK = 16
TEXT = "batch=1,4 length=32,128 k=0,3,7 prefill=8,32"


def sizes(low, high, most=4):
    return st.lists(st.integers(low, high), min_size=1, max_size=most, unique=True).map(lambda s: tuple(sorted(s)))


GRIDS = st.builds(
    Grid,
    batch=sizes(1, 20),
    length=sizes(16, 300),
    k=sizes(1, BLOCK - 1, 3).map(lambda ks: (0, *ks)),
    prefill=sizes(1, 300),
).filter(lambda grid: grid.prefill[-1] <= grid.length[-1])


def test_parse_grid_accepts_axes_and_sizes_in_any_order():
    grid = parse_grid("k=7,0,3 prefill=32,8 length=128,32 batch=4,1", BLOCK)
    assert grid == Grid(batch=(1, 4), length=(32, 128), k=(0, 3, 7), prefill=(8, 32))


def test_k_zero_is_always_added():
    assert parse_grid("batch=1 length=32 k=7 prefill=8", BLOCK).k == (0, 7)


@given(GRIDS)
def test_parse_grid_inverts_str(grid):
    assert parse_grid(str(grid), BLOCK) == grid


def test_invalid_text_is_refused_with_the_invalid_part():
    for text, words in [
        ("", "batch, length, k, prefill missing. All four axes are needed, for example"),
        ("batch=1 len=32 k=3 prefill=8", "unknown len (did you mean length?); expected batch, length"),
        ("batch=1 length=32 k=3 prefill=8 width=2", "unknown width; expected batch, length, k, prefill"),
        ("batch=1 length=32 k=3 prefill=8 batch=2", "batch is given twice"),
        ("batch=1, length=32 k=3 prefill=8", "cannot read 'batch=1,'"),
        ("batch=٤ length=32 k=3 prefill=8", "cannot read 'batch=٤'"),
        ("batch=0 length=32 k=3 prefill=8", "batch holds 0; expected rows decoded together, at least 1"),
        ("batch=1 length=1 k=0 prefill=1", "length holds 1; expected kv positions attended to, at least 2"),
        ("batch=1 length=99999999 k=0 prefill=4", "length holds 99999999; expected kv positions attended to, at least"),
        ("batch=1 length=64 k=0,3 prefill=4 rounds=4,8", "rounds=4,8: expected a single number"),
        ("batch=1 length=64 k=0,3 prefill=4 rounds=0", "rounds holds 0"),
        ("batch=1,4,1 length=32 k=3 prefill=8", "batch has a size twice: 1,4,1"),
        ("batch=1 length=32 k=16 prefill=8", "k=16, but a block of 16 holds the last token and 15 drafted tokens"),
        ("batch=1 length=8,32 k=8 prefill=8", "length=8 is too short to verify k=8 tokens after the last token"),
        ("batch=1 length=32 k=3 prefill=8,64", "prefill=64 is wider than the longest length=32"),
    ]:
        with pytest.raises(BadInput) as refused:
            parse_grid(text, BLOCK)
        assert str(refused.value).startswith(f"--buckets '{text}': {words}")


def test_toml_file_gives_the_same_grid_as_the_text(tmp_path):
    path = tmp_path / "grid.toml"
    with pytest.raises(BadInput, match=r"grid\.toml: No such file or directory"):
        parse_grid(str(path), BLOCK)
    path.write_text("batch = [1, 4]\nlength = [32, 128]\nk = [3, 7]\nprefill = 8\nrounds = 8\n")
    assert parse_grid(str(path), BLOCK) == parse_grid("batch=1,4 length=32,128 k=3,7 prefill=8 rounds=8", BLOCK)


def test_invalid_toml_file_is_refused_with_its_path(tmp_path):
    for content, words in [
        ("batch = [1", ": not TOML: "),
        ("batch = [1]\nlength = [32]\nk = [3]", ": prefill missing"),
        ("batch = [1]\nlength = [32]\nk = [3]\nprefill = [8]\nrows = 1", ": unknown rows"),
        ("batch = true\nlength = [32]\nk = [3]\nprefill = [8]", ": batch holds True"),
        ("batch = '1,4'\nlength = [32]\nk = [3]\nprefill = [8]", ": batch holds '1,4'"),
        ("batch = []\nlength = [32]\nk = [3]\nprefill = [8]", ": batch holds nothing"),
    ]:
        path = tmp_path / "grid.toml"
        path.write_text(content)
        with pytest.raises(BadInput) as refused:
            parse_grid(str(path), BLOCK)
        assert f"{path}{words}" in str(refused.value)


def test_grid_longer_than_the_models_positions_is_refused():
    grid = parse_grid(TEXT, BLOCK)
    check_positions(grid, {"target": 128, "draft": 128})
    with pytest.raises(BadInput, match="length=128, but draft allows 127 .max_position_embeddings.* raise .* YaRN"):
        check_positions(grid, {"target": 128, "draft": 127})


@given(data=st.data(), block=st.integers(2, 64), positions=st.integers(64, 1 << 17))
def test_default_grid_covers_its_own_maximum(data, block, positions):
    k = data.draw(st.integers(1, block - 1))
    grid = default_grid(block, positions, k)
    check_positions(grid, {"target": positions})
    assert grid.fit(grid.slots, grid.capacity, k) == Bucket(grid.slots, grid.capacity, k) == max(grid.buckets())
    assert grid.fit(1, 1, 0) == min(grid.buckets())
    assert grid.count() == len(grid.buckets()) + len(grid.chunks())
    assert grid.k[0] == 0
    flat = default_grid(block, positions, k, reads_own_length=True, flat_in_k=True)
    assert (flat.length, flat.k) == ((grid.capacity,), (0, k))
    assert str(default_grid(block, positions, k, recurrent=True)) == f"{grid} saved_states=8"


def test_default_grid_refuses_models_shorter_than_a_block():
    assert default_grid(16, 16, 15).capacity == 16
    with pytest.raises(BadInput, match="max_position_embeddings .* 15 .*block of 16.* --buckets with k below 15"):
        default_grid(16, 15, 15)


@given(GRIDS, st.integers(1, 25), st.integers(1, 350), st.integers(0, BLOCK))
def test_fit_returns_the_smallest_bucket_that_fits(grid, batch, length, k):
    fitting = [b for b in grid.buckets() if b.batch >= batch and b.length >= length and b.k >= k]
    if fitting:
        found = grid.fit(batch, length, k)
        assert found in fitting
        assert all(found.batch <= b.batch and found.length <= b.length and found.k <= b.k for b in fitting)
    else:
        with pytest.raises(GridMiss):
            grid.fit(batch, length, k)


@given(GRIDS, st.data())
def test_fit_chunk_covers_every_prompt_up_to_the_capacity(grid, data):
    prompt = data.draw(st.integers(1, grid.capacity))
    start = 0
    while start < prompt:
        chunk = grid.fit_chunk(start, prompt - start)
        assert chunk in grid.chunks()
        count = min(chunk.prefill, prompt - start)
        assert start + count <= chunk.length
        assert not any(count <= width < chunk.prefill for width in grid.prefill), "a narrower chunk would do"
        assert not any(start + count <= c.length < chunk.length for c in grid.chunks() if c.prefill == chunk.prefill), (
            "a shorter bucket would do"
        )
        start += count


def test_prompt_longer_than_the_grid_raises_grid_miss():
    with pytest.raises(GridMiss, match="outside the grid: batch=1, length=129, k=0"):
        parse_grid(TEXT, BLOCK).fit_chunk(120, 9)


def test_pool_holds_every_slot_or_kv_positions():
    grid = parse_grid("batch=1,4 length=32,100 k=0 prefill=8 page=16", BLOCK)
    assert (grid.row_pages, grid.pool_pages) == (7, 28)
    small = parse_grid("batch=1,4 length=32,100 k=0 prefill=8 page=16 kv_positions=200", BLOCK)
    assert (small.row_pages, small.pool_pages) == (7, 13)
    assert str(small) == "batch=1,4 length=32,100 k=0 prefill=8 page=16 kv_positions=200"
    assert parse_grid(str(small), BLOCK) == small
    assert small.widened(8, 300, 0).kv_positions == 300


def test_united_grid_has_the_given_or_the_built_pool():
    plain, built = parse_grid("batch=1,4 length=100 k=0 prefill=8", BLOCK), "batch=2 length=50 k=0 prefill=8"
    small = parse_grid(f"{built} page=16 kv_positions=60 saved_states=3 mixed=1 packed=2 offload=1", BLOCK)
    assert (plain.united(small).page, plain.united(small).kv_positions) == (16, 100)  # it holds the longest request
    united = plain.united(small)
    assert (united.saved_states, united.mixed, united.packed, united.offload) == (3, 1, 2, 1)
    assert plain.united(parse_grid(f"{built} kv_positions=200", BLOCK)).kv_positions == 200
    asked = parse_grid(f"{plain} page=16 kv_positions=110", BLOCK)
    assert (asked.united(small).page, asked.united(small).kv_positions) == (16, 110)
    assert parse_grid(f"{built} saved_states=2", BLOCK).united(small).saved_states == 3  # as of the default grid
    for key, has in (
        ("page=64", small),
        ("page=16", plain),
        ("rounds=1", f"{built} rounds=2"),
        ("saved_states=2", small),
    ):
        text = f"{built} {key}"
        with pytest.raises(BadInput, match=f"{key} is asked for, and the bundle has {key.partition('=')[0]}="):
            parse_grid(text, BLOCK).united(parse_grid(str(has), BLOCK), find_named(text))
    with pytest.raises(BadInput, match="kv_positions=60 is asked for, and the bundle has length=100"):
        small.united(parse_grid(f"{plain} page=16", BLOCK))


def test_pool_shorter_than_the_longest_request_is_refused():
    with pytest.raises(BadInput, match="kv_positions=99 hold no request of the longest length=100"):
        parse_grid("batch=1,4 length=32,100 k=0 prefill=8 kv_positions=99", BLOCK)


@given(GRIDS, st.integers(1, 40), st.integers(1, 3))
def test_separate_tables_name_each_page_once(grid, page, rows):
    grid = msgspec.structs.replace(grid, page=page, kv_positions=rows * grid.capacity)
    tables = grid.separate_tables(range(grid.slots))
    assert all(len(set(table)) == grid.row_pages for table in tables)
    assert {page for table in tables for page in table} <= set(range(1, grid.pool_pages + 1))


def test_grid_miss_names_request_edge_and_remedy():
    with pytest.raises(GridMiss) as miss:
        parse_grid(TEXT, BLOCK).fit(5, 200, 7)
    assert str(miss.value) == (
        "outside the grid: batch=5, length=200, k=7 is needed, and the grid ends at batch=4, length=128, k=7. "
        "Precompile a wider grid: "
        "dflash-precompile --buckets 'batch=1,4,5 length=32,128,200 k=0,3,7 prefill=8,32'"
    )


@given(GRIDS, st.integers(1, 40), st.integers(1, 3000), st.integers(0, BLOCK - 1))
def test_remedy_of_a_grid_miss_fits_the_request(grid, batch, length, k):
    remedy = str(grid.miss(batch, length, k)).split("'")[1]
    wider = parse_grid(remedy, BLOCK)
    wider.fit(batch, length, k)
    assert all(set(getattr(grid, axis)) <= set(getattr(wider, axis)) for axis in ("batch", "length", "k", "prefill"))


@given(GRIDS, GRIDS)
def test_united_grid_has_the_sizes_of_both(one, other):
    both = one.united(other)
    assert both == other.united(one) and both.united(one) == both
    assert {*one.buckets(), *other.buckets()} <= {*both.buckets()}


def test_rounds_are_optional():
    grid = parse_grid("batch=1,4 length=64 k=0,3 prefill=4 rounds=8", BLOCK)
    assert grid.rounds == 8
    assert str(grid) == "batch=1,4 length=64 k=0,3 prefill=4 rounds=8"
    assert str(grid.widened(8, 64, 3)) == "batch=1,4,8 length=64 k=0,3 prefill=4 rounds=8"
    plain = parse_grid("batch=1,4 length=64 k=0,3 prefill=4", BLOCK)
    assert plain.rounds == 1 and "rounds" not in str(plain) and plain.buckets() == grid.buckets()
