"""Reads a `config.json` key by key; every error names the file, the key and the value found. Defaults of drafts."""

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.files.checkpoint_files import CONFIG_FILE, read_checkpoint_object

Value = TypeVar("Value")
TEXT_SECTION = "text_config"  # of multimodal models: the text model's keys
MAX_INTEGER = 1 << 31  # no count, width or token of a model reaches it
TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
VALUE_REPR = reprlib.Repr()  # a value may be a megabyte, or nested deeper than repr can go
VALUE_REPR.maxlevel = 4
VALUE_REPR.maxlist = 16
VALUE_REPR.maxdict = 16
VALUE_REPR.maxstring = 120
VALUE_REPR.maxother = 120


def shorten_value(found: object) -> str:
    """Returns a value as text that is short enough for a message."""
    return VALUE_REPR.repr(found)


@dataclass(frozen=True)
class ConfigFile:
    """The object in a config file, or an object inside it.

    Attributes:
        path: the file.
        values: the keys and values.
        prefix: the dotted place inside the file, "" for the whole.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def where(self, key: str) -> str:
        """Returns file and dotted key for messages."""
        return f"{self.path}: {self.prefix}{key}"

    def refusal(self, key: str, found: object, reason: str) -> BadCheckpoint:
        """Returns the error for a value that is not supported."""
        return BadCheckpoint(f"{self.where(key)} is {shorten_value(found)}: {reason}")

    def has(self, key: str) -> bool:
        """Whether a key is there; null means absent, as in transformers."""
        return self.values.get(key) is not None

    def require(self, key: str, kind: type[Value]) -> Value:
        """Returns a value of this type. Raises BadCheckpoint, as all methods below."""
        value = self.optional(key, kind)
        if value is None:
            raise BadCheckpoint(f"{self.where(key)} is missing; expected {TYPE_NAMES[kind]}")
        return value

    def optional(self, key: str, kind: type[Value]) -> Value | None:
        """Returns a value of this type, None if the key is absent."""
        value = self.values.get(key)
        if value is not None and (
            not isinstance(value, kind) or (kind is int and isinstance(value, bool))
        ):
            raise self.refusal(key, value, f"expected {TYPE_NAMES[kind]}")
        if kind is int and value is not None:
            self._check_size(key, self.values[key])
        return value

    def _check_size(self, key: str, value: int) -> None:
        if abs(value) >= MAX_INTEGER:
            raise self.refusal(
                key, value, f"no count, width or token of a model reaches {MAX_INTEGER}"
            )

    def integer(self, key: str) -> int:
        """Returns a whole number."""
        return self.require(key, int)

    def positive(self, key: str, most: int = MAX_INTEGER, default: int | None = None) -> int:
        """Returns a number of at least 1. `default` is for formats that define the meaning of an absent key."""
        if default is not None and not self.has(key):
            return default
        if (value := self.require(key, int)) < 1:
            raise self.refusal(key, value, "expected a positive number")
        if value > most:
            raise self.refusal(key, value, f"expected at most {most}")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number above 0; `default` is that of `positive`."""
        if default is not None and not self.has(key):
            return default
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, value, "expected a positive number")
        if not 0 < value <= sys.float_info.max:
            raise self.refusal(key, value, "expected a positive number")
        return float(value)

    def number_within(self, key: str, least: float, most: float) -> float:
        """Returns a number from `least` to `most`."""
        if not least <= (value := self.positive_number(key)) <= most:
            raise self.refusal(key, value, f"expected {least:g} to {most:g}")
        return value

    def optional_integers(self, key: str) -> tuple[int, ...] | None:
        """Returns a list of whole numbers, None if the key is absent."""
        values = self.optional(key, list)
        if values is None:
            return None
        for value in values:
            if type(value) is not int:
                raise self.refusal(key, values, "expected whole numbers")
            self._check_size(key, value)
        return tuple(values)

    def section(self, key: str) -> "ConfigFile":
        """Returns the object under `key`, an empty one if the key is absent."""
        return ConfigFile(self.path, self.optional(key, dict) or {}, f"{self.prefix}{key}.")


def read_config(directory: Path) -> ConfigFile:
    """Reads `config.json` of a checkpoint directory. Raises BadCheckpoint."""
    path = directory / CONFIG_FILE
    if (values := read_checkpoint_object(path)) is None:
        raise BadCheckpoint(
            f"{path} does not exist: expected a checkpoint directory in Hugging Face's layout"
        )
    return ConfigFile(path, values)


# -- defaults of transformers' Qwen3Config
#
# The layers of all drafts are Qwen3's. Tests compare the defaults and `read_sliding_layers` with that class.

QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "rope_theta": 10000.0,
}
KINDS = ("full_attention", "sliding_attention")


def read_sliding_layers(config: ConfigFile, layers: int) -> list[bool]:
    """Returns whether each layer has a sliding window, by `layer_types`.

    Without that key, layers from `max_window_layers` on have one if `use_sliding_window` is true and `sliding_window`
    is not null. Raises BadCheckpoint.
    """
    kinds = config.optional("layer_types", list)
    if kinds is None:
        windowed = config.optional("use_sliding_window", bool) and config.has("sliding_window")
        first = config.integer("max_window_layers") if windowed else layers
        return [index >= first for index in range(layers)]
    if len(kinds) != layers or any(kind not in KINDS for kind in kinds):
        raise config.refusal(
            "layer_types", kinds, f"expected {layers} items, full_attention or sliding_attention"
        )
    return [kind == "sliding_attention" for kind in kinds]
