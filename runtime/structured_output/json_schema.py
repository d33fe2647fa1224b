"""JSON schemas of structured output and of tools: their limits, and a normal form that the grammar compiler follows.

llguidance refuses keywords that it cannot follow, also where they change nothing or say the same as others. The normal
form has the keywords that llguidance knows, and accepts exactly the same documents:

- References are resolved, by `$id`, anchors and JSON pointers, and name definitions at the root.
- Keywords at values that change nothing, annotations and unknown formats are left out.
- Formats are patterns, where llguidance's are too wide, or where it has none.
- `oneOf` is `anyOf` over branches that exclude each other; `not`, `if`, `dependentRequired`, `dependentSchemas` and
  `propertyNames` are written by other keywords, where those can say the same.

A module of its own, so that a server loads llguidance, which takes tens of milliseconds, with its first grammar.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import unquote, urljoin

from dflash_aot.cache.errors import BadInput

MAX_GRAMMAR_BYTES = 1 << 16  # of a schema, or of any other grammar
MAX_DEPTH = 64  # of the text
MAX_CHAIN = 512  # levels, through references
MAX_SCHEMAS = 20_000  # in the normal form, in which `oneOf` and `not` may repeat parts
MAX_REFERENCES = 8  # that are followed to tell two branches apart
# One way to write a document: a model cannot fill an answer with spaces, and more tokens follow from the schema.
JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Schema = Any  # an object or a boolean


class SchemaRefused(Exception):
    """A schema that cannot be followed. The message says where, and why."""


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


def list_patterns(schema: object) -> Iterator[str]:
    """The regular expressions of a checked schema, and what stands in their place elsewhere in it."""
    if isinstance(schema, list):
        for part in schema:
            yield from list_patterns(part)
    if not isinstance(schema, dict):
        return
    for name, part in schema.items():
        if name == "pattern" and isinstance(part, str):
            yield part
        if name == "patternProperties" and isinstance(part, dict):
            yield from part
        yield from list_patterns(part)


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


def list_schemas(schema: Schema, place: str = "#") -> Iterator[tuple[Schema, str]]:
    """The schemas directly in a schema, and their places."""
    return _list_children(schema, place) if isinstance(schema, dict) else iter(())


def require_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments: always an object, also where the schema does not say so."""
    kind = schema.get("type", "object")
    if kind == "object" or (isinstance(kind, list) and "object" in kind):
        return {**schema, "type": "object"}
    return {"type": "object", "allOf": [schema]}


# -- formats

_YEAR_DAYS = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR_DAYS}|{_LEAP_YEAR}-02-29)"
# A leap second is the last of a day in UTC; with another offset it is left out.
_TIME = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)
# Neither `--` in the third and fourth place, which only punycode has, nor more than 63 letters.
_LABEL = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]?[a-zA-Z0-9]|[a-zA-Z0-9-]{2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)
_URI_LETTER = "(?:[a-zA-Z0-9._~!$&'()*+,;=@-]|%[0-9a-fA-F]{2})"
_PATH_LETTER = f"(?:{_URI_LETTER}|:)"
_SCHEME = "[a-zA-Z][a-zA-Z0-9+.-]*:"
_URI_REFERENCE = (
    rf"(?:(?:{_SCHEME})?//(?:[a-zA-Z0-9._~-]|%[0-9a-fA-F]{{2}})*(?::[0-9]*)?(?:/{_PATH_LETTER}*)*"
    rf"|(?:{_SCHEME})?/(?:{_PATH_LETTER}+(?:/{_PATH_LETTER}*)*)?"
    rf"|{_SCHEME}(?:{_PATH_LETTER}+(?:/{_PATH_LETTER}*)*)?|(?:{_URI_LETTER}+(?:/{_PATH_LETTER}*)*)?)"
    rf"(?:\?(?:{_PATH_LETTER}|[/?])*)?(?:#(?:{_PATH_LETTER}|[/?])*)?"
)
_POINTER = "(?:/(?:[^/~]|~[01])*)*"


def _write_regex_format() -> str:
    """Regular expressions of ECMA-262 whose groups are nested at most twice."""
    letter = r"[^\x00-\x1f\\()\[\]{}*+?^$|/]|\\[dDwWsStnrfv.*+?^$|()\[\]{}/\\]"
    one_of = r"\[\^?(?:a-z|A-Z|0-9|[^\x00-\x1f\\\[\]^-]|\\[dDwWsStnrfv.*+?^$|()\[\]{}/\\-])*\]"
    count = r"(?:(?:[*+?]|\{[0-9]{1,3},?\})\??)?"
    part = ""
    for _ in range(3):
        group = rf"|\((?:\?:)?{part}\)" if part else ""
        part = rf"(?:(?:{letter}|{one_of}{group}){count}|\\[bB]|[\^$|])*"
    return part


