"""A round in three dispatches, in one, and several rounds in one: time per round, and work of who dispatches them.

    python -m dflash_aot.benchmarks.together --bundle DIR [--repeats 40]

The bundle needs a grid with `rounds` (--buckets "batch=1 length=256 k=0,7 prefill=64 rounds=8"). No engine: as many
rounds as a dispatch may run are enqueued, then all verdicts are read. All ways take turns from the same state, and must
give the same verdicts.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from dflash_aot.benchmarks.script import run_script
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.jax_platform import select_jax_platforms
from dflash_aot.runtime.executables.bundle_loading import load_engine_parts
from dflash_aot.runtime.executables.dispatcher import Dispatcher
from dflash_aot.runtime.executables.executable import DeviceState

START = 16  # positions of noise that the rounds begin behind
NOTHING = frozenset[int]()
Way = Callable[[], list[jax.Array]]


def make_ways(dispatch: Dispatcher, bucket: Bucket, most: int) -> dict[str, Way]:
    """Each runs `most` rounds and returns their verdicts."""

    def in_three() -> list[jax.Array]:
        return [dispatch.round(bucket, [True], sampled=False)[0] for _ in range(most)]

    def in_one() -> list[jax.Array]:
        return [dispatch.rounds(bucket, 1, 1 << 20, NOTHING)[0] for _ in range(most)]

    def together() -> list[jax.Array]:
        return [dispatch.rounds(bucket, most, 1 << 20, NOTHING)[0]]

    return {"three dispatches": in_three, "one": in_one, f"one for {most} rounds": together}


def restart(state: DeviceState) -> None:
    """Length and anchor of before; what lies behind the length is nobody's."""
    state.replace(("lengths",), [state.place(np.full(1, START, np.int32))])
    state.replace(("anchors",), [state.place(np.full(1, 5, np.int32))])
    state.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    grid = read_manifest(Path(options.bundle)).grid
    if grid.rounds == 1 or grid.slots > 1:
        raise BadInput(f"{options.bundle}: its grid is {grid}; batch=1 and rounds above 1 are needed")
    select_jax_platforms(read_manifest(Path(options.bundle)).environment.platform)
    opened = load_engine_parts(Path(options.bundle), None, None, grid.k[-1])
    dispatch = Dispatcher(opened.bundle, opened.state)
    print(f"medians of {options.repeats}, per round: milliseconds, and microseconds of work of the dispatching thread")
    for k in grid.k:
        measure(dispatch, opened.state, grid.fit(1, START + grid.rounds * (k + 1), k), grid.rounds, options.repeats)


def measure(dispatch: Dispatcher, state: DeviceState, bucket: Bucket, most: int, repeats: int) -> None:
    """Prints a line for each way. Ends the process where they do not agree."""
    ways = make_ways(dispatch, bucket, most)
    spent: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for repeat in range(1 + repeats):
        answers = set()
        for way, run in ways.items():
            restart(state)
            began, worked = time.perf_counter(), time.thread_time()
            verdicts = run()
            worked = time.thread_time() - worked
            rows = np.concatenate([np.asarray(one) for one in verdicts])
            answers.add(rows[rows[:, 0] >= 0].tobytes())  # but for rounds that were not asked for
            if repeat:
                spent[way].append((time.perf_counter() - began, worked))
        if len(answers) != 1:
            sys.exit(f"void: at K = {bucket.k} the ways do not agree on the verdicts")
    for way, times in spent.items():
        seconds, worked = (statistics.median(column) / most for column in zip(*times, strict=True))
        print(f"K={bucket.k:<3} {way:<22} {1e3 * seconds:7.2f} ms {1e6 * worked:6.0f} µs", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
