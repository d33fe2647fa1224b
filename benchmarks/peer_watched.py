"""The engine or the plain loop, counted while it serves, as a peer: python -m dflash_aot.benchmarks.peer_watched"""

from collections.abc import Iterator
from contextlib import contextmanager

from dflash_aot.benchmarks import peer_engine, peer_jit
from dflash_aot.benchmarks.host_trace import count, find_loop, find_rounds, trace
from dflash_aot.benchmarks.observation import Watch, Watched, WatchedOrder
from dflash_aot.benchmarks.peer import Handlers, run_peer
from dflash_aot.benchmarks.traffic import Serve


@contextmanager
def open_way(order: WatchedOrder) -> Iterator[Handlers]:
    """Raises as what it opens does."""
    if order.engine:
        opening = peer_engine.open_way(order.engine)
    else:
        assert order.jit, "one of both"
        opening = peer_jit.open_way(order.jit)
    with opening as handlers:
        serve = handlers[Serve]

        def watch(question: Watch) -> Watched:
            """Raises VoidRecord where the trace makes no sense."""
            served, threads = trace(lambda: serve(question.serve()))
            events, rounds = find_rounds(find_loop(threads), served.work.rounds)
            return Watched(served, rounds, count(events))

        yield {Serve: serve, Watch: watch}


if __name__ == "__main__":
    run_peer(WatchedOrder, open_way)
