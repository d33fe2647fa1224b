"""Model parameters by name: maps a flax module to flat, named arrays and to the weight recipes of its checkpoint.

Signatures, recipes and programs know parameters by name only.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax
import msgspec
import numpy as np
from flax import nnx

from dflash_aot.cache.arrays import MESH_AXIS, MeshAxes
from dflash_aot.cache.weight_recipe import (
    SCALE_SUFFIX,
    CheckpointRole,
    Placement,
    WeightRecipe,
    make_scale_recipe,
)

STACK = re.compile(r"\b\w*layers\.")  # the place of a stack of layers in a parameter's name
Model = TypeVar("Model", bound=nnx.Module)


class AbstractModel(Generic[Model]):
    """A model without arrays: its parameters' names, shapes and recipes, and `bind`, which puts arrays in.

    Attributes:
        module: the model with abstract parameters (`nnx.eval_shape`); for its facts, not for calls.
    """

    def __init__(self, build: Callable[[], Model]):
        """`build` makes the model. It is traced and allocates nothing."""
        self.module = nnx.eval_shape(build)
        self._graph, state = nnx.split(self.module)
        self._parameters = {
            ".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)
        }

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every parameter by name."""
        return {name: leaf.get_value() for name, (_, leaf) in self._parameters.items()}

    def bind(self, weights: Mapping[str, jax.Array]) -> Model:
        """The model with `weights` as its parameters. Parameters that are not given stay abstract and cannot be used.

        Raises ValueError if a name is unknown.
        """
        if unknown := weights.keys() - self._parameters.keys():
            raise ValueError(f"no such parameters: {sorted(unknown)}")
        flat = [
            (path, leaf.replace(weights[name]) if name in weights else leaf)
            for name, (path, leaf) in self._parameters.items()
        ]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))

    def recipes(self, checkpoint: CheckpointRole) -> tuple[WeightRecipe, ...]:
        """The recipe of every parameter: which tensors of the checkpoint make it."""
        found: dict[str, WeightRecipe] = {}
        for name, (_, leaf) in self._parameters.items():  # sorted: scales follow their weight
            weight = found.get(name.removesuffix(SCALE_SUFFIX))
            if weight and weight.encoding == "int8_values":
                found[name] = make_scale_recipe(weight)
            else:
                found[name] = _recipe(name, leaf, checkpoint)
        return tuple(found.values())


def _recipe(name: str, leaf: nnx.Param, checkpoint: CheckpointRole) -> WeightRecipe:
    """The recipe of one parameter. A stacked parameter holds the tensors of several layers along its first axis."""
    shape = leaf.get_value().shape
    dtype = leaf.get_value().dtype
    facts = leaf.get_metadata()
    prefix = name.rpartition(".")[0]
    layers = facts.get("stacked")
    if layers is None:
        placements = _place(prefix, shape, facts)
    else:
        placements = tuple(
            msgspec.structs.replace(one, offset=(index, *one.offset), extent=(1, *one.extent))
            for index, layer in enumerate(layers)
            for one in _place(
                STACK.sub(f"layers.{layer}.", f"{prefix}.", count=1).rstrip("."), shape[1:], facts
            )
        )
    return WeightRecipe(
        f"{checkpoint}.{name}",
        checkpoint,
        shape,
        str(dtype),
        placements,
        _split(facts["split"], layers is not None, len(shape)),
        encoding="int8_values" if dtype == np.int8 else msgspec.UNSET,
        interleaved=facts["interleaved"] or msgspec.UNSET,
    )


def _split(split: int | None, stacked: bool, rank: int) -> MeshAxes:
    """The parameter's sharding: the mesh axis at dimension `split`. Stacked parameters have one dimension before it."""
    if split is None:
        return ()
    at = split + stacked
    return tuple(MESH_AXIS if dimension == at else None for dimension in range(rank))


def _place(prefix: str, shape: tuple[int, ...], facts: Mapping[str, Any]) -> tuple[Placement, ...]:
    """Places the tensors of a parameter side by side, in equal parts, along its `axis`."""
    tensors = facts["tensors"]
    axis = facts["axis"]
    if facts["sections"]:
        return tuple(_place_sections(_name_tensor(prefix, *tensors), shape, facts))
    if facts["copies"] > 1:
        return tuple(_place_copies(prefix, shape, facts))
    extent = tuple(size // len(tensors) if i == axis else size for i, size in enumerate(shape))
    assert int(np.prod(extent)) == int(np.prod(facts["stored"])), prefix
    return tuple(
        Placement(
            tensor=_name_tensor(prefix, tensor),
            stored=facts["stored"],
            offset=tuple(part * extent[axis] if i == axis else 0 for i in range(len(shape))),
            extent=extent,
        )
        for part, tensor in enumerate(tensors)
    )


def _place_sections(
    tensor: str, shape: tuple[int, ...], facts: Mapping[str, Any]
) -> Iterator[Placement]:
    """Places the sections of one tensor's rows side by side along the parameter's `axis`."""
    axis = facts["axis"]
    row = 0
    offset = 0
    for rows in facts["sections"]:
        width = rows // math.prod(shape[:axis])
        yield Placement(
            tensor,
            facts["stored"],
            offset=tuple(offset if i == axis else 0 for i in range(len(shape))),
            extent=(*shape[:axis], width, *shape[axis + 1 :]),
            rows=(row, row + rows),
        )
        row = row + rows
        offset = offset + width


def _place_copies(
    prefix: str, shape: tuple[int, ...], facts: Mapping[str, Any]
) -> Iterator[Placement]:
    """Places the rows of each head, `copies` times, in tensors side by side along the second axis."""
    assert facts["axis"] == 1, prefix
    rows = facts["stored"][0] * facts["copies"] // shape[0]
    for place in range(shape[0]):
        head = place // facts["copies"]
        for part, tensor in enumerate(facts["tensors"]):
            yield Placement(
                _name_tensor(prefix, tensor),
                facts["stored"],
                offset=(place, part, *(0 for _ in shape[2:])),
                extent=(1, 1, *shape[2:]),
                rows=(head * rows, (head + 1) * rows),
            )


def _name_tensor(prefix: str, tensor: str) -> str:
    """The name in the checkpoint. Names are relative to the module, or begin with a slash."""
    if tensor.startswith("/"):
        return tensor[1:]
    return f"{prefix}.{tensor}" if prefix else tensor