# Formats of JSON Schema where llguidance's own pattern is wider than the format, or is missing. Some are narrower than
# the format: what they allow is always right.
FORMAT_PATTERNS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "uri-reference": _URI_REFERENCE,
    "uri-template": rf"(?:{_PATH_LETTER}|[/?#]|\{{[+#./;?&]?[a-zA-Z0-9_]+(?:\*|:[1-9][0-9]{{0,3}})?\}})*",
    "regex": _write_regex_format(),
}
FORMATS = frozenset({"duration", "email", "ipv4", "ipv6", "uuid", "uri"})  # llguidance's
# formats of international texts → those that are a part of them
NARROWER_FORMATS: Mapping[str, str] = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri-reference",
}
MAX_FORMAT_LENGTHS = {"hostname": 253}


# -- keywords: where schemas stand in them, and since when they exist

SCHEMA_KEYWORDS = frozenset(
    {
        *("additionalProperties", "additionalItems", "items", "not", "if", "then", "else"),
        *("contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    }
)
LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
MAP_KEYWORDS = frozenset(
    {
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependencies"),
    }
)
PLAIN_KEYWORDS = frozenset(
    {
        *("const", "enum", "type", "required", "pattern", "format", "multipleOf", "uniqueItems"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "dependentRequired"),
        *("minContains", "maxContains"),
    }
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and math.isfinite(value) and value == int(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


# keyword → its test, and what it tests
SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "required": (_is_texts, "a list of texts"),
    "type": (
        lambda value: isinstance(value, str) or _is_texts(value),
        "the name of a type, or a list",
    ),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "pattern": (lambda value: isinstance(value, str), "a regular expression"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_is_texts, value.values())),
        "an object of lists of texts",
    ),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (_is_number, "a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        (lambda value: isinstance(value, int | float), "a number"),
    ),
    **dict.fromkeys(
        (
            *("minItems", "maxItems", "minProperties", "maxProperties"),
            *("minLength", "maxLength", "minContains", "maxContains"),
        ),
        (_is_count, "a whole number of at least 0"),
    ),
}
DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 8, "2020-12": 9}
NEWEST_DRAFT = 9
SINCE = {"prefixItems": 9, "dependentRequired": 8, "dependentSchemas": 8, "unevaluatedItems": 8}
SINCE |= {"unevaluatedProperties": 8, "minContains": 8, "maxContains": 8, "if": 7, "const": 6}
SINCE |= {"contains": 6, "propertyNames": 6}
DRAFT_WITHOUT_DOLLARS = 4  # `id`, later `$id`
REFERENCES_ALONE = 7  # up to this draft, keywords next to `$ref` are ignored
TYPES = ("null", "boolean", "number", "string", "array", "object")
# keyword → the value at which it changes nothing
NO_OPS: Mapping[str, Any] = {
    "uniqueItems": False,
    "minItems": 0,
    "minLength": 0,
    "minProperties": 0,
    "dependentRequired": {},
    "dependentSchemas": {},
    "patternProperties": {},
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "not": False,
    "propertyNames": True,
    "contains": None,
}


@dataclass(frozen=True)
class NormalSchema:
    """A schema in the form that the grammar compiler follows.

    Attributes:
        schema: with its definitions by number in `$defs`.
        places: of each definition, the JSON pointer in the schema that was given.
        doubts: of each `oneOf` that is left, why it may not be followed.
    """

    schema: dict[str, Any]
    places: Mapping[str, str]
    doubts: Sequence[str] = ()


def normalize_schema(schema: Mapping[str, Any]) -> NormalSchema:
    """The normal form of a schema within the limits of `check_schema`. Raises SchemaRefused."""
    resolver = _Resolver(schema)
    definitions = resolver.resolve()
    rewriter = _Rewriter(definitions)
    written = {
        name: rewriter.rewrite(one, resolver.places[name]) for name, one in definitions.items()
    }
    _check_chain(written)
    root = written.pop(ROOT)
    if root is False:
        raise SchemaRefused("no document fulfils it")
    root = root if isinstance(root, dict) else {}
    if _refers_to(ROOT, [root, *written.values()]):
        written[ROOT] = root
        root = {"$ref": f"{DEFINITIONS}{ROOT}"}
    if written:
        root = {**root, "$defs": written}
    return NormalSchema(root, resolver.places, rewriter.doubts)


ROOT = "0"
DEFINITIONS = "#/$defs/"
EVERYTHING: Mapping[str, Any] = {}
NOTHING: Mapping[str, Any] = {"enum": []}


# -- references


