"""The training loop of both models: initial weights, AdamW with a schedule, steps, checkpoints, files of stages."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

from products import multiply_in_bfloat16

Weights = dict[str, jax.Array]
PRINTED_STEPS = 100  # the mean loss of so many steps is printed


def init_weights(shapes: dict[str, jax.ShapeDtypeStruct], layers: int, seed: int) -> Weights:
    """Initial weights: norms are 1, matrices are normal.

    Matrices that write into the residual stream are scaled down by the depth, as in GPT-2. The parts of DFlash2 change
    nothing at first: convolutions copy their input, and transitions have a score of zero.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        if "norm" in name:
            weights[name] = jnp.ones(shape.shape, jnp.float32)
            continue
        if name.endswith("base_kernel"):  # [side, tap, channel]
            weights[name] = jnp.zeros(shape.shape, jnp.float32).at[:, 0].set(1.0)
            continue
        if name.endswith(("kernel_projection.weight", "successor_codebook")):
            weights[name] = jnp.zeros(shape.shape, jnp.float32)
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = 0.02 / (2 * layers) ** 0.5 if residual else 0.02
        weights[name] = jnp.asarray(rng.standard_normal(shape.shape, np.float32) * scale)
    return weights


def optimizer(learning_rate: tuple[float, float], steps: int) -> optax.GradientTransformation:
    """AdamW with clipped gradients; the learning rate warms up for a twentieth of the steps, then follows a cosine."""
    peak, end = learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 20), steps, end)
    decayed = lambda weights: {name: leaf.ndim > 1 for name, leaf in weights.items()}  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed),
    )


def train(
    label: str,
    weights: Weights,
    loss: Callable[..., jax.Array],
    batches: Iterable[tuple],
    learning_rate: tuple[float, float],
    steps: int,
    checkpoint: Path,
    every: int,
    products: Callable[[], AbstractContextManager[None]] = multiply_in_bfloat16,
) -> Weights:
    """Minimizes `loss(weights, *batch)` for `steps` steps; prints the mean loss every PRINTED_STEPS.

    The state is saved in `checkpoint` every `every` steps, and stays there. If the file is there, training goes on
    after its steps, with the numbers of a run that was not interrupted; `batches` must be the same in each run. At
    least 2 steps: the first warms up.

    products: the context in which a step is traced.
    """
    rule = optimizer(learning_rate, steps)
    state, done, recent = rule.init(weights), 0, []

    @jax.jit
    def step(weights, state, *batch):
        with products():
            value, gradient = jax.value_and_grad(loss)(weights, *batch)
        updates, state = rule.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    if checkpoint.exists():
        (weights, state), done, recent = load_state(checkpoint, (weights, state))
        print(f"{label} goes on behind step {done}", flush=True)
    began = time.monotonic()
    for index, batch in enumerate(islice(batches, done, None), done + 1):
        weights, state, value = step(weights, state, *batch)
        recent.append(value)  # read later: otherwise the device waits for the host in every step
        if index % PRINTED_STEPS == 0 or index == steps:
            mean, seconds = np.mean(np.asarray(recent, np.float64)), time.monotonic() - began
            print(f"{label} {index}/{steps}  loss {mean:.3f}  {seconds:.0f} s", flush=True)
            recent = []
        if index % every == 0 and index < steps:
            save_state(checkpoint, (weights, state), index, recent)
    return weights


def run_stage(
    file: Path, compute: Callable[[Path], Mapping[str, jax.Array | np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays of a stage: those of its file if it is there, otherwise computed and written to it.

    compute: gets the file for the stage's own checkpoint, which is deleted once the stage's file is there.
    """
    checkpoint = file.with_suffix(".unfinished")
    if not file.exists():
        write_arrays(file, compute(checkpoint))
    checkpoint.unlink(missing_ok=True)
    return load_file(file)


def write_arrays(file: Path, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Writes a whole file or none."""
    new = file.with_suffix(".new")
    save_file({name: np.asarray(array) for name, array in arrays.items()}, new)
    new.replace(file)


def save_state(path: Path, state: object, done: int, recent: Sequence[float | jax.Array]) -> None:
    """Writes the arrays of a training state in their order, the steps done and the losses not printed yet."""
    arrays = {
        f"{number:05}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))
    }
    write_arrays(
        path, {**arrays, "done": np.asarray(done), "recent": np.asarray(recent, np.float64)}
    )


def load_state(path: Path, like: object) -> tuple[object, int, list[float]]:
    """What `save_state` wrote, in the structure of `like`."""
    arrays = load_file(path)
    done, recent = int(arrays.pop("done")), arrays.pop("recent").tolist()
    leaves = [jnp.asarray(arrays[name]) for name in sorted(arrays)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), done, recent
