"""Grammars of forced tool calls, in the form in which a family of models writes them."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.structured_output.json_schema import JSON_FORM, MAX_GRAMMAR_BYTES
from dflash_aot.server.chat_families import Channels, ToolFamily

# Keywords by which a schema says, here or in another schema, which properties an object has in addition to
# `properties`.
OTHER_PROPERTIES = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties"),
    *("allOf", "anyOf", "oneOf", "$ref"),
}


@dataclass
class GrammarRules:
    """The rules of a grammar, whose size is limited while they are written: schemas may repeat parts many times."""

    lines: list[str] = field(default_factory=list)
    _size: int = 0
    _shared: set[str] = field(default_factory=set)  # names of `add_shared`

    def add(self, name: str, body: str) -> str:
        """Adds a rule, and returns its name. Raises BadInput."""
        line = f"{name}: {body}"
        self._size += len(line)
        if self._size > MAX_GRAMMAR_BYTES:
            raise BadInput(
                f"tools: the grammar of a forced call has more than {MAX_GRAMMAR_BYTES} bytes: shorten the schemas, or "
                "leave tool_choice at auto"
            )
        self.lines.append(line)
        return name

    def add_part(self, body: str, prefix: str = "part", attributes: str = "") -> str:
        """As `add`, with a name of its own. attributes: of the rule, in brackets."""
        name = f"{prefix}_{len(self.lines)}"
        self.add(f"{name}{attributes}", body)
        return name

    def add_shared(self, name: str, body: str) -> str:
        """As `add`, for a rule that several parts need: a second time changes nothing."""
        if name not in self._shared:
            self._shared.add(name)
            self.add(name, body)
        return name


def write_call_grammar(
    family: ToolFamily, functions: Mapping[str, Mapping[str, Any]], parallel: bool
) -> str:
    """A Lark grammar of one call, or of one or more, of these functions: name → JSON schema of the arguments.

    A function whose schema names its arguments gets no others, unless the schema mentions or requires others. Raises
    BadInput for a schema that the family's form cannot follow.
    """
    calls = []
    rules = GrammarRules()
    for number, (name, schema) in enumerate(functions.items()):
        if family.arguments is None:
            calls.append(_write_xml_call(number, name, schema, rules))
            continue
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{family.arguments}": ')
        calls.append(f'{head} arguments_{number} "}}"')
        rules.add(f"arguments_{number}", _write_json(_close(schema)))
    begin, end = (f"{json.dumps(part)} " if part else "" for part in (family.begin, family.end))
    is_repeated = parallel and family.separator is not None
    several = f"({json.dumps(family.separator)} call)*" if is_repeated else ""
    return "\n".join(
        [f"start: call {several}", f"call: {begin}({' | '.join(calls)}) {end}", *rules.lines]
    )


def write_channel_grammar(
    channels: Channels,
    functions: Mapping[str, Mapping[str, Any]],
    parallel: bool,
    thinks: bool = False,
) -> str:
    """As `write_call_grammar`, where markers delimit calls. thinks: whether thinking may come before the calls."""
    family = channels.family
    form = family.calls
    assert form is not None, "a family without calls between markers"
    rules = GrammarRules()
    calls = []
    for number, (name, schema) in enumerate(functions.items()):
        place = f"tools: the parameters of {name}"
        arguments = (
            GemmaWriter(schema, place, rules, channels).write_object(schema)
            if form.quote
            else _write_json(_close(schema))
        )
        head = write_markers(form.head.format(name=name), channels.tokens)
        end = write_markers(form.end, channels.tokens)
        calls.append(rules.add(f"call_{number}", f"{head} {arguments} {end}"))
    several = " call*" if parallel and form.end else ""
    start = [f"start: call{several}"]
    if thinks:
        begin = write_markers(family.begin + family.label, channels.tokens)
        end = write_markers(family.end, channels.tokens)
        start = [f"start: thinking? call{several}", f"thinking: {begin} {ANY_TEXT} {end}"]
    return "\n".join([*start, f"call: {' | '.join(calls)}", *rules.lines])


def write_markers(text: str, tokens: Mapping[str, int]) -> str:
    """A part of a rule: a text in which markers are tokens. tokens: the ids of the markers."""
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    return " ".join(
        f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece)
        for piece in pieces
        if piece
    )


def _write_json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_FORM})}"


def _close(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments, without arguments that it does not name."""
    named = schema.get("properties")
    required = schema.get("required", [])
    if (
        not isinstance(named, dict)
        or not isinstance(required, list)
        or schema.keys() & OTHER_PROPERTIES
    ):
        return schema
    # A list, because a schema from outside may require anything.
    if any(name not in [*named] for name in required):
        return schema
    return {**schema, "additionalProperties": False}


