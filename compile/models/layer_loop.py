"""Runs the layers of a model: unrolled, with a module per layer, or as a loop over one module with stacked weights.

On TPU the loop makes executables that are small and quick to compile and to dispatch (a dozen weight arguments instead
of hundreds). On CPU and GPU the loop copies each layer's weights out of the stack, so there the layers are unrolled.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_aot.cache.model_config.architecture import LayerKind

Layer = TypeVar("Layer", bound=nnx.Module)
Carry = TypeVar("Carry")
Result = TypeVar("Result")
Path = tuple[Any, ...]  # of a parameter in its module
LayerIndex = int | jax.Array
Weight = jax.Array | jax.ShapeDtypeStruct


class LayerPlace(NamedTuple):
    """A layer's number in the model, and its rank among the layers of its kind."""

    number: LayerIndex
    rank: LayerIndex


class LayeredModule(nnx.Module):
    """A module with the layers of a model: the list `layers`, or with stacked weights a stack for each kind of layers.

    Attributes:
        kinds: of its layers.
        order: the kind of each layer, by its place in `kinds`.
    """

    layers: nnx.Module
    kinds: tuple[LayerKind, ...]
    order: tuple[int, ...]

    def make_layers(
        self, kinds: Sequence[LayerKind], build: Callable[[LayerKind], nnx.Module], stacked: bool
    ) -> None:
        """Builds the layers."""
        kind_of = {number: at for at, kind in enumerate(kinds) for number in kind.numbers}
        self.kinds = tuple(kinds)
        self.order = tuple(kind_of[number] for number in range(len(kind_of)))
        if stacked:
            for kind in kinds:
                setattr(self, kind.stack, stack_layers(kind.numbers, partial(build, kind)))
        else:
            self.layers = nnx.List([build(kinds[kind]) for kind in self.order])

    def count_written_layers(self) -> int:
        """How many layers a program spells out: those in the body of the loop over layers, or all."""
        return len(self.order) if isinstance(self.layers, nnx.List) else find_period(self.order)

    def first_layer(self, positions: jax.Array) -> Any:
        """The first of stacked layers; `positions` are those of a call, int32 of any shape."""
        # A slice from a constant place is copied as a whole, while any other is streamed into its product. No position
        # is negative, which the compiler does not know.
        first = jnp.minimum(positions.reshape(-1)[0], 0)
        return LayerStack(getattr(self, self.kinds[self.order[0]].stack)).layer(first)

    def run_layers(self, body: Callable[[LayerPlace, Any, Carry], Carry], carry: Carry) -> Carry:
        """Applies body(place, layer, carry) → carry to all layers in order.

        Places of stacked layers are traced scalars: a loop runs over the smallest group of layers that repeats.
        """
        order = self.order
        ranks = [order[:at].count(kind) for at, kind in enumerate(order)]
        if isinstance(self.layers, nnx.List):
            for number, layer in enumerate(self.layers):
                carry = body(LayerPlace(number, ranks[number]), layer, carry)
            return carry
        stacks = [LayerStack(getattr(self, kind.stack)) for kind in self.kinds]
        period = find_period(order)
        group = order[:period]

        def run_one(at: LayerIndex, carry: Carry) -> Carry:
            return body(LayerPlace(at, at), stacks[0].layer(at), carry)

        def run_group(index: LayerIndex, carry: Carry) -> Carry:
            for at, kind in enumerate(group):
                rank = index * group.count(kind) + ranks[at]
                carry = body(LayerPlace(index * period + at, rank), stacks[kind].layer(rank), carry)
            return carry

        if len(stacks) > 1 and period == len(order):
            return run_group(0, carry)
        run = run_one if len(stacks) == 1 else run_group
        return jax.lax.fori_loop(0, len(order) // period, run, carry)


def stack_layers(numbers: tuple[int, ...], build: Callable[[], Layer]) -> Layer:
    """Builds one module with the stacked parameters of several layers, whose numbers in the model are `numbers`."""
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


def find_period(kinds: Sequence[int]) -> int:
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
            path: _flatten_stack(stack.get_value(), stack.get_metadata()["stack_form"])
            for path, stack in self._stacks.items()
        }

    def layer(self, index: LayerIndex) -> Layer:
        """The layer with its slice of every stack."""

        def pick(stack: nnx.Variable, matrix: Weight) -> nnx.Variable:
            # The other weights are those that the module itself slices, and those that this program does not take.
            if isinstance(matrix, jax.ShapeDtypeStruct) or not stack.get_metadata()["sliced"]:
                return stack
            one = jax.lax.dynamic_index_in_dim(matrix, index, keepdims=False)
            if stack.get_metadata()["stack_form"] == "transposed":
                one = one.T
            return stack.replace(one.reshape(stack.get_value().shape[1:]))

        layer = [(path, pick(stack, self._matrices[path])) for path, stack in self._stacks.items()]
        return nnx.merge(self._graph, nnx.from_flat_state(layer))

    def run_at_once(self, body: Callable[[Layer, jax.Array], Result], inputs: jax.Array) -> Result:
        """body(layer, input) of all layers, their results' arrays stacked; inputs [L, ..]."""
        arrays = {
            path: stack.get_value()
            for path, stack in self._stacks.items()
            if not isinstance(self._matrices[path], jax.ShapeDtypeStruct)
        }

        def run(own: Mapping[Path, jax.Array], given: jax.Array) -> Result:
            layer = [
                (path, stack.replace(own[path]) if path in own else stack)
                for path, stack in self._stacks.items()
            ]
            return body(nnx.merge(self._graph, nnx.from_flat_state(layer)), given)

        return jax.vmap(run)(arrays, inputs)


def _flatten_stack(weight: Weight, form: str) -> Weight:
    """A stacked weight [count, *out, in] as matrices [count, out, in], or in another `StackForm`.

    Done before the loop: on TPU a layer's slice that is reshaped inside the loop is copied to VMEM as a whole, while a
    slice of matrices is streamed into its product. A layer gets the weight's own shape again, which `matmul` undoes.
    """
    if isinstance(weight, jax.ShapeDtypeStruct) or weight.ndim < 3:
        return weight
    if form == "rows":
        return weight.reshape(weight.shape[0], -1)
    matrices = weight.reshape(weight.shape[0], -1, weight.shape[-1])
    return matrices.swapaxes(1, 2) if form == "transposed" else matrices
