"""How fast a machine is at best: what a roofline is drawn by where no vendor's figures are at hand."""

import time
from collections.abc import Callable

from dflash_aot.benchmarks.forward import Peaked, Peaks

READ_BYTES = 1 << 29  # far more than caches hold
SQUARE = 2048  # of a product: far more operations than bytes


def measure_peaks(read: Callable[[], object], multiply: Callable[[], object], question: Peaks) -> Peaked:
    """`read` returns once READ_BYTES are read, `multiply` once SQUARE² is multiplied by SQUARE². First calls warm up.

    Whoever measures with several libraries takes the best: no machine is slower than what was seen on it.
    """
    seconds = {call: [_time(call) for _ in range(question.calls + 1)][1:] for call in (read, multiply)}
    return Peaked(
        bytes_per_second=[READ_BYTES / one for one in seconds[read]],
        flops_per_second=[2 * SQUARE**3 / one for one in seconds[multiply]],
    )


def _time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
