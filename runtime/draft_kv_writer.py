"""Writes the draft's kv after prefills and rounds. Rounds with K = 0 defer the write until a draft needs the kv.

So an engine that stays at K = 0 calls kv_write once for many rounds. A call's time depends more on the weights that it
reads than on the number of positions.
"""

from collections.abc import Sequence

import jax
import numpy as np

from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle

RowKey = tuple[int, int] | None  # of the request in a row, see `RunningRequest.key`; None for an empty row
MAX_JOINED_BYTES = 4 * 2**20  # of features that the host joins in one step: about a millisecond


class DraftKvWriter:
    """Calls kv_write, and keeps the features of rounds with K = 0 whose kv is not written yet.

    These rounds follow one another with the same rows, and each advances every row by one position. `catch_up` comes
    before anything else that reads or writes draft kv: a request that has ended may have given its pages away by then.

    Nothing waits for the device. Features go through the host, which joins them, but for those of the newest rounds:
    the host reads outcomes one step late, so all older rounds are done.
    """

    def __init__(self, bundle: LoadedBundle, state: DeviceState):
        self._bundle, self._state = bundle, state
        self._widths = [k + 1 for k in bundle.manifest.grid.k if k <= bundle.k]
        self._rows: Sequence[RowKey] = []  # of the latest round
        self._pages: jax.Array | None = None  # of the latest round; rows keep the pages of the rounds before it
        self._deferred: list[tuple[jax.Array, jax.Array]] = []  # features [B, 1, F] and starts [B], oldest first

    def write(self, pages: jax.Array, features: jax.Array, starts: jax.Array) -> None:
        """Dispatches the write of features [B, T, F] at positions from `starts` on; nothing if no round drafts."""
        if self._bundle.k:
            rows, width, _ = features.shape
            self._bundle.kv_write(rows, width)(self._state, pages, features, starts)

    def defer(self, rows: Sequence[RowKey], pages: jax.Array, features: jax.Array, starts: jax.Array) -> None:
        """Keeps features [B, 1, F] of a round with K = 0 that was just dispatched. rows: see `RoundBatch.keys`."""
        if not self._bundle.k:
            return
        if rows != self._rows:
            self.catch_up()
        if 1 not in (widths := self._list_widths(features)):
            self.write(pages, features, starts)  # first call of kv_write in a round that is not timed
            return
        features.copy_to_host_async()
        self._rows, self._pages = rows, pages
        self._deferred.append((features, starts))
        if len(self._deferred) > widths[-1] + 1:  # the newest two rounds may be running
            self._write_oldest(widths[-1])

    def catch_up(self) -> None:
        """Dispatches the deferred writes. The newest round may be running."""
        if len(self._deferred) > 1:
            self._write_oldest(len(self._deferred) - 1)
        if self._deferred:
            self._write_oldest(1)

    def _list_widths(self, features: jax.Array) -> list[int]:
        """Widths for features [B, 1, F] whose executables were called before: a first call takes longer."""
        widest = max(1, MAX_JOINED_BYTES // features.nbytes)
        rows = features.shape[0]
        return [one for one in self._widths if one <= widest and self._bundle.has_run_kv_write(rows, one)]

    def _write_oldest(self, count: int) -> None:
        """Makes a call, with zeros after the features: the kv of the zeros is overwritten before it is read."""
        oldest, self._deferred = self._deferred[:count], self._deferred[count:]
        features, starts = oldest[0]
        if count > 1:
            rows, _, size = features.shape
            width = next(width for width in self._list_widths(features) if width >= count)
            joined = np.zeros((rows, width, size), features.dtype)
            for index, (one, _) in enumerate(oldest):
                joined[:, index] = np.asarray(one)[:, 0]
            features = self._state.to_device(joined)
        assert self._pages is not None
        self.write(self._pages, features, starts)
