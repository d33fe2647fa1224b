"""JSON schemas of structured output and of tools: their limits, and the form of the documents that follow them.

A module of its own, so that a server loads llguidance, which takes tens of milliseconds, with its first grammar.
"""

import json
from collections.abc import Mapping
from typing import Any

from dflash_aot.cache.errors import BadInput

MAX_GRAMMAR_BYTES = 1 << 16  # of a schema, or of any other grammar
MAX_DEPTH = 64
# One way to write a document: a model cannot fill an answer with spaces, and more tokens follow from the schema.
JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_schema(schema: object, field: str) -> None:
    """Raises BadInput, which names `field`, for what is no JSON object, or too large."""
    if not isinstance(schema, Mapping):
        raise BadInput(f"{field} holds a {type(schema).__name__}: a JSON schema is an object")
    if (depth := _measure_depth(schema)) > MAX_DEPTH:
        raise BadInput(f"{field} is {depth} levels deep: at most {MAX_DEPTH} are accepted")
    try:
        size = len(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise BadInput(f"{field} is not JSON: {error}") from error
    if size > MAX_GRAMMAR_BYTES:
        raise BadInput(f"{field} has {size} bytes: at most {MAX_GRAMMAR_BYTES} are accepted")


def _measure_depth(value: object) -> int:
    """Levels of lists and objects, without recursion."""
    depth = 0
    level = [value]
    while containers := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = []
        for container in containers:
            level.extend(container.values() if isinstance(container, dict) else container)
    return depth
