"""Required executables: which ones a prefill chunk or a round calls, and in which order to load them."""

from collections.abc import Iterator, Sequence

from dflash_aot.cache.grid import Bucket, Chunk, Grid
from dflash_aot.cache.sampling_state import SamplingKind, SamplingMode, list_modes
from dflash_aot.cache.signature import VERIFY_PROGRAMS, ExecutableId

RoundShape = tuple[Bucket, SamplingMode]  # the bucket of a round, and how it verifies


def list_round_shapes(grid: Grid, sampling: Sequence[SamplingKind], k: int) -> list[RoundShape]:
    """All shapes of rounds that verify up to `k` drafted tokens."""
    return [(bucket, mode) for mode in list_modes(sampling) for bucket in grid.buckets() if bucket.k <= k]


def list_chunk_executables(chunk: Chunk, drafts: bool, scored: bool = False) -> list[ExecutableId]:
    """The executables of a prefill chunk. drafts: whether the draft's kv is kept. scored: whether tokens get scores."""
    written: list[ExecutableId] = [("kv_write", (1, chunk.prefill))] if drafts else []
    return [("scored_prefill" if scored else "prefill", (chunk.prefill, chunk.length)), *written]


def list_round_executables(bucket: Bucket, mode: SamplingMode, drafts: bool) -> list[ExecutableId]:
    """The executables of a single round, without the write of sampling states."""
    sizes = (bucket.batch, bucket.length, bucket.k)
    drafted: list[ExecutableId] = [("draft", sizes)] if bucket.k else []
    written: list[ExecutableId] = [("kv_write", (bucket.batch, bucket.k + 1))] if drafts else []
    return [*drafted, (VERIFY_PROGRAMS[mode], sizes), *written]


def list_multi_round_executables(bucket: Bucket, grid: Grid) -> list[ExecutableId]:
    """The executable of a multi-round step; empty where the grid has none for this bucket."""
    if grid.rounds == 1 or bucket.batch > 1:
        return []
    return [("rounds", (bucket.batch, bucket.length, bucket.k, grid.rounds))]


def list_shape_executables(shape: RoundShape, grid: Grid, drafts: bool) -> list[ExecutableId]:
    """The executables of a shape for a request that runs alone, the write of sampling states included."""
    bucket, mode = shape
    if mode != "greedy":
        return [("admit", ()), *list_round_executables(bucket, mode, drafts)]
    return list_multi_round_executables(bucket, grid) or list_round_executables(bucket, mode, drafts)


def order_loading(grid: Grid, sampling: Sequence[SamplingKind], ks: Sequence[int]) -> Iterator[list[ExecutableId]]:
    """Groups of executables in loading order, each group of one chunk or round; executables may repeat.

    ks: in the order of their expected worth. First comes what a short prompt alone needs with the best K; then that K
    for longer prompts and more rows, then the next K.
    """
    drafts, met = max(ks) > 0, set()
    shapes = [
        (Bucket(batch, length, k), mode)
        for k in ks
        for mode in list_modes(sampling)
        for batch in grid.batch
        for length in grid.length
    ]
    yield [*list_chunk_executables(grid.fit_chunk(0, 1), drafts), *list_shape_executables(shapes[0], grid, drafts)]
    for shape in shapes:
        if (length := shape[0].length) not in met:
            met.add(length)
            yield from (list_chunk_executables(chunk, drafts) for chunk in grid.chunks() if chunk.length == length)
        yield list_shape_executables(shape, grid, drafts)
    # Single rounds of shapes that have a multi-round step: requests that are not alone need them.
    yield from (list_round_executables(bucket, mode, drafts) for bucket, mode in shapes if mode == "greedy")
    if "prompt_logprobs" in sampling:
        yield from (list_chunk_executables(chunk, drafts, scored=True) for chunk in grid.chunks())
    yield [("move", ())]
