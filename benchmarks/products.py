"""Products of weights and rows by the order of their operands, at the shapes of Qwen3-0.6B's MLP.

    python -m dflash_aot.benchmarks.products [--dtype float32|bfloat16] [--rows 1,2,16,64] [--layers 8] [--repeats 9]

Each call runs through the MLPs of so many layers: every weight comes from memory, as it does in a model. The ways
take turns. What XLA makes of a product depends on the order of its operands, see `compile/models/matmul.py`;
PyTorch's own product stands beside, where it is installed.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_aot.compile.models.matmul import matmul, matmul_rows_first, matmul_weight_first

HIDDEN, WIDTH = 1024, 3072
Product = Callable[[jax.Array, jax.Array], jax.Array]
Call = Callable[[], object]
WAYS: dict[str, Product] = {
    "rows first": lambda weight, x: matmul_rows_first(weight, x).astype(x.dtype),
    "weight first": lambda weight, x: matmul_weight_first(weight, x).astype(x.dtype),
    "as chosen": matmul,
}


def run_mlps(product: Product, x: jax.Array, *weights: jax.Array) -> jax.Array:
    """x [rows, hidden] through one MLP after the other: gate, up, down of each."""
    for layer in range(0, len(weights), 3):
        gate, up, down = weights[layer : layer + 3]
        x = x + product(down, jax.nn.silu(product(gate, x)) * product(up, x))
    return x


def prepare(rows: int, weights: Sequence[np.ndarray]) -> dict[str, Call]:
    """By way, one call that waits for its result."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, HIDDEN), np.float32).astype(weights[0].dtype)
    placed = [jax.device_put(one) for one in (x, *weights)]

    def call(run: Callable[..., jax.Array]) -> object:
        return run(*placed).block_until_ready()

    calls: dict[str, Call] = {
        way: partial(call, jax.jit(partial(run_mlps, product)).lower(*placed).compile())
        for way, product in WAYS.items()
    }
    return calls | prepare_torch(x, weights)


def prepare_torch(x: np.ndarray, weights: Sequence[np.ndarray]) -> dict[str, Call]:
    """The same in PyTorch; nothing where it is not installed."""
    try:
        import torch  # noqa: PLC0415  only to compare with
        from torch.nn.functional import linear, silu  # noqa: PLC0415
    except ImportError:
        return {}
    dtype = torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32
    start, *placed = (torch.from_numpy(one.astype(np.float32)).to(dtype) for one in (x, *weights))

    def call() -> object:
        y = start
        with torch.inference_mode():
            for layer in range(0, len(placed), 3):
                gate, up, down = placed[layer : layer + 3]
                y = y + linear(silu(linear(y, gate)) * linear(y, up), down)
        return y

    return {"PyTorch": call}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    shapes = [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)] * options.layers
    weights = [(rng.standard_normal(shape, np.float32) / 32).astype(jnp.dtype(options.dtype)) for shape in shapes]
    print(f"milliseconds for {options.layers} MLPs of Qwen3-0.6B, {options.dtype}; median of {options.repeats}")
    for rows in map(int, options.rows.split(",")):
        calls = prepare(rows, weights)
        spent: dict[str, list[float]] = {way: [] for way in calls}
        for _ in range(1 + options.repeats):
            for way, call in calls.items():
                began = time.perf_counter()
                call()
                spent[way].append(time.perf_counter() - began)
        medians = (f"{way} {1e3 * statistics.median(times[1:]):.1f}" for way, times in spent.items())
        print(f"{rows:>4} rows:", ", ".join(medians), flush=True)


if __name__ == "__main__":
    main()
