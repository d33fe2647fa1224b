"""The engine on a bundle, as a peer: python -m dflash_aot.benchmarks.peer_engine"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dflash_aot.benchmarks.callers import serve_arrivals, serve_lists
from dflash_aot.benchmarks.orders import EngineOrder
from dflash_aot.benchmarks.peer import Handlers, run_peer
from dflash_aot.benchmarks.traffic import Arrive, Serve
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.runtime import Engine
from dflash_aot.runtime.engine import MAX_WAITING


@contextmanager
def open_way(order: EngineOrder) -> Iterator[Handlers]:
    """Raises as `Engine.open` does."""
    select_jax_platforms(read_manifest(Path(order.bundle)).environment.platform)
    max_waiting = order.max_waiting or MAX_WAITING
    # Without preload it would load what is left while it is measured, or while others are.
    with Engine.open(order.bundle, order.target, order.draft, order.k, max_waiting, preload=True) as engine:
        yield {
            Serve: partial(serve_lists, engine),
            Arrive: partial(serve_arrivals, engine),
        }


if __name__ == "__main__":
    run_peer(EngineOrder, open_way)