# -- the values of a call's arguments

# Keywords of the arguments' schema that a form besides JSON follows, or that say nothing of the form.
OBJECT_KEYWORDS = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("title", "description", "default", "examples", "$schema", "$id", "$comment", "strict"),
}
BRANCHES = ("anyOf", "oneOf", "allOf")
VALUE_KEYWORDS = {
    *("type", "enum", "const", "pattern", "minLength", "maxLength", "format", "$ref"),
    *(*BRANCHES, "title", "description", "default", "examples", "$comment", "deprecated"),
}
MAX_REFERENCES = 16
ANY_TEXT = "/(?s:.*)/"


@dataclass
class ValueWriter(ABC):
    """Writes rules of the values of a call's arguments, where the arguments are not JSON.

    Attributes:
        root: the schema of the arguments, which references start from.
        place: the arguments, for errors.
        rules: what the written parts refer to.
    """

    root: Mapping[str, Any]
    place: str
    rules: GrammarRules

    def write_value(self, schema: object, depth: int = 0) -> str:
        """A part of a rule: a value of the schema. Raises BadInput."""
        if depth > MAX_REFERENCES:
            raise BadInput(f"{self.place} are nested in themselves, or too deeply")
        schema = schema if isinstance(schema, Mapping) else {}
        values = _list_values(schema)
        if values is not None:
            return self.write_constants(values)
        _check_branches(schema, self.place)
        if branches := _list_branches(schema, self.root):
            found = [self.write_value(one, depth + 1) for one in branches]
            return self.rules.add_part(" | ".join(found))
        return self.write_typed(schema, depth)

    @abstractmethod
    def write_constants(self, values: Sequence[object]) -> str:
        """As `write_value`, for one of these values."""

    @abstractmethod
    def write_typed(self, schema: Mapping[str, Any], depth: int) -> str:
        """As `write_value`, for a schema with at most one type and without branches."""


def _check_keywords(schema: Mapping[str, Any], known: set[str], place: str) -> None:
    if others := sorted(schema.keys() - known):
        raise BadInput(
            f"{place} have {', '.join(others)}, which a forced call, as this model writes it, cannot follow. "
            "Leave it out, or leave tool_choice at auto"
        )


def _check_branches(schema: Mapping[str, Any], place: str) -> None:
    """Raises BadInput for branches that are no list, or that must be followed together."""
    found = [schema[key] for key in BRANCHES if key in schema]
    are_lists = all(isinstance(one, list) for one in found)
    if not are_lists or len(found) > 1 or len(schema.get("allOf", ())) > 1:
        raise BadInput(f"{place} have a value of several schemas: write them as one")


def _list_branches(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any]:
    """The schemas of which a value follows one; none for a schema that says itself what the value is."""
    if isinstance(reference := schema.get("$ref"), str):
        return [_find_reference(root, reference)]
    types = schema.get("type")
    if isinstance(types, list):
        return [{**schema, "type": one} for one in types]
    branches = next((schema[key] for key in BRANCHES if key in schema), None)
    return branches if isinstance(branches, list) else []