class _Resolver:
    """Copies a schema with references by number, in the newest draft, without what changes nothing.

    Attributes:
        places: of each definition, the JSON pointer in the schema.
    """

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._draft = _find_draft(root)
        self._resources: dict[str, tuple[Any, str, str]] = {}  # URI → schema, base, place
        self._bases: dict[int, tuple[str, str]] = {}  # id of a schema → base, place
        self._index(root)
        self.places: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Any, str, str]] = []

    def resolve(self) -> dict[str, Schema]:
        """The definitions by name; the schema itself is the first. Raises SchemaRefused."""
        found: dict[str, Schema] = {}
        self._name(self._root, self._bases[id(self._root)])
        while self._waiting:  # a chain of references is not a chain of calls
            name, schema, base, place = self._waiting.pop()
            found[name] = self._copy(schema, base, place)
        return found

    def _name(self, schema: Any, where: tuple[str, str]) -> str:
        if isinstance(schema, bool):
            schema = EVERYTHING if schema else NOTHING
        if id(schema) not in self._names:
            name = self._names[id(schema)] = str(len(self._names))
            self.places[name] = where[1]
            self._waiting.append((name, schema, *where))
        return self._names[id(schema)]

    def _index(self, root: Mapping[str, Any]) -> None:
        """Notes the URI of every schema that has one."""
        waiting: list[tuple[Any, str, str]] = [(root, "", "#")]
        self._resources[""] = (root, "", "#")
        while waiting:
            schema, base, place = waiting.pop()
            if not isinstance(schema, dict):
                continue
            alone = self._draft <= REFERENCES_ALONE and "$ref" in schema
            identity = schema.get("id" if self._draft <= DRAFT_WITHOUT_DOLLARS else "$id")
            if isinstance(identity, str) and not alone:
                base = _join(base, identity)
                self._resources.setdefault(base, (schema, base, place))
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(keyword), str):
                    self._resources.setdefault(
                        f"{base.partition('#')[0]}#{anchor}", (schema, base, place)
                    )
            self._bases[id(schema)] = (base, place)
            waiting += [(child, base, at) for child, at in _list_children(schema, place)]

    def _copy(self, schema: Any, base: str, place: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaRefused(f"{place} is a {type(schema).__name__}: a schema is an object")
        base = self._bases.get(id(schema), (base, ""))[0]
        if "$ref" in schema and self._draft <= REFERENCES_ALONE:
            return {"$ref": self._refer(schema["$ref"], base, place)}
        copied: dict[str, Any] = {}
        for keyword, value in schema.items():
            if SINCE.get(keyword, 0) <= self._draft:
                self._copy_keyword(copied, keyword, value, (base, f"{place}/{_escape(keyword)}"))
        return _tidy(copied, place)

    def _copy_keyword(
        self, copied: dict[str, Any], keyword: str, value: Any, where: tuple[str, str]
    ) -> None:
        base, place = where
        if keyword == "$ref":
            copied[keyword] = self._refer(value, base, place)
        elif keyword in ("$dynamicRef", "$recursiveRef"):
            raise SchemaRefused(f"{place}: references that depend on the path are not supported")
        elif keyword in ("$defs", "definitions"):
            return
        elif keyword in LIST_KEYWORDS and isinstance(value, list):
            copied[keyword] = [
                self._copy(one, base, f"{place}/{at}") for at, one in enumerate(value)
            ]
        elif keyword in SCHEMA_KEYWORDS:
            copied[keyword] = self._copy(value, base, place)
        elif keyword in MAP_KEYWORDS:
            if not isinstance(value, dict):
                raise SchemaRefused(f"{place} is no object")
            copied[keyword] = {
                name: one
                if isinstance(one, list)
                else self._copy(one, base, f"{place}/{_escape(name)}")
                for name, one in value.items()
            }
        elif keyword in LIST_KEYWORDS:
            raise SchemaRefused(f"{place} is no list")
        elif keyword in PLAIN_KEYWORDS:
            is_right, needed = SHAPES.get(keyword, (lambda _: True, ""))
            if not is_right(value):
                raise SchemaRefused(f"{place} is {_quote(json.dumps(value))}: {needed} is needed")
            copied[keyword] = int(value) if is_right is _is_count else value

    def _refer(self, reference: Any, base: str, place: str) -> str:
        if not isinstance(reference, str):
            raise SchemaRefused(f"{place} is no text")
        uri, _, fragment = _join(base, reference).partition("#")
        found = self._resources.get(f"{uri}#{fragment}") or self._resources.get(f"{uri}#")
        found = found or self._resources.get(uri)
        if found is None or (
            fragment and fragment[0] != "/" and f"{uri}#{fragment}" not in self._resources
        ):
            raise SchemaRefused(
                f"{place} refers to {_quote(reference)}, which this schema does not hold: other "
                "documents are not fetched"
            )
        schema, base, at = found
        if fragment.startswith("/"):
            schema, at = self._walk(schema, fragment, at, f"{place} refers to {_quote(reference)}")
        return DEFINITIONS + self._name(schema, self._bases.get(id(schema), (base, at)))

    def _walk(self, schema: Any, pointer: str, at: str, what: str) -> tuple[Any, str]:
        for part in pointer[1:].split("/"):
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                schema = schema[int(name)] if isinstance(schema, list) else schema[name]
            except (KeyError, IndexError, TypeError, ValueError):
                raise SchemaRefused(f"{what}, and there is no {_quote(name)} in {at}") from None
            at = f"{at}/{_escape(name)}"
        return schema, at


def _find_draft(root: Mapping[str, Any]) -> int:
    named = str(root.get("$schema", ""))
    return next((number for name, number in DRAFTS.items() if name in named), NEWEST_DRAFT)


def _join(base: str, reference: str) -> str:
    """`urljoin`, also for bases that are names (urn:) or no URIs."""
    try:
        return (
            urljoin(base, reference)
            if not reference.startswith("#")
            else base.partition("#")[0] + reference
        )
    except ValueError:
        return reference


def _list_children(schema: Mapping[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """The schemas in a schema, and their places."""
    for keyword, value in schema.items():
        at = f"{place}/{_escape(keyword)}"
        if keyword in MAP_KEYWORDS and isinstance(value, dict):
            yield from ((one, f"{at}/{_escape(name)}") for name, one in value.items())
        elif keyword in LIST_KEYWORDS and isinstance(value, list):
            yield from ((one, f"{at}/{number}") for number, one in enumerate(value))
        elif keyword in SCHEMA_KEYWORDS:
            yield value, at


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")[:60]


def _quote(text: str) -> str:
    return ascii(text if len(text) <= 100 else f"{text[:100]}…")


def _tidy(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema without keywords that change nothing, in the newest draft's words."""
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema.pop("additionalItems")
    schema.pop("additionalItems", None)
    for name, needed in (schema.pop("dependencies", None) or {}).items():
        if isinstance(needed, list) and not _is_texts(needed):
            raise SchemaRefused(f"{place}/dependencies/{_escape(name)} is no list of texts")
        kind = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        schema[kind] = {**schema.get(kind, {}), name: needed}
    if "contains" in schema and schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["contains"]
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    if not schema.keys() & {"then", "else"}:
        schema.pop("if", None)
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    if schema.get("propertyNames") in ({}, {"type": "string"}):
        del schema["propertyNames"]
    for keyword, value in NO_OPS.items():
        if keyword in schema and schema[keyword] == value and type(schema[keyword]) is type(value):
            del schema[keyword]
    if "pattern" in schema:
        schema["pattern"] = _write_pattern(schema["pattern"])
    for keyword in (
        "exclusiveMinimum",
        "exclusiveMaximum",
    ):  # true in draft 4: the other is exclusive
        if isinstance(exclusive := schema.get(keyword), bool):
            bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            del schema[keyword]
            if exclusive and bound in schema:
                schema[keyword] = schema.pop(bound)
    return _write_format(schema, place)


def _write_pattern(pattern: str) -> str:
    """The pattern, without control characters in negated classes that leave out `"` or a backslash.

    llguidance's classes of a JSON text that have a control character allow every escaped character.
    """
    written = []
    at = 0
    while at < len(pattern):
        found = NEGATED_CLASS.match(pattern, at)
        part = found[0] if found else pattern[at : at + 2 if pattern[at] == "\\" else at + 1]
        at += len(part)
        if found and ('"' in part or "\\\\" in part):
            part = f"[^\\x00-\\x1f{part[2:]}"
        written.append(part)
    return "".join(written)


NEGATED_CLASS = re.compile(r"\[\^(?:[^\]\\]|\\.)*\]", re.DOTALL)


def _write_format(schema: dict[str, Any], place: str) -> dict[str, Any]:
    given = schema.pop("format", None)
    name = NARROWER_FORMATS.get(given, given) if isinstance(given, str) else None
    if name is None:
        return schema
    if name in FORMATS:
        schema["format"] = name
    elif name in FORMAT_PATTERNS:
        kind = {"type": schema["type"]} if "type" in schema else {}
        written = {**kind, "pattern": f"^(?:{FORMAT_PATTERNS[name]})$"}
        if name in MAX_FORMAT_LENGTHS:
            written["maxLength"] = MAX_FORMAT_LENGTHS[name]
        if not schema.keys() & written.keys() - kind.keys():
            return {**schema, **written}
        schema["allOf"] = [*schema.get("allOf", []), written]
    return schema


# -- the rewriting of keywords that llguidance lacks


class _Rewriter:
    """Rewrites a resolved schema by keywords that the grammar compiler follows.

    Each step makes at most a few copies of its parts; `MAX_SCHEMAS` bounds what they come to.

    Attributes:
        doubts: about each `oneOf` that is left to llguidance: why it cannot be followed, if llguidance refuses it.
    """

    def __init__(self, definitions: Mapping[str, Schema]):
        self._definitions = definitions
        self._written = 0
        self._followed = 0  # references, in a row
        self.doubts: list[str] = []

    def rewrite(self, schema: Schema, place: str) -> Schema:
        """The schema in keywords of llguidance. Raises SchemaRefused."""
        self._count(place)
        if not isinstance(schema, dict):
            return schema
        schema = {
            keyword: self._rewrite_value(keyword, value, f"{place}/{_escape(keyword)}")
            for keyword, value in schema.items()
        }
        added: list[Schema] = []
        for keyword, write in _WRITERS.items():
            if keyword in schema:
                added += write(self, schema, place)
                self._count(place, len(added))
        return _conjoin(schema, added)

    def _rewrite_value(self, keyword: str, value: Any, place: str) -> Any:
        if keyword in LIST_KEYWORDS and isinstance(value, list):
            return [self.rewrite(one, f"{place}/{at}") for at, one in enumerate(value)]
        if keyword in ("const", "enum", "dependentRequired"):
            return value
        if keyword in MAP_KEYWORDS:
            return {
                name: self.rewrite(one, f"{place}/{_escape(name)}") for name, one in value.items()
            }
        return self.rewrite(value, place) if keyword in SCHEMA_KEYWORDS else value

    def _count(self, place: str, schemas: int = 1) -> None:
        self._written += schemas
        if self._written > MAX_SCHEMAS:
            raise SchemaRefused(
                f"{place}: oneOf, not and if take more than {MAX_SCHEMAS} schemas to write out"
            )

    # -- keywords; each takes its keyword out of the schema, and returns what must hold as well

    def write_not(self, schema: dict[str, Any], place: str) -> list[Schema]:
        try:
            return [self.negate(schema.pop("not"))]
        except _NotWritable as reason:
            raise SchemaRefused(f"{place}/not cannot be followed: {reason}") from None

    def write_if(self, schema: dict[str, Any], place: str) -> list[Schema]:
        condition = schema.pop("if")
        yes = schema.pop("then", True)
        no = schema.pop("else", True)
        try:
            otherwise = self.negate(condition)
        except _NotWritable as reason:
            raise SchemaRefused(f"{place}/if cannot be followed: {reason}") from None
        return [_unite([_conjoin({}, [condition, yes]), _conjoin({}, [otherwise, no])])]

    def write_one_of(self, schema: dict[str, Any], place: str) -> list[Schema]:
        branches = [one for one in schema.pop("oneOf") if one is not False]
        try:
            return [self._separate(schema, branches, place)]
        except (
            _NotWritable
        ) as doubt:  # llguidance may know, after it has merged it with what it is in
            self.doubts.append(str(doubt))
            return [{"oneOf": branches}]

    def _separate(self, schema: dict[str, Any], branches: list[Schema], place: str) -> Schema:
        """The branches as alternatives, each without what another accepts as well. Raises _NotWritable."""
        # What holds next to the branches may be what tells them apart.
        facts = [_Facts(self, {"allOf": [schema, one]}) for one in branches]
        written = []
        for at, branch in enumerate(branches):
            others = [
                self._exclude(branches[other], place, at, other)
                for other in range(len(branches))
                if other != at and not facts[at].excludes(facts[other])
            ]
            kept = [self._keep_possible(one, facts[at]) for one in others]
            self._count(place, len(kept))
            written.append(_conjoin({}, [branch, *kept]))
        return _unite(written)

    def _exclude(self, branch: Schema, place: str, at: int, other: int) -> Schema:
        try:
            return self.negate(branch)
        except _NotWritable as reason:
            raise _NotWritable(
                f"{place}/oneOf cannot be followed: branches {min(at, other)} and {max(at, other)} may both accept a "
                f"value, and {reason}. Give them a property with another constant each, or use anyOf"
            ) from None

    def _keep_possible(self, schema: Schema, facts: "_Facts") -> Schema:
        """The alternatives of a negation that `facts` leave."""
        if not isinstance(schema, dict) or schema.keys() != {"anyOf"}:
            return schema
        return _unite([one for one in schema["anyOf"] if not facts.excludes(_Facts(self, one))])

    def write_required(self, schema: dict[str, Any], place: str) -> list[Schema]:
        added: list[Schema] = []
        for name, needed in schema.pop("dependentRequired").items():
            if name in schema.get("required", ()):
                added.append({"required": needed})
            elif needed:
                added.append(
                    _unite([_without(name), {"required": [*{name: 0, **dict.fromkeys(needed)}]}])
                )
        return added

    def write_dependent(self, schema: dict[str, Any], place: str) -> list[Schema]:
        added = []
        for name, one in schema.pop("dependentSchemas").items():
            if name in schema.get("required", ()):
                added.append(one)
            elif one is not True:
                added.append(_unite([_without(name), _conjoin({"required": [name]}, [one])]))
        return added

    def write_names(self, schema: dict[str, Any], place: str) -> list[Schema]:
        names = schema.pop("propertyNames")
        if isinstance(names, dict) and "$ref" in names and len(names) == 1:
            names = self.follow(names)
        if names is False:
            return [{"maxProperties": 0}]
        kinds = {key: one for key, one in names.items() if (key, one) != ("type", "string")}
        if not kinds:
            return []
        allowed = [kinds["const"]] if kinds.keys() == {"const"} else kinds.get("enum")
        if isinstance(allowed, list) and len(kinds) == 1:
            known = {name: True for name in allowed if isinstance(name, str)}
            return [{"properties": known, "additionalProperties": False}]
        if kinds.keys() == {"pattern"}:
            return [{"patternProperties": {kinds["pattern"]: True}, "additionalProperties": False}]
        if kinds.keys() <= {"minLength", "maxLength"}:
            lengths = f"{kinds.get('minLength', 0)},{kinds.get('maxLength', '')}"
            pattern = f"^(?s:.){{{lengths}}}$"
            return [{"patternProperties": {pattern: True}, "additionalProperties": False}]
        raise SchemaRefused(
            f"{place}/propertyNames cannot be followed: only an enum, a pattern, or lengths"
        )

    def write_unique(self, schema: dict[str, Any], place: str) -> list[Schema]:
        if (
            schema["uniqueItems"] is True
            and schema.get("maxItems", 2) > 1
            and self._may_be_array(schema)
        ):
            raise SchemaRefused(f"{place}/uniqueItems cannot be followed: leave it out")
        del schema["uniqueItems"]
        return []

    def write_contains(self, schema: dict[str, Any], place: str) -> list[Schema]:
        if self._may_be_array(schema):
            raise SchemaRefused(f"{place}/contains cannot be followed")
        del schema["contains"]
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
        return []

    def write_unevaluated(self, schema: dict[str, Any], place: str) -> list[Schema]:
        """They say the same as their counterparts where nothing else describes properties or items."""
        others = {"allOf", "anyOf", "$ref", "oneOf", "if", "dependentSchemas"} & schema.keys()
        for keyword, counterpart in UNEVALUATED.items():
            if keyword not in schema:
                continue
            if counterpart not in schema and others:
                raise SchemaRefused(
                    f"{place}/{keyword} cannot be followed next to {', '.join(sorted(others))}: use "
                    f"{counterpart} in each of its branches"
                )
            schema.setdefault(counterpart, schema.pop(keyword))
        return []

    def write_counts(self, schema: dict[str, Any], place: str) -> list[Schema]:
        """llguidance follows counts of properties only where it knows which of them come."""
        named = schema["properties"]
        is_closed = (
            schema.get("additionalProperties") is False and "patternProperties" not in schema
        )
        if is_closed and schema.get("maxProperties", -1) >= len(named):
            del schema["maxProperties"]
        optional = [name for name in named if name not in schema.get("required", ())]
        if (
            is_closed
            or not optional
            or schema.get("minProperties") != 1
            or "maxProperties" in schema
        ):
            return []
        del schema["minProperties"]
        if len(optional) < len(named) or schema.get("required"):
            return []
        first = [
            {
                "type": "object",
                "properties": dict.fromkeys(optional[:at], False),
                "required": [name],
            }
            for at, name in enumerate(optional)
        ]
        none = {"type": "object", "properties": dict.fromkeys(optional, False), "minProperties": 1}
        others = [name for name in TYPES if name != "object"]
        may_be_other = _Facts(self, schema).types - {"object"}
        return [_unite([*first, none, *([{"type": others}] if may_be_other else [])])]

    def _may_be_array(self, schema: dict[str, Any]) -> bool:
        return "array" in _Facts(self, schema).types

    # -- negation

    def follow(self, schema: Mapping[str, Any]) -> Schema:
        """The definition that a schema refers to, before it is rewritten."""
        return self._definitions[schema["$ref"].removeprefix(DEFINITIONS)]

    def _negate_reference(self, schema: Mapping[str, Any]) -> Schema:
        if self._followed == MAX_REFERENCES:
            raise _NotWritable(f"it refers to more than {MAX_REFERENCES} schemas in a row")
        self._followed += 1
        try:
            return self.negate(self.rewrite(self.follow(schema), schema["$ref"]))
        finally:
            self._followed -= 1

    def negate(self, schema: Schema) -> Schema:
        """The schema of all documents that `schema` refuses. Raises _NotWritable."""
        self._count("the schema")
        if isinstance(schema, bool):
            return not schema
        alternatives: list[Schema] = []
        for keyword, value in schema.items():
            if keyword == "$ref":
                alternatives.append(self._negate_reference(schema))
            elif keyword in _NEGATIONS:
                alternatives += _NEGATIONS[keyword](value)
            elif value is True:
                continue
            elif keyword == "allOf":
                alternatives += [self.negate(one) for one in value]
            elif keyword == "anyOf":
                alternatives.append(_conjoin({}, [self.negate(one) for one in value]))
            elif keyword == "properties":
                for name, one in value.items():
                    if (refused := self.negate(one)) is not False:
                        alternatives.append(
                            {"type": "object", "properties": {name: refused}, "required": [name]}
                        )
            else:
                raise _NotWritable(f"what {keyword} refuses has no schema")
        return _unite(alternatives)


class _NotWritable(Exception):
    """The negation of a schema that no schema can say. The message says what."""


UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_WRITERS: Mapping[str, Callable[[_Rewriter, dict[str, Any], str], list[Schema]]] = {
    "oneOf": _Rewriter.write_one_of,
    "not": _Rewriter.write_not,
    "if": _Rewriter.write_if,
    "dependentRequired": _Rewriter.write_required,
    "dependentSchemas": _Rewriter.write_dependent,
    "propertyNames": _Rewriter.write_names,
    "uniqueItems": _Rewriter.write_unique,
    "contains": _Rewriter.write_contains,
    "properties": _Rewriter.write_counts,
    "unevaluatedProperties": _Rewriter.write_unevaluated,
    "unevaluatedItems": _Rewriter.write_unevaluated,
}


def _conjoin(schema: dict[str, Any], others: Sequence[Schema]) -> Schema:
    """The schema that holds where `schema` and all of `others` hold."""
    others = [one for one in others if one is not True and one != {}]
    if any(one is False for one in others):
        return False
    if not others:
        return schema or True
    if not schema and len(others) == 1:
        return others[0]
    return {**schema, "allOf": [*schema.get("allOf", []), *others]}


def _unite(alternatives: Sequence[Schema]) -> Schema:
    """One of them holds, or several."""
    if any(one is True or one == {} for one in alternatives):
        return True
    possible = [one for one in alternatives if one is not False]
    if len(possible) < 2:
        return possible[0] if possible else False
    return {"anyOf": possible}


def _without(name: str) -> dict[str, Any]:
    """Any document that is no object with this property."""
    return {"properties": {name: False}}


def _negate_type(given: str | list[str]) -> list[Schema]:
    names = {given} if isinstance(given, str) else {*given}
    if "integer" in names and "number" not in names:
        raise _NotWritable("numbers that are no integers have no schema")
    left = [name for name in TYPES if name not in names]
    return [{"type": left}] if left else []


def _negate_values(values: list[Any]) -> list[Schema]:
    """Schemas of all values except these: texts, numbers and booleans of other values, and other types."""
    if any(isinstance(value, dict | list) and value for value in values):
        raise _NotWritable("lists and objects other than a constant have no schema")
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted(
        {
            value
            for value in values
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
    )
    booleans = {value for value in values if isinstance(value, bool)}
    left: list[Schema] = []
    left.append({"type": [name for name in TYPES if name not in _list_types(values)]})
    if texts:
        left.append({"type": "string", "pattern": _write_exclusion(texts)})
    if numbers:
        left.append({"type": "number", "exclusiveMaximum": numbers[0]})
        left += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in pairwise(numbers)
        ]
        left.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if len(booleans) == 1:
        left.append({"const": not min(booleans)})
    if [] in values:
        left.append({"type": "array", "minItems": 1})
    if {} in values:
        left.append({"type": "object", "minProperties": 1})
    return [one for one in left if one.get("type") != []]


def _list_types(values: Sequence[Any]) -> set[str]:
    return {_find_type(value) for value in values}


def _find_type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


LITERAL_PATTERN = re.compile(r"\^((?:[\w /:,;#@!%&=~<>'\"-]|\\[./*+?()\[\]{}|^$-])*)(\$?)")


def _negate_pattern(pattern: Any) -> list[Schema]:
    """The negation of a pattern that is a text or its beginning. Other patterns would need look-ahead."""
    found = LITERAL_PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
    if found is None:
        raise _NotWritable(f"the texts that do not match {_quote(str(pattern))} have no pattern")
    text = re.sub(r"\\(.)", r"\1", found[1])
    if not text and not found[2]:
        return []
    return [{"type": "string", "pattern": _write_exclusion([text], beginnings=not found[2])}]


def _write_exclusion(texts: Sequence[str], beginnings: bool = False) -> str:
    """A pattern of all texts except these; with `beginnings`, of all texts that begin with none of them."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return f"^{_write_node(tree, beginnings)}$"


def _write_node(tree: Mapping[str, Any], beginnings: bool) -> str:
    is_end = "" in tree
    if is_end and beginnings:
        return "[^\\s\\S]"  # matches nothing
    children = {character: node for character, node in tree.items() if character}
    if not children:
        return "(?s:.)+"
    letters = {character: f"\\x{{{ord(character):x}}}" for character in children}
    branches = [f"[^{''.join(letters.values())}](?s:.)*"]
    branches += [letters[one] + _write_node(node, beginnings) for one, node in children.items()]
    return f"(?:{'|'.join(branches)}){'' if is_end else '?'}"


def _negate_bound(kind: str, keyword: str, step: int = 0) -> Callable[[Any], list[Schema]]:
    """The negation of a bound of numbers; with a step, of a count, whose opposite bound is 1 lower or higher."""

    def negate(value: Any) -> list[Schema]:
        return [] if value + step < 0 else [{"type": kind, keyword: value + step}]

    def negate_number(value: Any) -> list[Schema]:
        return [{"type": kind, keyword: value}]

    return negate if step else negate_number


_NEGATIONS: Mapping[str, Callable[[Any], list[Schema]]] = {
    "type": _negate_type,
    "const": lambda value: _negate_values([value]),
    "enum": _negate_values,
    "required": lambda names: [{"type": "object", **_without(name)} for name in names],
    "pattern": _negate_pattern,
    "minimum": _negate_bound("number", "exclusiveMaximum"),
    "maximum": _negate_bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _negate_bound("number", "maximum"),
    "exclusiveMaximum": _negate_bound("number", "minimum"),
    "minLength": _negate_bound("string", "maxLength", -1),
    "maxLength": _negate_bound("string", "minLength", 1),
    "minItems": _negate_bound("array", "maxItems", -1),
    "maxItems": _negate_bound("array", "minItems", 1),
    "minProperties": _negate_bound("object", "maxProperties", -1),
    "maxProperties": _negate_bound("object", "minProperties", 1),
}


# -- what is known of a schema, to tell branches apart

RANGES = [("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")]


class _Facts:
    """What every document that a schema accepts fulfils; references are followed up to `MAX_REFERENCES`.

    Attributes:
        types: that it may have.
        values: that it may have, as JSON; None for any.
        required: the properties that it has if it is an object.
    """

    def __init__(self, rewriter: _Rewriter, schema: Schema, references: int = 0):
        self._rewriter = rewriter
        self._references = references
        self.types = {*TYPES, "integer"}
        self.values: dict[str, Any] | None = None
        self.required: set[str] = set()
        self._bounds: dict[str, Any] = {}
        self._objects: list[Mapping[str, Any]] = []
        self._alternatives: list[list[Schema]] = []
        self._note(schema, references)

    def _note(self, schema: Schema, references: int) -> None:
        if isinstance(schema, bool):
            self.types = self.types if schema else set()
            return
        given = schema.get("type", [])
        kinds = {given} if isinstance(given, str) else {*given}
        if "type" in schema:
            self.types &= kinds | ({"integer"} if "number" in kinds else set())
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            self._note_values(values)
        self.required |= {name for name in schema.get("required", ()) if isinstance(name, str)}
        for low, high in RANGES:
            if isinstance(bound := schema.get(low), int | float):
                self._bounds[low] = max(bound, self._bounds.get(low, bound))
            if isinstance(bound := schema.get(high), int | float):
                self._bounds[high] = min(bound, self._bounds.get(high, bound))
        if schema.keys() & {"properties", "additionalProperties"}:
            self._objects.append(schema)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._alternatives.append(schema[keyword])
        for one in schema.get("allOf", ()):
            self._note(one, references)
        if "$ref" in schema and references < MAX_REFERENCES:
            self._note(self._rewriter.follow(schema), references + 1)

    def _note_values(self, values: list[Any]) -> None:
        named = {_name_value(value): value for value in values}
        self.values = {
            name: value
            for name, value in named.items()
            if self.values is None or name in self.values
        }
        kinds = _list_types([*self.values.values()])
        self.types &= kinds | ({"integer"} if "number" in kinds else set())

    def excludes(self, other: "_Facts") -> bool:
        """Whether it is certain that no document fulfils both."""
        types = self.types & other.types
        if not types or not self._may_share_value(other):
            return True
        if types <= {"number", "integer"} and self._is_apart(other, "minimum", "maximum"):
            return True
        if types == {"string"} and self._is_apart(other, "minLength", "maxLength"):
            return True
        if types == {"array"} and self._is_apart(other, "minItems", "maxItems"):
            return True
        if types == {"object"} and self._differ_in_property(other):
            return True
        return self._has_no_alternative(other) or other._has_no_alternative(self)

    def _may_share_value(self, other: "_Facts") -> bool:
        if self.values is None or other.values is None:
            return True
        return not self.values.keys().isdisjoint(other.values)

    def _is_apart(self, other: "_Facts", low: str, high: str) -> bool:
        return any(
            one._bounds.get(low, -math.inf) > another._bounds.get(high, math.inf)
            for one, another in ((self, other), (other, self))
        )

    def _differ_in_property(self, other: "_Facts") -> bool:
        return any(
            self._describe(mine).excludes(other._describe(theirs))
            for name in sorted(self.required | other.required)
            for mine in self._list_property(name)
            for theirs in other._list_property(name)
        )

    def _describe(self, schema: Schema) -> "_Facts":
        return _Facts(self._rewriter, schema, min(self._references + 1, MAX_REFERENCES))

    def _list_property(self, name: str) -> list[Schema]:
        """The schemas that a property has to fulfil; True where there is none."""
        found = []
        for one in self._objects:
            if name in one.get("properties", {}):
                found.append(one["properties"][name])
            elif not one.get("patternProperties"):
                found.append(one.get("additionalProperties", True))
        return found or [True]

    def _has_no_alternative(self, other: "_Facts") -> bool:
        if self._references >= MAX_REFERENCES:
            return False
        return any(
            all(self._describe(one).excludes(other) for one in branches)
            for branches in self._alternatives
        )


def _name_value(value: Any) -> str:
    """A JSON value as a text that equal values share: 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_name_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{_name_value(value[name])}' for name in sorted(value))}}}"
    return json.dumps(value)


# -- the length of chains


def _refers_to(name: str, schemas: Sequence[Schema]) -> bool:
    return any(f"{DEFINITIONS}{name}" in _list_references(schema) for schema in schemas)


def _list_references(schema: Schema) -> dict[str, int]:
    """The references in a schema, each with its greatest depth of levels."""
    found: dict[str, int] = {}
    waiting = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                found[reference] = max(depth, found.get(reference, 0))
            waiting += [
                (one, depth + 1) for key, one in value.items() if key not in ("const", "enum")
            ]
        elif isinstance(value, list):
            waiting += [(one, depth) for one in value]
    return found


def _check_chain(definitions: Mapping[str, Schema]) -> None:
    """Refuses schemas that are too deep through their references."""
    links = {
        name: [
            (reference.removeprefix(DEFINITIONS), depth)
            for reference, depth in _list_references(schema).items()
        ]
        for name, schema in definitions.items()
    }
    if is_deep(links, ROOT):
        raise SchemaRefused(
            f"it is more than {MAX_CHAIN} levels deep through its references: at most {MAX_CHAIN} are accepted"
        )


def is_deep(links: Mapping[str, Sequence[tuple[str, int]]], start: str) -> bool:
    """Whether a library that follows links by recursion goes deeper than `MAX_CHAIN`; counted without recursion.

    links: of each name, the names that it refers to, each with its levels. A name is followed where it is met first.
    """
    seen = {start}
    path = [(iter(links.get(start, ())), 0)]
    while path:
        rest, depth = path[-1]
        following = next(rest, None)
        if following is None:
            path.pop()
            continue
        name, levels = following
        if depth + levels > MAX_CHAIN:
            return True
        if name not in seen:
            seen.add(name)
            path.append((iter(links.get(name, ())), depth + levels))
    return False
