"""A flag for every field of a benchmark's settings, and the settings that the flags make."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

from absl import flags

from dflash_aot.cache.errors import BadInput

DEFINE: dict[type, Callable[..., Any]] = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    str: flags.DEFINE_string,
}


class Numbers(flags.ArgumentParser):
    """1,2,4 → (1, 2, 4)."""

    def __init__(self, kind: type):
        self._kind = kind
        self.syntactic_help = "with commas between"

    def parse(self, argument: Any) -> tuple:
        if isinstance(argument, tuple):  # the default
            return argument
        return tuple(self._kind(one) for one in argument.split(",") if one.strip())

    def flag_type(self) -> str:
        return f"{self._kind.__name__}s with commas between"


class NumbersSerializer(flags.ArgumentSerializer):
    """(1, 2, 4) → 1,2,4."""

    def serialize(self, value: Any) -> str:
        return ",".join(map(str, value))


def define_settings(settings: type, flag_values: flags.FlagValues) -> None:
    """A flag of the same name for each field."""
    kinds = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        kind, text = kinds[field.name], field.metadata["description"]
        default: Any = field.default
        if field.metadata["choices"]:
            flags.DEFINE_enum(field.name, default, field.metadata["choices"], text, flag_values)
        elif typing.get_origin(kind) is tuple:
            parser, serializer = Numbers(typing.get_args(kind)[0]), NumbersSerializer()
            flags.DEFINE(parser, field.name, default, text, flag_values, serializer)
        else:
            (plain,) = {*(typing.get_args(kind) or (kind,))} - {type(None)}
            DEFINE[plain](field.name, default, text, flag_values=flag_values)


def read_settings(settings: type, flag_values: flags.FlagValues) -> Any:
    """The settings that these flags make. Raises BadInput for a number that is too small."""
    given = {}
    for field in dataclasses.fields(settings):
        value = given[field.name] = flag_values[field.name].value
        least, numbers = field.metadata["least"], value if isinstance(value, tuple) else (value,)
        if least is not None and value is not None and (not numbers or min(numbers) < least):
            raise BadInput(f"--{field.name} {spell(value)}: at least {least:g}")
    return settings(**given)


def spell_command(name: str, settings: Any) -> list[str]:
    """The arguments that make these settings, without those that are the default."""
    changed = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    }
    return [name, *(_spell_flag(name, value) for name, value in changed.items())]


def _spell_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={spell(value)}"


def spell(value: Any) -> str:
    """As a flag takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
