"""The plain `jax.jit` loop of jit_loop.py, as a peer: python -m dflash_aot.benchmarks.peer_jit"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_aot.benchmarks.jit_loop import JitLoop, Jitted
from dflash_aot.benchmarks.orders import JitOrder
from dflash_aot.benchmarks.peer import Handlers, run_peer
from dflash_aot.benchmarks.traffic import Serve, Served
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.devices import select_jax_platforms


@contextmanager
def open_way(order: JitOrder) -> Iterator[Handlers]:
    """What a question needs is compiled when the first one of its kind is asked."""
    manifest = read_manifest(Path(order.bundle))
    select_jax_platforms(manifest.environment.platform)
    jitted = Jitted(manifest, order.target, order.draft)

    @functools.cache
    def find_loop(rows: int, tokens: int) -> JitLoop:
        return JitLoop(jitted, rows, order.k, order.longest, tokens)

    def serve(question: Serve) -> Served:
        return find_loop(len(question.lists), question.max_tokens).serve(question.lists)

    yield {Serve: serve}


if __name__ == "__main__":
    run_peer(JitOrder, open_way)
