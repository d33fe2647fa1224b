"""What one dispatch of a compiled program costs the thread that makes it, by arguments and by what the device does.

    python benchmarks/dispatch.py

Nothing of this project runs here: it is the floor under "host time per round". On a CPU the device computes on the
same cores, so that behind every computation the caller's caches are cold.
"""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

CALLS = 200


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


def measure(arguments: int, width: int) -> float:
    """Seconds of this thread's work per dispatch, median."""
    program, spent = make_program(arguments, width), []
    state = jax.device_put(np.zeros(64, np.float32), jax.devices()[0])
    for _ in range(CALLS):
        began = time.thread_time()
        state = program(state)
        spent.append(time.thread_time() - began)
        state.block_until_ready()
    return statistics.median(spent[CALLS // 10 :])


def main() -> None:
    print(f"{jax.devices()[0].device_kind}: microseconds of work per dispatch")
    print(f"{'arguments':>9} {'idle device':>12} {'busy device':>12}")
    for arguments in (1, 30, 90):
        print(f"{arguments:>9} {measure(arguments, 8) * 1e6:>12.0f} {measure(arguments, 512) * 1e6:>12.0f}")


if __name__ == "__main__":
    main()
