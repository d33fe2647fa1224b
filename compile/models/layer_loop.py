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
Weight = jax.Array | jax.ShapeDtypeStruct


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
    stacks = dict(nnx.to_flat_state(state))
    matrices = {path: _flatten_stack(stack.get_value()) for path, stack in stacks.items()}

    def step(index: jax.Array, carry: Carry) -> Carry:
        def pick(stack: nnx.Variable, matrix: Weight) -> nnx.Variable:
            # The other weights are those that the module itself slices, and those that this program does not take.
            if isinstance(matrix, jax.ShapeDtypeStruct) or not stack.get_metadata()["sliced"]:
                return stack
            one = jax.lax.dynamic_index_in_dim(matrix, index, keepdims=False)
            return stack.replace(one.reshape(stack.get_value().shape[1:]))

        layer = [(path, pick(stack, matrices[path])) for path, stack in stacks.items()]
        return body(index, nnx.merge(graph, nnx.from_flat_state(layer)), carry)

    return jax.lax.fori_loop(0, count, step, carry)


def _flatten_stack(weight: Weight) -> Weight:
    """A stacked weight [count, *out, in] as matrices [count, out, in].

    Done before the loop: on TPU a layer's slice that is reshaped inside the loop is copied to VMEM as a whole, while a
    slice of matrices is streamed into its product. A layer gets the weight's own shape again, which `matmul` undoes.
    """
    if isinstance(weight, jax.ShapeDtypeStruct) or weight.ndim < 3:
        return weight
    return weight.reshape(weight.shape[0], -1, weight.shape[-1])
