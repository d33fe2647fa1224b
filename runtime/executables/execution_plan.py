"""What a step of the loop calls, and in which order executables come to be needed. Pure: names and numbers."""

from collections.abc import Iterator, Sequence

from dflash_aot.cache.grid import Bucket, Chunk, Grid
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.cache.signature import ExecutableId

RoundShape = tuple[Bucket, bool]  # of a round: the bucket, and whether it samples


def list_round_shapes(grid: Grid, sampling: Sequence[SamplingMode], k: int) -> list[RoundShape]:
    """All kinds of rounds that verify up to `k` tokens."""
    return [(bucket, kind == "sample") for kind in sampling for bucket in grid.buckets() if bucket.k <= k]


def list_chunk_executables(chunk: Chunk, drafts: bool) -> list[ExecutableId]:
    """drafts: whether the draft's kv is kept."""
    written: list[ExecutableId] = [("kv_write", (1, chunk.prefill))] if drafts else []
    return [("prefill", (chunk.prefill, chunk.length)), *written]


def list_round_executables(bucket: Bucket, sampled: bool, drafts: bool) -> list[ExecutableId]:
    """Without what goes before the first one of a row."""
    sizes = (bucket.batch, bucket.length, bucket.k)
    drafted: list[ExecutableId] = [("draft", sizes)] if bucket.k else []
    written: list[ExecutableId] = [("kv_write", (bucket.batch, bucket.k + 1))] if drafts else []
    return [*drafted, ("sampled_verify" if sampled else "verify", sizes), *written]


def list_multi_round_executables(bucket: Bucket, grid: Grid) -> list[ExecutableId]:
    """Instead of a greedy round of a row that is alone; none where the grid has no such thing."""
    if grid.rounds == 1 or bucket.batch > 1:
        return []
    return [("rounds", (bucket.batch, bucket.length, bucket.k, grid.rounds))]


def list_shape_executables(kind: RoundShape, grid: Grid, drafts: bool) -> list[ExecutableId]:
    """What a row that is alone calls where it can, see `name_rounds`; of a sampled round also what goes before."""
    bucket, sampled = kind
    if sampled:
        return [("admit", ()), *list_round_executables(bucket, True, drafts)]
    return list_multi_round_executables(bucket, grid) or list_round_executables(bucket, False, drafts)


def order_loading(grid: Grid, sampling: Sequence[SamplingMode], ks: Sequence[int]) -> Iterator[list[ExecutableId]]:
    """Groups of names, each of something that runs; names may come again. `ks`: in the order of their worth.

    First what a short prompt alone needs with the best K; then that K for longer ones and more rows, then the next K.
    """
    drafts, met = max(ks) > 0, set()
    kinds = [
        (Bucket(batch, length, k), sampled)
        for k in ks
        for sampled in sorted(kind == "sample" for kind in sampling)
        for batch in grid.batch
        for length in grid.length
    ]
    yield [*list_chunk_executables(grid.fit_chunk(0, 1), drafts), *list_shape_executables(kinds[0], grid, drafts)]
    for kind in kinds:
        if (length := kind[0].length) not in met:
            met.add(length)
            yield from (list_chunk_executables(chunk, drafts) for chunk in grid.chunks() if chunk.length == length)
        yield list_shape_executables(kind, grid, drafts)
    # Beside those that several rounds in one call stand for: a row that is not alone needs them.
    yield from (list_round_executables(bucket, False, drafts) for bucket, sampled in kinds if not sampled)
    yield [("move", ())]
