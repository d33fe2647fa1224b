"""Runs the layers of a model: unrolled, with a module per layer, or as a loop over one module with stacked weights.

On TPU the loop makes executables that are small and quick to compile and to dispatch (a dozen weight arguments instead
of hundreds). On CPU and GPU the loop copies each layer's weights out of the stack, so there the layers are unrolled.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx

Layer = TypeVar("Layer", bound=nnx.Module)
Carry = TypeVar("Carry")
LayerIndex = int | jax.Array
Weight = jax.Array | jax.ShapeDtypeStruct


class LayerPlace(NamedTuple):
    """A layer's number in the model, and its rank among the layers of its kind."""

    number: LayerIndex
    rank: LayerIndex


def make_layers(count: int, build: Callable[[], Layer], stacked: bool) -> nnx.Module:
    """Builds `count` layers for `run_layers`: a list of modules, or one module with stacked parameters."""
    if not stacked:
        return nnx.List([build() for _ in range(count)])
    return stack_layers(range(count), build)


def stack_layers(layers: Iterable[int], build: Callable[[], Layer]) -> Layer:
    """Builds one module with the stacked parameters of several layers, whose numbers in the model are `layers`."""
    numbers = tuple(layers)
    count = len(numbers)
    graph, state = nnx.split(build())
    flat = [
        (
            path,
            leaf.replace(
                jnp.zeros((count, *leaf.get_value().shape), leaf.get_value().dtype), stacked=numbers
            ),
        )
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
    stack: LayerStack[Layer] = LayerStack(cast(Layer, layers))
    return jax.lax.fori_loop(
        0, count, lambda index, carry: body(index, stack.layer(index), carry), carry
    )


def run_mixed_layers(
    layers: nnx.Module,
    recurrent_layers: nnx.Module | None,
    is_recurrent: Sequence[bool],
    body: Callable[[LayerPlace, nnx.Module, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Applies body(place, layer, carry) → carry to all layers in order, of two kinds.

    Stacked, each kind has a stack: `layers`, and `recurrent_layers` for the layers where `is_recurrent`. The loop runs
    over the smallest group of layers that repeats. Otherwise `layers` is the list of all layers.
    """
    ranks = [
        sum(is_recurrent[number] == kind for number in range(at))
        for at, kind in enumerate(is_recurrent)
    ]
    if isinstance(layers, nnx.List):
        for number, layer in enumerate(layers):
            carry = body(LayerPlace(number, ranks[number]), layer, carry)
        return carry
    if recurrent_layers is None:
        return run_layers(
            layers,
            len(is_recurrent),
            lambda at, layer, carry: body(LayerPlace(at, at), layer, carry),
            carry,
        )
    stacks = {False: LayerStack(layers), True: LayerStack(recurrent_layers)}
    period = find_period(is_recurrent)
    sizes = {kind: sum(one == kind for one in is_recurrent[:period]) for kind in stacks}

    def run_group(group: LayerIndex, carry: Carry) -> Carry:
        for at, kind in enumerate(is_recurrent[:period]):
            index = group * sizes[kind] + ranks[at]
            carry = body(LayerPlace(group * period + at, index), stacks[kind].layer(index), carry)
        return carry

    if period == len(is_recurrent):
        return run_group(0, carry)
    return jax.lax.fori_loop(0, len(is_recurrent) // period, run_group, carry)


def find_period(kinds: Sequence[bool]) -> int:
    """Length of the shortest group that, repeated, makes the whole sequence."""
    count = len(kinds)
    repeats = (
        n
        for n in range(1, count + 1)
        if count % n == 0 and list(kinds[:n]) * (count // n) == list(kinds)
    )
    return next(repeats)


class LayerStack(Generic[Layer]):
    """A module with stacked parameters, from which layers are taken by their index in the stack."""

    def __init__(self, module: Layer):
        self._graph, state = nnx.split(module)
        self._stacks = dict(nnx.to_flat_state(state))
        self._matrices = {
            path: _flatten_stack(stack.get_value()) for path, stack in self._stacks.items()
        }

    def layer(self, index: LayerIndex) -> Layer:
        """The layer with its slice of every stack."""

        def pick(stack: nnx.Variable, matrix: Weight) -> nnx.Variable:
            # The other weights are those that the module itself slices, and those that this program does not take.
            if isinstance(matrix, jax.ShapeDtypeStruct) or not stack.get_metadata()["sliced"]:
                return stack
            one = jax.lax.dynamic_index_in_dim(matrix, index, keepdims=False)
            return stack.replace(one.reshape(stack.get_value().shape[1:]))

        layer = [(path, pick(stack, self._matrices[path])) for path, stack in self._stacks.items()]
        return nnx.merge(self._graph, nnx.from_flat_state(layer))


def _flatten_stack(weight: Weight) -> Weight:
    """A stacked weight [count, *out, in] as matrices [count, out, in].

    Done before the loop: on TPU a layer's slice that is reshaped inside the loop is copied to VMEM as a whole, while a
    slice of matrices is streamed into its product. A layer gets the weight's own shape again, which `matmul` undoes.
    """
    if isinstance(weight, jax.ShapeDtypeStruct) or weight.ndim < 3:
        return weight
    return weight.reshape(weight.shape[0], -1, weight.shape[-1])
