"""Many layers of one kind: unrolled, a module each, or a loop over one module with stacked parameters.

On TPU the loop makes executables small, quick to compile and quick to dispatch (a dozen weight arguments instead of
hundreds). On CPU and GPU it copies every layer's weights out of the stack, so there the layers are unrolled.
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
    """`count` layers as `run_layers` takes them."""
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
    """body(i, layer i, carry) → carry, for all layers in order. `i` is a traced scalar where they are stacked."""
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
