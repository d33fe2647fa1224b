"""Required executables: which executables a prefill chunk or a round calls, and in which order to load them."""

from collections.abc import Iterator, Sequence

from dflash_aot.cache.grid import Bucket, Chunk, Grid
from dflash_aot.cache.sampling_state import SamplingKind, SamplingMode, list_modes
from dflash_aot.cache.signature import MULTI_ROUND_PROGRAMS, VERIFY_PROGRAMS, ExecutableId

RoundShape = tuple[Bucket, SamplingMode]  # the bucket of a round, and how it verifies


def list_round_shapes(grid: Grid, sampling: Sequence[SamplingKind], k: int) -> list[RoundShape]:
    """All shapes of rounds that verify up to `k` drafted tokens."""
    return [
        (bucket, mode)
        for mode in list_modes(sampling)
        for bucket in grid.buckets()
        if bucket.k <= k
    ]


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


def list_multi_round_executables(
    bucket: Bucket, mode: SamplingMode, grid: Grid
) -> list[ExecutableId]:
    """The executable of a multi-round step; empty where the grid has none for such rounds."""
    if grid.rounds == 1 or mode not in MULTI_ROUND_PROGRAMS:
        return []
    return [(MULTI_ROUND_PROGRAMS[mode], (bucket.batch, bucket.length, bucket.k, grid.rounds))]


def list_shape_executables(shape: RoundShape, grid: Grid, drafts: bool) -> list[ExecutableId]:
    """The executables of a shape: of multi-round steps, of single rounds, and of the write of sampling states."""
    bucket, mode = shape
    written: list[ExecutableId] = [] if mode == "greedy" else [("admit", ())]
    together = list_multi_round_executables(bucket, mode, grid)
    return [*written, *together, *list_round_executables(bucket, mode, drafts)]


def order_loading(
    grid: Grid, sampling: Sequence[SamplingKind], ks: Sequence[int]
) -> Iterator[list[ExecutableId]]:
    """Groups of executables in loading order, each group of one chunk or round; executables may repeat.

    ks: in the order of their expected worth. First comes what a short prompt alone needs with the best K; then that K
    for longer prompts and more rows, then the next K. A greedy request alone needs no single rounds.
    """
    drafts = max(ks) > 0
    met = set()
    shapes = [
        (Bucket(batch, length, k), mode)
        for k in ks
        for mode in list_modes(sampling)
        for batch in grid.batch
        for length in grid.length
    ]
    alone = list_shape_executables(shapes[0], grid, drafts)
    if shapes[0][1] == "greedy":
        alone = list_multi_round_executables(*shapes[0], grid) or alone
    yield [*list_chunk_executables(grid.fit_chunk(0, 1), drafts), *alone]
    for shape in shapes:
        if (length := shape[0].length) not in met:
            met.add(length)
            yield from (
                list_chunk_executables(chunk, drafts)
                for chunk in grid.chunks()
                if chunk.length == length
            )
        yield list_shape_executables(shape, grid, drafts)
    if "prompt_logprobs" in sampling:
        yield from (list_chunk_executables(chunk, drafts, scored=True) for chunk in grid.chunks())
    yield [("move", ())]