def _write_text(schema: Mapping[str, Any]) -> str:
    """A regex of a text, without its format."""
    if "type" not in schema or isinstance(schema["type"], list):
        return ANY_TEXT
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    sized = [f"/(?s:.{{{least},{most}}})/"] if least or most != "" else []
    pattern = schema.get("pattern")
    if isinstance(pattern, str):  # it may match anywhere
        begins = pattern.startswith("^")
        ends = pattern.endswith("$") and not pattern.endswith("\\$")
        body = re.sub(r"(?<!\\)/", r"\/", pattern[begins : len(pattern) - ends])
        body = body.replace("\n", r"\n")
        sized.append(f"/{'' if begins else '(?s:.*)'}({body}){'' if ends else '(?s:.*)'}/")
    return " & ".join(sized) or ANY_TEXT


def _read_properties(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """The schemas of an object's properties by name, and the names that it must have, which may be anything."""
    named = schema.get("properties")
    required = schema.get("required")
    return (
        named if isinstance(named, Mapping) else {},
        required if isinstance(required, list) else [],
    )


def _list_values(schema: Mapping[str, Any]) -> Sequence[object] | None:
    """The values that a schema lists; None if it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


# -- what a schema says of a value

JSON_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def find_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; none where it does not say. root: the schema that references start from."""
    found: set[str] = set()
    seen: set[int] = set()  # schemas, which may refer to one another many times
    waiting = [schema]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        values = _list_values(schema)
        if isinstance(types, list):
            found.update(one for one in types if isinstance(one, str))
        elif values is not None:
            found.update(JSON_TYPES.get(type(one), "string") for one in values)
        elif isinstance(reference := schema.get("$ref"), str):
            waiting.append(_find_reference(root, reference))
        else:
            lists = (schema[key] for key in BRANCHES if isinstance(schema.get(key), list))
            waiting += next(lists, [])
    return frozenset(found)


def _find_reference(root: Mapping[str, Any], reference: str) -> object:
    """What a reference within a schema names; None if it names nothing there."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


# -- calls in XML

# Between a value and the next one. A value in XML has no end of its own.
XML_END = json.dumps("\n</parameter>\n")


def _write_xml_call(number: int, name: str, schema: Mapping[str, Any], rules: GrammarRules) -> str:
    """Adds the rules of a call, and returns the name of its own. Raises BadInput."""
    place = f"tools: the parameters of {name}"
    _check_keywords(schema, OBJECT_KEYWORDS, place)
    named, required = _read_properties(schema)
    # A list, because a schema from outside may require anything.
    keys = [*named, *(key for key in required if key not in [*named])]
    writer = XmlWriter(schema, place, rules)
    wanted = []
    for key in keys:
        if not isinstance(key, str) or not re.fullmatch(r"[^<>\r\n]+", key):
            raise BadInput(f"{place} have a name that XML cannot hold: {ascii(key)}")
        value = writer.write_value(named.get(key, {}))
        argument = rules.add_part(f"{json.dumps(f'<parameter={key}>' + chr(10))} {value}")
        wanted.append(f"{argument}{'' if key in required else '?'}")
    more = schema.get("additionalProperties", "properties" not in schema)
    if more is not False:
        value = writer.write_value(more)
        head = r'"<parameter=" /[A-Za-z_][A-Za-z0-9_-]{0,63}/ ">\n"'
        wanted.append(f"{rules.add_part(f'{head} {value}')}*")
    head = json.dumps(f"<function={name}>\n")
    return rules.add(f"call_{number}", f'{head} {" ".join(wanted)} "</function>"')


class XmlWriter(ValueWriter):
    """Values in XML and their ends: texts as they are, everything else as JSON."""

    def write_value(self, schema: object, depth: int = 0) -> str:
        types = find_types(schema, self.root)
        schema = schema if isinstance(schema, Mapping) else {}
        if types and "string" not in types:
            defined = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
            return f"{_write_json({**defined, **schema})} {XML_END}"
        _check_keywords(schema, VALUE_KEYWORDS, self.place)
        if isinstance(
            schema.get("type"), list
        ):  # any text, because the text may be of another type
            schema = {key: value for key, value in schema.items() if key != "type"}
        return super().write_value(schema, depth)

    def write_constants(self, values: Sequence[object]) -> str:
        texts = [one if isinstance(one, str) else json.dumps(one) for one in values]
        return f"({' | '.join(map(json.dumps, texts))}) {XML_END}"

    def write_typed(self, schema: Mapping[str, Any], depth: int) -> str:
        return self.rules.add_part(_write_text(schema), attributes=f"[suffix={XML_END}]")


# -- calls of Gemma 4

KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"


@dataclass
class GemmaWriter(ValueWriter):
    """Values between braces and brackets: texts between marker tokens, keys as they are, numbers and words as JSON.

    Attributes:
        channels: the markers.
    """

    channels: Channels

    @property
    def quote(self) -> str:
        """The part of a rule for the marker around texts."""
        calls = self.channels.family.calls
        return write_markers(calls.quote if calls else "", self.channels.tokens)

    def write_object(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """An object whose keys are in the order of the chat template. Raises BadInput."""
        _check_keywords(schema, OBJECT_KEYWORDS, self.place)
        named, required = _read_properties(schema)
        keys = {*named, *map(str, required)}
        more = schema.get("additionalProperties", not keys and "properties" not in schema)
        if not keys and more is not False:
            return self._write_any_object()
        if more is not False:
            raise BadInput(
                f"{self.place} allow arguments that they do not name: a forced call has none"
            )
        entries = []
        for key in sorted(keys, key=str.lower):
            if not re.fullmatch(KEY, key):
                raise BadInput(
                    f"{self.place} have a name that Gemma's form cannot hold: {ascii(key)}"
                )
            value = self.write_value(named.get(key, {}), depth)
            entry = self.rules.add_part(f"{json.dumps(f'{key}:')} {value}")
            entries.append((entry, key in required))
        return f'"{{" {self._write_entries(entries)} "}}"'

    def _write_entries(self, entries: Sequence[tuple[str, bool]]) -> str:
        """Entries with commas between them; each with whether it is required, otherwise it may be left out."""
        found: list[str] = []  # the entries, by the first that is there
        rest = ""  # the entries after it
        is_needed = False  # any of them
        for entry, is_required in reversed(entries):
            found = [f"{entry} {rest}", *([] if is_required else found)]
            is_needed = is_needed or is_required
            this = f'"," {entry}' if is_required else f'("," {entry})?'
            rest = self.rules.add_part(f"{this} {rest}")
        return f"({' | '.join(found)}){'' if is_needed else '?'}" if found else ""

    def write_constants(self, values: Sequence[object]) -> str:
        return self.rules.add_part(" | ".join(map(self._write_constant, values)))

    def write_typed(self, schema: Mapping[str, Any], depth: int) -> str:
        match schema.get("type"):
            case "object":
                return self.write_object(schema, depth + 1)
            case "array":
                _check_keywords(schema, OBJECT_KEYWORDS | {"items"}, self.place)
                value = self.write_value(schema.get("items"), depth + 1)
                item = self.rules.add_part(value)
                return f'"[" ({item} ("," {item})*)? "]"'
            case "string":
                _check_keywords(schema, VALUE_KEYWORDS, self.place)
                text = self.rules.add_part(_write_text(schema), "TEXT")
                return f"{self.quote} {text} {self.quote}"
            case str():
                return _write_json(schema)
        _check_keywords(schema, VALUE_KEYWORDS, self.place)
        self._write_any_object()
        return "any"

    def _write_any_object(self) -> str:
        """The name of the rule of an object without a schema, next to `any`, the rule of a value without one."""
        quote = self.quote
        rules = {
            "any": f'{quote} {ANY_TEXT} {quote} | scalar | any_object | "[" (any ("," any)*)? "]"',
            "scalar": _write_json({"type": ["number", "boolean", "null"]}),
            "any_entry": f'/{KEY}/ ":" any',
        }
        for name, body in rules.items():
            self.rules.add_shared(name, body)
        return self.rules.add_shared("any_object", '"{" (any_entry ("," any_entry)*)? "}"')

    def _write_constant(self, value: object) -> str:
        if isinstance(value, str):
            text = json.dumps(value) if value else ""
            return f"{self.quote} {text} {self.quote}"
        if isinstance(value, list | dict):
            raise BadInput(
                f"{self.place} have an enum of lists or objects: write their schema instead"
            )
        return json.dumps(json.dumps(value))
