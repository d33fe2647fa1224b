"""Runs the layers of a model: unrolled, with a module per layer, or as a loop over one module with stacked weights.

On TPU the loop makes executables that are small and quick to compile and to dispatch (a dozen weight arguments instead
of hundreds). On CPU and GPU the loop copies each layer's weights out of the stack, so there the layers are unrolled.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx

Layer = TypeVar("Layer", bound=nnx.Module)
Carry = TypeVar("Carry")
LayerIndex = int | jax.Array


def make_layers(count: int, build: Callable[[], Layer], stacked: bool) -> nnx.Module:
    """Builds `count` layers for `run_layers`: a list of modules, or one module with stacked parameters."""
    if not stacked:
        return nnx.List([build() for _ in range(count)])
    graph, state = nnx.split(build())
    flat = [
        (path, leaf.replace(jnp.zeros((count, *leaf.get_value().shape), leaf.get_value().dtype), stacked=count))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def run_layers(
    layers: nnx.Module, count: int, body: Callable[[LayerIndex, Layer, Carry], Carry], carry: Carry
) -> Carry:
    """Applies body(i, layer i, carry) → carry to all layers in order. `i` is a traced scalar if they are stacked."""
    if isinstance(layers, nnx.List):
        for index, layer in enumerate(layers):
            carry = body(index, layer, carry)
        return carry
    graph, state = nnx.split(cast(Layer, layers))

    def step(index: jax.Array, carry: Carry) -> Carry:
        def pick(array: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
            if isinstance(array, jax.ShapeDtypeStruct):  # a weight that this program does not take
                return array
            return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)

        return body(index, nnx.merge(graph, jax.tree.map(pick, state)), carry)

    return jax.lax.fori_loop(0, count, step, carry)
