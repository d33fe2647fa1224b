"""Flags of dflash-bench: one for every field of a settings dataclass, and the settings made from the flags."""

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


class NumberListParser(flags.ArgumentParser):
    """Parses "1,2,4" to (1, 2, 4)."""

    def __init__(self, kind: type):
        self._kind = kind
        self.syntactic_help = "numbers separated by commas"

    def parse(self, argument: Any) -> tuple:
        if isinstance(argument, tuple):  # the default
            return argument
        return tuple(self._kind(one) for one in argument.split(",") if one.strip())

    def flag_type(self) -> str:
        return f"{self._kind.__name__}s separated by commas"


class NumberListSerializer(flags.ArgumentSerializer):
    """Formats (1, 2, 4) as "1,2,4"."""

    def serialize(self, value: Any) -> str:
        return ",".join(map(str, value))


def define_settings(settings: type, flag_values: flags.FlagValues) -> None:
    """Defines a flag of the same name for each field."""
    kinds = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        kind = kinds[field.name]
        text = field.metadata["description"]
        default: Any = field.default
        if field.metadata["choices"]:
            flags.DEFINE_enum(field.name, default, field.metadata["choices"], text, flag_values)
        elif typing.get_origin(kind) is tuple:
            parser = NumberListParser(typing.get_args(kind)[0])
            serializer = NumberListSerializer()
            flags.DEFINE(parser, field.name, default, text, flag_values, serializer)
        else:
            (plain,) = {*(typing.get_args(kind) or (kind,))} - {type(None)}
            DEFINE[plain](field.name, default, text, flag_values=flag_values)


def read_settings(settings: type, flag_values: flags.FlagValues) -> Any:
    """Makes the settings from the flags. Raises BadInput for a number that is too small."""
    given = {}
    for field in dataclasses.fields(settings):
        value = given[field.name] = flag_values[field.name].value
        least = field.metadata["least"]
        numbers = value if isinstance(value, tuple) else (value,)
        if value == field.default or least is None:
            continue
        if not numbers or min(numbers) < least:
            raise BadInput(f"--{field.name} {format_value(value)}: at least {least:g}")
    return settings(**given)


def format_arguments(name: str, settings: Any) -> list[str]:
    """The arguments for these settings, without defaults."""
    changed = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    }
    return [name, *(_format_flag(name, value) for name, value in changed.items())]


def _format_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={format_value(value)}"


def format_value(value: Any) -> str:
    """The text that a flag takes."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
