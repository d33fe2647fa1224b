"""What one call of an executable costs the thread that makes it, as a peer: python -m dflash_aot.benchmarks.peer_floor

Nothing of this project is called: it is the floor under the host's work per round. On a CPU the device computes on the
same cores, so that behind every computation the caller's caches are cold.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np

from dflash_aot.benchmarks.observation import Floor, FloorOrder
from dflash_aot.benchmarks.peer import Handlers, run_peer
from dflash_aot.cache.devices import select_jax_platforms


def make_program(arguments: int, width: int) -> Callable[[jax.Array], jax.Array]:
    """`arguments` small arrays, a donated one, and four products of `width`²."""
    device = jax.devices()[0]
    place = jax.sharding.SingleDeviceSharding(device)
    small = [jax.device_put(np.ones((8, 8), np.float32), device) for _ in range(arguments)]
    square = jax.device_put(np.full((width, width), 1e-3, np.float32), device)

    def work(state: jax.Array, square: jax.Array, *small: jax.Array) -> jax.Array:
        y = square
        for _ in range(4):
            y = y @ square
        return state + small[0][0, 0] + y[0, 0]

    state = jax.ShapeDtypeStruct((64,), np.float32)
    jitted = jax.jit(work, donate_argnums=0, keep_unused=True, in_shardings=place, out_shardings=place)
    compiled = jitted.lower(state, square, *small).compile()
    return lambda state: compiled(state, square, *small)


def measure_floor(question: Floor) -> list[float]:
    """The first call warms up."""
    program, spent = make_program(question.arguments, question.width), []
    state = program(jax.device_put(np.zeros(64, np.float32), jax.devices()[0]))
    for _ in range(question.calls):
        state.block_until_ready()
        began = time.thread_time()
        state = program(state)
        spent.append(time.thread_time() - began)
    return spent


@contextmanager
def open_way(order: FloorOrder) -> Iterator[Handlers]:
    """On the platform's first device."""
    select_jax_platforms(order.platform)
    yield {Floor: measure_floor}


if __name__ == "__main__":
    run_peer(FloorOrder, open_way)
