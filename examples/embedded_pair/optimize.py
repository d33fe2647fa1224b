"""The training loop of both models: initial weights, AdamW with a schedule, steps."""

import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

Weights = dict[str, jax.Array]


def init_weights(shapes: dict[str, jax.ShapeDtypeStruct], layers: int, seed: int) -> Weights:
    """Initial weights: norms are 1, matrices are normal.

    Matrices that write into the residual stream are scaled down by the depth, as in GPT-2.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        if "norm" in name:
            weights[name] = jnp.ones(shape.shape, jnp.float32)
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
) -> Weights:
    """Minimizes `loss(weights, *batch)` for `steps` steps; prints the mean loss every hundred steps."""
    rule = optimizer(learning_rate, steps)
    state = rule.init(weights)

    @jax.jit
    def step(weights, state, *batch):
        value, gradient = jax.value_and_grad(loss)(weights, *batch)
        updates, state = rule.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    began, recent = time.monotonic(), []
    for index, batch in enumerate(batches, 1):
        weights, state, value = step(weights, state, *batch)
        recent.append(value)
        if index % 100 == 0 or index == steps:
            mean = float(jnp.mean(jnp.stack(recent)))
            print(f"{label} {index}/{steps}  loss {mean:.3f}  {time.monotonic() - began:.0f} s", flush=True)
            recent = []
    return weights
