"""What a move, a chunk and a round are in executables. Enqueues; nothing here waits, and nothing knows a request."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from dflash_aot.cache.grid import Bucket, Chunk
from dflash_aot.cache.signature import MAX_STOP_TOKENS
from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle


class Dispatcher:
    """The calls of a bundle's executables on one state."""

    def __init__(self, bundle: LoadedBundle, state: DeviceState):
        self._bundle, self._state, self._place = bundle, state, state.place
        self._drafts = bundle.k > 0  # without drafts there is no draft kv to write
        place = state.place
        # By the mask of active rows. Nothing of an engine is in it: one that is closed is gone.
        self._active = functools.lru_cache(maxsize=256)(lambda mask: place(np.array(mask)))
        self._counts = functools.lru_cache(maxsize=256)(lambda count: place(np.array([count], np.int32)))
        self._ends = functools.lru_cache(maxsize=256)(lambda ends: place(_list_ends(ends)))
        self._slots = {batch: place(np.arange(batch, dtype=np.int32)) for batch in bundle.manifest.grid.batch}

    def move(self, source: int, destination: int) -> None:
        """All that one slot is to another."""
        self._bundle.move()(self._state, self._number(source), self._number(destination))

    def prefill(self, chunk: Chunk, slot: int, start: int, part: Sequence[int]) -> jax.Array:
        """`part` of a prompt, from position `start` on. Returns the token behind it, int32 [1]."""
        tokens = np.zeros((1, chunk.prefill), np.int32)
        tokens[0, : len(part)] = part
        slots, starts, counts = map(self._number, (slot, start, len(part)))
        features, first = self._bundle.prefill(chunk)(self._state, self._place(tokens), slots, starts, counts)
        if self._drafts:
            self._bundle.kv_write(1, chunk.prefill)(self._state, features, slots, starts)
        return first

    def round(self, bucket: Bucket, active: Sequence[bool], sampled: bool) -> Sequence[jax.Array]:
        """Draft, verify, kv_write of the first slots, of which `active` advance.

        Returns the verdict int32 [B, 2K+2]; of a sampled round [B, 3K+3], and the likeliest tokens, int32 and float32
        [B, K+1, n].
        """
        block = self._bundle.draft(bucket)(self._state) if bucket.k else ()
        verify = self._bundle.sampled_verify(bucket) if sampled else self._bundle.verify(bucket)
        features, starts, *verdict = verify(self._state, *block, self._active(tuple(active)))
        if self._drafts:
            write = self._bundle.kv_write(bucket.batch, bucket.k + 1)
            write(self._state, features, self._slots[bucket.batch], starts)
        return verdict

    def rounds(
        self, bucket: Bucket, count: int, left: int | jax.Array, ends: frozenset[int]
    ) -> tuple[jax.Array, jax.Array]:
        """Up to `count` rounds of the first slot, as long as tokens are `left` to be generated and none of `ends` came.

        Returns their verdicts, int32 [N, 2K+2], -1 where none was needed, and what is left then, int32 [1].
        """
        left = self._number(left) if isinstance(left, int) else left
        verdicts, left = self._bundle.rounds(bucket)(self._state, self._counts(count), left, self._ends(ends))
        return verdicts, left

    def _number(self, number: int) -> jax.Array:
        return self._place(np.array([number], np.int32))


def _list_ends(ends: frozenset[int]) -> np.ndarray:
    """Those that the device looks for. Where there are more, the host sees the others, some rounds later."""
    listed = np.full(MAX_STOP_TOKENS, -1, np.int32)
    known = sorted(ends)[:MAX_STOP_TOKENS]
    listed[: len(known)] = known
    return listed
