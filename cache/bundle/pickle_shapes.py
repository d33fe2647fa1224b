"""Shapes of the values in a pickle, as JSON describes them.

a constant, or an array             this value; a tuple with a shape for each item
{"any": "int" | "str" | "bytes"}    every value of the type; ints from 0 to 2^53
{"name": N}, {"instance": N}        the class or function N; the result of calling N
{"bytes": S}                        this value, in Latin-1
{"tuple" | "list" | "set" | "frozenset": shape}     a collection of any length
{"dict": {key: shape}}              a dict without other keys
{"one of": [shape, ...]}            a value with one of these shapes
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_aot.cache.bundle.pickle_machine import Instance, Items, KeyedItems, Name, Value

TYPES: Mapping[str, type] = {"int": int, "str": str, "bytes": bytes}
MAX_INT = 1 << 53
Compared = dict[
    tuple[int, int], Value
]  # by the ids of value and shape; holding the value keeps its id from being reused


@dataclass(eq=False)
class Shape:
    """What the values at one place of a pickle may be: one of everything that is listed.

    leaves: constants, names and instances, each with its type.
    types: types of which every value is accepted.
    tuples: the shapes of the items of tuples of fixed length.
    collections: the shape of all items, by the kind of the collection.
    record: the shapes of a dict's values by key, None if there may be no dict.
    """

    leaves: set[tuple[type, Value]] = field(default_factory=set)
    types: set[type] = field(default_factory=set)
    tuples: list[list["Shape"]] = field(default_factory=list)
    collections: dict[str, "Shape"] = field(default_factory=dict)
    record: dict[str, "Shape"] | None = None

    def accepts(self, value: Value, accepted: Compared) -> bool:
        """Whether a value has this shape.

        accepted: receives each collection that does, so that one which is used at many places is compared once.
        """
        kind = type(value)
        if kind is Instance:
            return (Instance, value.name) in self.leaves
        if kind is not tuple and kind is not Items and kind is not KeyedItems:
            return (kind, value) in self.leaves or (kind in self.types and (kind is not int or 0 <= value < MAX_INT))
        place = id(value), id(self)
        if place not in accepted:
            if kind is KeyedItems:
                fits = self._accepts_record(value.values, accepted)
            elif kind is Items:
                fits = self._accepts_items(value.kind, value.values, accepted)
            else:
                fits = self._accepts_tuple(value, accepted) or self._accepts_items("tuple", value, accepted)
            if not fits:
                return False
            accepted[place] = value
        return True

    def _accepts_record(self, values: Mapping[str, Value], accepted: Compared) -> bool:
        shapes = self.record
        return shapes is not None and all(
            key in shapes and shapes[key].accepts(values[key], accepted) for key in values
        )

    def _accepts_items(self, kind: str, values: Iterable[Value], accepted: Compared) -> bool:
        shape = self.collections.get(kind)
        return shape is not None and all(shape.accepts(item, accepted) for item in values)

    def _accepts_tuple(self, value: tuple[Value, ...], accepted: Compared) -> bool:
        for shapes in self.tuples:
            if len(shapes) == len(value):
                for shape, item in zip(shapes, value, strict=True):
                    if not shape.accepts(item, accepted):
                        break
                else:
                    return True
        return False


def parse_shape(content: Any) -> Shape:
    """Returns the shape that JSON describes."""
    shape = Shape()
    for one in content["one of"] if isinstance(content, dict) and "one of" in content else [content]:
        _add_alternative(shape, one)
    return shape


def _add_alternative(shape: Shape, content: Any) -> None:
    if isinstance(content, list):
        shape.tuples.append([parse_shape(item) for item in content])
        return
    if not isinstance(content, dict):
        shape.leaves.add((type(content), content))
        return
    ((kind, inner),) = content.items()
    match kind:
        case "any":
            shape.types.add(TYPES[inner])
        case "name":
            shape.leaves.add((Name, Name(inner)))
        case "instance":
            shape.leaves.add((Instance, inner))
        case "bytes":
            shape.leaves.add((bytes, inner.encode("latin-1")))
        case "dict":
            shape.record = {key: parse_shape(value) for key, value in inner.items()}
        case _:
            shape.collections[kind] = parse_shape(inner)
