"""Tool calls and thinking: how a family of models writes them, as a grammar for calls that must come and as a parser.

Families are known by their chat templates. Three write calls as text: Hermes (Qwen2.5, Qwen3: JSON between
`<tool_call>` and `</tool_call>`), Qwen XML (Qwen3-Coder, Qwen3.5: `<function=NAME><parameter=KEY>` there), and Llama
3.1 (the answer is the JSON). Gemma 4 and gpt-oss (Harmony) mark calls by tokens, and these and Qwen's thinking models
mark thinking so. Prompts are made by the checkpoint's own chat template, which is given the tools.
"""

import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.structured_output.json_schema import JSON_FORM, MAX_GRAMMAR_BYTES

logger = logging.getLogger(__name__)
BLANK = " \t\r\n"
# Keywords by which a schema says, here or in another schema, which properties an object has in addition to
# `properties`.
OTHER_PROPERTIES = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties"),
    *("allOf", "anyOf", "oneOf", "$ref"),
}


@dataclass(frozen=True)
class ToolFamily:
    """How the models of a family write calls.

    Attributes:
        begin, end: around each call.
        arguments: the key of its arguments in JSON; None for calls in XML.
        separator: between forced calls; None where one call is forced.
    """

    begin: str
    end: str
    arguments: str | None
    separator: str | None


HERMES = ToolFamily("<tool_call>\n", "\n</tool_call>", "arguments", "\n")
QWEN_XML = ToolFamily("<tool_call>\n", "\n</tool_call>", None, "\n")
LLAMA = ToolFamily("", "", "parameters", None)
MARKED = ToolFamily("", "", None, None)  # by tokens: see `ChannelFamily.marks_calls`
FIRST_MARK = 0xD800  # surrogates: no text that is decoded from bytes has them
MARKS = re.compile("([\ud800-\udfff])")


@dataclass(frozen=True)
class ChannelFamily:
    """How the models of a family mark the parts of an answer by tokens.

    Tokens decide: the same letters, written by other tokens, are text. In the texts that parsers read, a lone surrogate
    stands for each marker.

    Attributes:
        markers: the tokens as they are spelled.
        begin, end: around thinking. Harmony's end includes the start of the next message.
        closing: ends thinking in a prompt whose template has begun it, where the answer is not to think.
        call: the marker that begins a call, and ends thinking that has no end.
        label: a text after `begin` that is not part of the thinking.
        marks_calls: whether markers delimit tool calls too.
        final: the start of an answer without thinking.
        turn: the start of the assistant's message in a prompt, before `begin` or `final`.
        efforts: the values of `reasoning_effort`, which the chat template reads.
        thinks_first: whether thinking can only be the first part of an answer. Markers elsewhere are text, because
            texts may have these tokens.
    """

    markers: tuple[str, ...]
    begin: str
    end: str
    closing: str
    call: str = ""
    label: str = ""
    marks_calls: bool = False
    final: str = ""
    turn: str = ""
    efforts: tuple[str, ...] = ()
    thinks_first: bool = False

    def mark(self, text: str) -> str:
        """A text with a surrogate for each marker that is spelled in it."""
        for number, marker in enumerate(self.markers):
            text = text.replace(marker, chr(FIRST_MARK + number))
        return text

    def spell(self, mark: str) -> str:
        """The marker that a surrogate stands for."""
        return self.markers[ord(mark) - FIRST_MARK]

    def find_opening(self, prompt: str) -> str:
        """The part of the answer that the prompt already contains, with marks.

        It is the start of thinking or of Harmony's final message; "" where the prompt contains neither.
        """
        for head in (self.begin + self.label, self.final):
            if head and prompt.rstrip().endswith((self.turn + head).rstrip()):
                return self.mark(head)
        return ""

    def leave_out_thinking(self, prompt: str, begins_text: bool) -> tuple[str, str]:
        """What to add to the prompt of an answer without thinking, and the answer's opening then, with marks.

        begins_text: whether the answer is a text, and not a call.
        """
        opening = self.find_opening(prompt)
        final = self.final if begins_text else ""
        if final and opening == self.mark(final):
            return "", opening
        added = (self.closing if opening else "") + final
        return added, self.mark(self.begin + self.end if self.thinks_first else final)


HARMONY = ChannelFamily(
    (
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
    begin="<|channel|>analysis<|message|>",
    end="<|end|><|start|>assistant",
    closing="<|end|><|start|>assistant",
    marks_calls=True,
    final="<|channel|>final<|message|>",
    turn="<|start|>assistant",
    efforts=("low", "medium", "high"),
)
GEMMA = ChannelFamily(
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    begin="<|channel>",
    end="<channel|>",
    call="<|tool_call>",
    closing="<channel|>",
    label="thought\n",
    marks_calls=True,
)
QWEN = ChannelFamily(
    ("<think>", "</think>", "<tool_call>"),
    begin="<think>",
    end="</think>",
    call="<tool_call>",
    closing="\n</think>\n\n",
    thinks_first=True,
)
# By a marker that the family's templates have.
CHANNEL_FAMILIES = {"<|channel|>": HARMONY, "<|channel>": GEMMA, "<think>": QWEN}


@dataclass(frozen=True)
class Channels:
    """The markers of a family in a tokenizer. tokens: their ids, by their spelling."""

    family: ChannelFamily
    tokens: Mapping[str, int]

    @property
    def marks(self) -> Mapping[int, str]:
        """Token id → the surrogate that stands for it."""
        return {token_id: self.family.mark(marker) for marker, token_id in self.tokens.items()}


def find_channels(template: str, added_tokens: Mapping[int, str]) -> Channels | None:
    """The channels of a chat template; None if it has none. added_tokens: of the tokenizer, spelling by id.

    Raises BadInput where the template writes channels that the tokenizer has no tokens for.
    """
    found = next((one for marker, one in CHANNEL_FAMILIES.items() if marker in template), None)
    if found is None:
        return None
    ids = {content: token_id for token_id, content in added_tokens.items()}
    missing = [marker for marker in found.markers if marker not in ids]
    if missing == [QWEN.call]:  # the model writes calls as text
        missing = []
    if missing and found is QWEN:  # a template may mention what its tokenizer writes as text
        return None
    if missing:
        raise BadInput(
            f"the chat template writes channels, and the tokenizer has no token {', '.join(missing)}"
        )
    return Channels(found, {marker: ids[marker] for marker in found.markers if marker in ids})


@dataclass(frozen=True)
class OfferedTools:
    """The tools that an answer may call.

    Attributes:
        family: how it writes calls.
        functions: name → JSON schema of the arguments.
        parallel: whether it may have several calls.
    """

    family: ToolFamily
    functions: Mapping[str, Any]
    parallel: bool = True


def find_family(template: str) -> ToolFamily | None:
    """The family of a chat template, by what it has between the markers; None for no tools or another form of calls."""
    if not re.search(r"\btools\b", template):
        return None
    if any(marker in template for marker, one in CHANNEL_FAMILIES.items() if one.marks_calls):
        return MARKED
    plain = template.replace('\\"', '"')
    calls = " ".join(re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", plain, re.DOTALL))
    if "<function=" in calls:
        return QWEN_XML
    if "<tool_call>" in plain:
        is_json = '"name"' in calls or '"arguments"' in calls
        return HERMES if is_json or not re.search(r"<\w+[=>]", calls) else None
    return LLAMA if '"parameters"' in plain else None


# -- the grammar of calls that must come


@dataclass
class GrammarRules:
    """The rules of a grammar, whose size is limited while they are written: schemas may repeat parts many times."""

    lines: list[str] = field(default_factory=list)
    _size: int = 0

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

    def add_part(self, body: str, prefix: str = "part") -> str:
        """As `add`, with a name of its own."""
        return self.add(f"{prefix}_{len(self.lines)}", body)


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
            calls.append(f"call_{number}")
            _write_xml_rules(number, name, schema, rules)
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


# Between a value and the next one. A value in XML has no end of its own.
XML_END = "\n</parameter>\n"
# Keywords of the arguments' schema that a grammar of XML follows, or that say nothing of the form.
XML_KEYWORDS = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("title", "description", "default", "examples", "$schema", "$id", "$comment", "strict"),
}
BRANCHES = ("anyOf", "oneOf", "allOf")
XML_VALUE_KEYWORDS = {
    *("type", "enum", "const", "pattern", "minLength", "maxLength", "format", "$ref"),
    *(*BRANCHES, "title", "description", "default", "examples", "$comment", "deprecated"),
}
ANY_TEXT = "/(?s:.*)/"


def _write_xml_rules(
    number: int, name: str, schema: Mapping[str, Any], rules: GrammarRules
) -> None:
    """Adds the rules of a call in XML. Raises BadInput."""
    place = f"tools: the parameters of {name}"
    _check_keywords(schema, XML_KEYWORDS, place)
    named = schema.get("properties")
    named = named if isinstance(named, Mapping) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    keys = [*named, *(key for key in required if key not in [*named])]
    writer = XmlWriter(schema, place, rules)
    wanted = []
    for at, key in enumerate(keys):
        if not isinstance(key, str) or not re.fullmatch(r"[^<>\r\n]+", key):
            raise BadInput(f"{place} have a name that XML cannot hold: {ascii(key)}")
        head = json.dumps(f"<parameter={key}>\n")
        rules.add(f"argument_{number}_{at}", f"{head} value_{number}_{at}")
        writer.write_value(f"value_{number}_{at}", named.get(key, {}))
        wanted.append(f"argument_{number}_{at}{'' if key in required else '?'}")
    more = schema.get("additionalProperties", "properties" not in schema)
    if more is not False:
        wanted.append(f"other_{number}*")
        head = r'"<parameter=" /[A-Za-z_][A-Za-z0-9_-]{0,63}/ ">\n"'
        rules.add(f"other_{number}", f"{head} more_{number}")
        writer.write_value(f"more_{number}", more)
    head = json.dumps(f"<function={name}>\n")
    rules.add(f"call_{number}", f'{head} {" ".join(wanted)} "</function>"')


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


@dataclass
class XmlWriter:
    """Writes rules of values in XML. root: the schema that references start from. place: for errors."""

    root: Mapping[str, Any]
    place: str
    rules: GrammarRules

    def write_value(self, rule: str, schema: object, depth: int = 0) -> None:
        """The rules of a value and its end: texts as they are, everything else as JSON. Raises BadInput."""
        end = json.dumps(XML_END)
        types = find_types(schema, self.root)
        schema = schema if isinstance(schema, Mapping) else {}
        if types and "string" not in types:
            defined = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
            self.rules.add(rule, f"{_write_json({**defined, **schema})} {end}")
            return
        _check_keywords(schema, XML_VALUE_KEYWORDS, self.place)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            texts = [one if isinstance(one, str) else json.dumps(one) for one in values]
            self.rules.add(rule, f"({' | '.join(map(json.dumps, texts))}) {end}")
            return
        _check_branches(schema, self.place)
        branches = next((schema[key] for key in BRANCHES if key in schema), None)
        if isinstance(reference := schema.get("$ref"), str):
            branches = [_find_reference(self.root, reference)]
        if not branches:
            self.rules.add(f"{rule}[suffix={end}]", _write_xml_text(schema))
            return
        if depth > MAX_REFERENCES:
            raise BadInput(f"{self.place} are nested in themselves, or too deeply")
        names = [f"{rule}_{at}" for at in range(len(branches))]
        self.rules.add(rule, " | ".join(names))
        for name, branch in zip(names, branches, strict=True):
            self.write_value(name, branch, depth + 1)


def _write_xml_text(schema: Mapping[str, Any]) -> str:
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


QUOTE = '<|"|>'  # around a text in Gemma's form
KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"


def write_marked_grammar(
    channels: Channels,
    functions: Mapping[str, Mapping[str, Any]],
    parallel: bool,
    thinks: bool = False,
) -> str:
    """As `write_call_grammar`, where markers delimit calls. thinks: whether thinking may come before the calls."""
    family = channels.family
    writer = MarkedWriter(channels.tokens)
    calls = []
    for number, (name, schema) in enumerate(functions.items()):
        calls.append(f"call_{number}")
        if family is HARMONY:
            head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            arguments = _write_json(_close(schema))
        else:
            head = f"<|tool_call>call:{name}"
            place = f"tools: the parameters of {name}"
            arguments = (
                f"{writer.write_object(schema, schema, place)} {writer.write('<tool_call|>')}"
            )
        writer.rules.add(f"call_{number}", f"{writer.write(head)} {arguments}")
    # Harmony's calls end the answer.
    several = " call*" if parallel and family is GEMMA else ""
    start = [f"start: call{several}"]
    if thinks:
        begin, end = writer.write(family.begin + family.label), writer.write(family.end)
        start = [f"start: thinking? call{several}", f"thinking: {begin} {ANY_TEXT} {end}"]
    return "\n".join([*start, f"call: {' | '.join(calls)}", *writer.rules.lines])


@dataclass
class MarkedWriter:
    """Writes rules with markers. tokens: the ids of the markers. rules: what the written parts refer to."""

    tokens: Mapping[str, int]
    rules: GrammarRules = field(default_factory=GrammarRules)
    _has_any: bool = False  # whether there are the rules of a value without a schema

    def write(self, text: str) -> str:
        """A text in which markers are tokens."""
        pieces = re.split(f"({'|'.join(map(re.escape, self.tokens))})", text)
        return " ".join(
            f"<[{self.tokens[piece]}]>" if piece in self.tokens else json.dumps(piece)
            for piece in pieces
            if piece
        )

    def write_object(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], place: str, depth: int = 0
    ) -> str:
        """An object of Gemma's form, whose keys are in the order of the chat template. Raises BadInput."""
        _check_keywords(schema, XML_KEYWORDS, place)
        named = schema.get("properties")
        named = named if isinstance(named, Mapping) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        keys = {*named, *map(str, required)}
        more = schema.get("additionalProperties", not keys and "properties" not in schema)
        if not keys and more is not False:
            return self._write_any_object()
        if more is not False:
            raise BadInput(f"{place} allow arguments that they do not name: a forced call has none")
        entries = []
        for key in sorted(keys, key=str.lower):
            if not re.fullmatch(KEY, key):
                raise BadInput(f"{place} have a name that Gemma's form cannot hold: {ascii(key)}")
            value = self.write_value(named.get(key, {}), root, place, depth)
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

    def write_value(
        self, schema: object, root: Mapping[str, Any], place: str, depth: int = 0
    ) -> str:
        """A value of Gemma's form. Raises BadInput."""
        if depth > MAX_REFERENCES:
            raise BadInput(f"{place} are nested in themselves, or too deeply")
        schema = schema if isinstance(schema, Mapping) else {}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            texts = [self._write_constant(one, place) for one in values]
            return self.rules.add_part(" | ".join(texts))
        _check_branches(schema, place)
        if branches := _list_branches(schema, root):
            found = [self.write_value(one, root, place, depth + 1) for one in branches]
            return self.rules.add_part(" | ".join(found))
        match schema.get("type"):
            case "object":
                return self.write_object(schema, root, place, depth + 1)
            case "array":
                _check_keywords(schema, XML_KEYWORDS | {"items"}, place)
                value = self.write_value(schema.get("items"), root, place, depth + 1)
                item = self.rules.add_part(value)
                return f'"[" ({item} ("," {item})*)? "]"'
            case "string":
                _check_keywords(schema, XML_VALUE_KEYWORDS, place)
                text = self.rules.add_part(_write_xml_text(schema), "TEXT")
                return f"{self.write(QUOTE)} {text} {self.write(QUOTE)}"
            case str():
                return _write_json(schema)
        _check_keywords(schema, XML_VALUE_KEYWORDS, place)
        self._write_any_object()
        return "any"

    def _write_any_object(self) -> str:
        quote = self.write(QUOTE)
        scalar = _write_json({"type": ["number", "boolean", "null"]})
        rules = {
            "any": f'{quote} {ANY_TEXT} {quote} | scalar | any_object | "[" (any ("," any)*)? "]"',
            "scalar": scalar,
            "any_object": '"{" (any_entry ("," any_entry)*)? "}"',
            "any_entry": f'/{KEY}/ ":" any',
        }
        if not self._has_any:
            for name, body in rules.items():
                self.rules.add(name, body)
        self._has_any = True
        return "any_object"

    def _write_constant(self, value: object, place: str) -> str:
        if isinstance(value, str):
            text = json.dumps(value) if value else ""
            return f"{self.write(QUOTE)} {text} {self.write(QUOTE)}"
        if isinstance(value, list | dict):
            raise BadInput(f"{place} have an enum of lists or objects: write their schema instead")
        return json.dumps(json.dumps(value))


def _list_branches(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any]:
    """The schemas of which a value follows one; none for a schema that says itself what the value is."""
    if isinstance(reference := schema.get("$ref"), str):
        return [_find_reference(root, reference)]
    types = schema.get("type")
    if isinstance(types, list):
        return [{**schema, "type": one} for one in types]
    branches = next((schema[key] for key in BRANCHES if key in schema), None)
    return branches if isinstance(branches, list) else []


# -- the types of arguments in XML, which has texts only

MAX_REFERENCES = 16
JSON_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them


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
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(types, list):
            found.update(one for one in types if isinstance(one, str))
        elif isinstance(values, list):
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


def _write_argument(text: str, types: frozenset[str]) -> str:
    """The JSON of an argument that stands as a text in XML."""
    if types - {"string"}:
        word = PYTHON_WORDS.get(text.strip(), text.strip())
        try:
            value = json.loads(word, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        found = JSON_TYPES[type(value)]
        is_whole = found == "number" and "integer" in types and value.is_integer()
        if found in types or is_whole or (found == "integer" and "number" in types):
            return word
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


# -- the parser


@dataclass(frozen=True)
class CallPart:
    """A part of a call, in the order of the text.

    Attributes:
        index: which call of the answer.
        name: set in its first part.
        arguments: JSON text that is added.
        identity: of the call, set in its first part.
    """

    index: int
    arguments: str = ""
    name: str | None = None
    identity: str | None = None


@dataclass(frozen=True)
class Thinking:
    """Text of an answer that the model thinks, and does not answer."""

    text: str


Part = str | Thinking | CallPart  # text outside calls and thinking, thinking, or a part of a call


class AnswerParser(Protocol):
    """Splits the text of an answer into parts, while it comes in. The parts depend on the whole text only."""

    @property
    def calls(self) -> int:
        """How many calls were found."""

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""

    def flush(self, is_cut: bool = False) -> list[Part]:
        """What was held back, at the end of the answer. is_cut: whether the model did not end the answer."""


@dataclass
class _PartCollector:
    """The parts of an answer that are certain.

    Attributes:
        tools: what the answer may call.
        calls: how many calls were found.
    """

    tools: OfferedTools
    calls: int = 0
    _parts: list[Part] = field(default_factory=list)
    _is_left_out: bool = False  # the call that is read: there may be only one

    def _take_parts(self) -> list[Part]:
        parts = self._parts
        self._parts = []
        return parts

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _begin_call(self, name: str) -> None:
        self._is_left_out = self.calls > 0 and not self.tools.parallel
        if self._is_left_out:
            logger.warning("a call of an answer was left out: parallel_tool_calls is false")
        self.calls += 1
        self._add("", name, f"call_{uuid.uuid4().hex[:24]}")

    def _add(
        self, arguments: str = "", name: str | None = None, identity: str | None = None
    ) -> None:
        """Adds to the call that is read."""
        if (arguments or name) and not self._is_left_out:
            self._parts.append(CallPart(self.calls - 1, arguments, name, identity))


@dataclass
class _Nesting:
    """Where the scan of a JSON object stands: open brackets, and whether it is in a text."""

    depth: int = 0
    in_text: bool = False
    escaped: bool = False

    def find_end(self, text: str) -> int | None:
        """The index after the bracket that closes the object; None if `text` does not close it."""
        for index, character in enumerate(text):
            if self.in_text:
                self.in_text = self.escaped or character != '"'
                self.escaped = character == "\\" and not self.escaped
            elif character == '"':
                self.in_text = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return index + 1
        return None


MAX_HEAD = 1000  # characters of a call before its arguments, where they are streamed
STRING = r'"(?:[^"\\]|\\.)*"'
# A call up to its arguments: as a family writes it, and with keys that some models add.
HEAD = re.compile(
    rf'\{{\s*((?:"(?:type|id|name)"\s*:\s*{STRING}\s*,\s*)*)"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
NAME = re.compile(rf'"name"\s*:\s*({STRING})')
NAMED = re.compile(rf'\{{\s*(?:"(?:type|id)"\s*:\s*{STRING}\s*,\s*)*"name"\s*:\s*({STRING})')
FIRST_KEY = re.compile(r'\{\s*(?:"([^"]*)"|([^"\s]))')
CALL_KEYS = {"name", "arguments", "parameters", "type", "id", "function"}
SEPARATORS = BLANK + ",;[]"  # between the calls of one marker, or of an answer of Llama's

FUNCTION_BEGIN, FUNCTION_END = "<function=", "</function>"
FUNCTION = re.compile(r"<function=([^<>\r\n]{1,64})>")
FUNCTION_PART = re.compile(r"<function=[^<>\r\n]{0,64}")
PARAMETER = re.compile(r"<parameter=([^<>\r\n]{1,256})>(?=.)", re.DOTALL)
PARAMETER_PART = re.compile(r"<parameter=[^<>\r\n]{0,256}>?")
VALUE_END = "</parameter>"
VALUE_ENDS = (VALUE_END, f"\n{VALUE_END}")
CALL, CALL_END = "<tool_call>", "</tool_call>"


@dataclass
class _XmlCall:
    """A call in XML that is read.

    Attributes:
        schema: of its arguments.
        types: of the argument that is read; none where the schema does not say.
        joint: JSON before the next argument.
    """

    schema: Mapping[str, Any] = field(default_factory=dict)
    types: frozenset[str] = frozenset()
    joint: str = "{"

    @property
    def quote(self) -> str:
        """Around an argument that is a text, whatever it is: such a text is streamed."""
        return "" if self.types - {"string"} else '"'

    def begin_argument(self, key: str) -> str:
        """JSON up to the argument's value."""
        named = self.schema.get("properties")
        other = self.schema.get("additionalProperties")
        self.types = find_types(
            named.get(key, other) if isinstance(named, Mapping) else other, self.schema
        )
        joint = self.joint
        self.joint = ", "
        return f"{joint}{json.dumps(key, ensure_ascii=False)}: {self.quote}"

    def write(self, text: str) -> str:
        """The argument as JSON; of a text a part, without its quotation marks."""
        if self.quote:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        return _write_argument(text, self.types)


@dataclass
class ToolCallParser(_PartCollector):
    """Parses calls that are written as text.

    Text that may be the beginning of a call is held back until that is certain. What does not turn out to be a call of
    an offered function is text.
    """

    _held: str = ""
    _opening: str = ""  # what stands before what may be a call, and is text if that is none
    _opened_at: int = 0  # calls before the marker
    # "marker": within a marker, before, between and after calls. "junk": there, what follows a call and is none.
    _state: Literal["text", "marker", "arguments", "rest", "junk", "xml", "value"] = "text"
    _nesting: _Nesting = field(default_factory=_Nesting)
    _scanned: int = 0  # characters of an object that is not complete
    _started: bool = False  # a call that is the whole answer can begin no more
    _xml: _XmlCall = field(default_factory=_XmlCall)

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._held += text
        while self._step():
            pass
        return self._take_parts()

    def flush(self, is_cut: bool = False) -> list[Part]:
        """What was held back, at the end of the answer."""
        held = self._opening + self._held if self._state == "marker" else self._held
        if self._state == "value":
            held = held[: len(held) - _count_held(held, VALUE_ENDS)]
            self._add(self._xml.write(held) if held.strip() else "")
        is_blank = self.calls > 0 and not held.strip(SEPARATORS)
        if self._state in ("text", "junk", "marker") and not is_blank:
            self._show(held)
        self._held = self._opening = ""
        self._state = "text"
        return self._take_parts()

    def _step(self) -> bool:
        """Reads on in what is held. Returns False where more text is needed."""
        match self._state:
            case "text":
                return self._find_begin() if self.tools.family.begin else self._find_bare_begin()
            case "marker":
                return self._read_marker()
            case "arguments":
                return self._read_arguments()
            case "rest":
                return self._read_rest()
            case "junk":
                return self._read_junk()
            case "xml":
                return self._read_xml()
        return self._read_value()

    # -- where calls begin and end

    def _find_begin(self) -> bool:
        markers = (CALL,) if self.tools.family.arguments else (CALL, FUNCTION_BEGIN)
        at = _find_first(self._held, markers)
        end = len(self._held) - _count_held(self._held, markers) if at is None else at
        before = self._held[:end].rstrip(BLANK)
        self._show(before)
        if at is None:
            self._held = self._held[len(before) :]
            return False
        after = at + len(CALL) if self._held.startswith(CALL, at) else at
        self._open(self._held[len(before) : after], self._held[after:])
        return True

    def _find_bare_begin(self) -> bool:
        text = self._held if self._started else self._held.lstrip(BLANK)
        if not text:
            return False
        if text[0] == "{" and not self._started:
            self._open(self._held[: len(self._held) - len(text)], text)
            return True
        self._show(self._held)
        self._started, self._held = True, ""
        return False

    def _open(self, opening: str, held: str) -> None:
        self._opening, self._held = opening, held
        self._opened_at = self.calls
        self._scanned = 0
        self._state = "marker"

    def _read_marker(self) -> bool:
        """Where a call may begin, or the marker may end."""
        text = self._held.lstrip(SEPARATORS)
        self._opening += self._held[: len(self._held) - len(text)]
        self._held = text
        if not text:
            return False
        has_calls = self.calls > self._opened_at
        for marker in (CALL_END, CALL) if self.tools.family.begin and has_calls else ():
            if text.startswith(marker):
                self._held = text.removeprefix(CALL_END)
                self._state = "text"
                return True
            if marker.startswith(text):
                return False
        return self._read_function() if text[0] == "<" else self._read_object()

    def _refuse(self, size: int = 0) -> bool:
        """What is held is no call: it is text, also its first `size` characters, which look like a call."""
        self._show(self._opening + self._held[:size])
        self._held = self._held[size:]
        self._started = True
        has_calls = self.calls > self._opened_at
        self._state = "junk" if has_calls and self.tools.family.begin else "text"
        return True

    def _read_junk(self) -> bool:
        """What follows the calls of a marker: text up to the marker's end, or to another marker."""
        markers = (CALL_END, CALL)
        at = _find_first(self._held, markers)
        end = len(self._held) - _count_held(self._held, markers) if at is None else at
        self._show(self._held[:end])
        self._held = self._held[end:].removeprefix(CALL_END)
        if at is not None:
            self._state = "text"
        return at is not None

    def _begin_call(self, name: str) -> None:
        self._opening = ""
        super()._begin_call(name)

    # -- calls in JSON

    def _read_object(self) -> bool:
        """The beginning of a call, or a whole call whose arguments do not come last."""
        beginning = self._held[:MAX_HEAD]
        head = HEAD.match(beginning)
        named = NAME.search(head[1]) if head else NAMED.match(beginning)
        name = _read_json(named[1]) if named else None
        if named and name not in self.tools.functions:
            return self._refuse()
        if head and named:
            self._held = self._held[head.end() :]
            self._nesting = _Nesting()
            self._state = "arguments"
            self._begin_call(str(name))
            return True
        key = FIRST_KEY.match(self._held)
        if self._held[0] != "{" or (key and key[1] not in CALL_KEYS):
            return self._refuse()
        if (end := self._find_end(_Nesting())) is None:
            return False
        if (call := self._find_call(_read_json(self._held[:end]))) is None:
            return self._refuse()
        self._held = self._held[end:]
        self._begin_call(call[0])
        self._add(call[1])
        return True

    def _find_end(self, fresh: _Nesting) -> int | None:
        """Where the object that is held ends; None if it is not complete. fresh: the nesting at its beginning."""
        if self._scanned == 0:
            self._nesting = fresh
        end = self._nesting.find_end(self._held[self._scanned :])
        found = None if end is None else self._scanned + end
        self._scanned = len(self._held) if end is None else 0
        return found

    def _find_call(self, value: object) -> tuple[str, str] | None:
        """Name and arguments of a JSON object that is a call of an offered function."""
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict):
            return None
        name = value.get("name", value.get("function"))
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            arguments = _read_json(arguments)
        if not (
            isinstance(name, str) and name in self.tools.functions and isinstance(arguments, dict)
        ):
            return None
        return name, json.dumps(arguments, ensure_ascii=False)

    def _read_arguments(self) -> bool:
        end = self._nesting.find_end(self._held)
        piece = self._held if end is None else self._held[:end]
        self._add(piece)
        self._held = self._held[len(piece) :]
        if end is None:
            return False
        self._scanned = 0
        self._state = "rest"
        return True

    def _read_rest(self) -> bool:
        """After the arguments: up to the end of the object, or of the marker if the object has no end."""
        end = self._find_end(_Nesting(depth=1))
        marked = self._held.find(CALL_END) if self.tools.family.begin else -1
        if marked >= 0 and (end is None or marked < end):
            end = marked
        if end is None:
            return False
        if not re.fullmatch(r"\s*}?", self._held[:end]):
            logger.warning("keys of a call besides its name and its arguments were left out")
        self._held = self._held[end:]
        self._started = True
        self._scanned = 0
        self._state = "marker"
        return True

    # -- calls in XML

    def _read_function(self) -> bool:
        """The beginning of a call."""
        if found := FUNCTION.match(self._held):
            name = found[1].strip()
            if name not in self.tools.functions:
                return self._refuse(found.end())
            self._xml = _XmlCall(self.tools.functions[name])
            self._held = self._held[found.end() :]
            self._state = "xml"
            self._begin_call(name)
            return True
        if FUNCTION_BEGIN.startswith(self._held) or FUNCTION_PART.fullmatch(self._held):
            return False
        return self._refuse(len(FUNCTION_BEGIN) if self._held.startswith(FUNCTION_BEGIN) else 0)

    def _read_xml(self) -> bool:
        """Between the arguments of a call."""
        text = self._held.lstrip(BLANK)
        if text.startswith((FUNCTION_END, CALL_END, CALL, FUNCTION_BEGIN)):
            self._add("{}" if self._xml.joint == "{" else "}")
            self._held = text.removeprefix(FUNCTION_END)
            self._state = "marker"
            return True
        if found := PARAMETER.match(text):
            self._add(self._xml.begin_argument(found[1].strip()))
            self._held = text[found.end() :].removeprefix("\n")
            self._state = "value"
            return True
        tags = (FUNCTION_END, CALL_END, CALL, FUNCTION_BEGIN, "<parameter=")
        if PARAMETER_PART.fullmatch(text) or any(tag.startswith(text) for tag in tags):
            return False
        # What stands between two arguments is text.
        end = self._held.find("<", len(self._held) - len(text) + 1)
        words = self._held if end < 0 else self._held[:end]
        self._show(words.rstrip(BLANK))
        self._held = self._held[len(words.rstrip(BLANK)) :]
        return True

    def _read_value(self) -> bool:
        end = self._held.find(VALUE_END)
        if end >= 0:
            value = self._held[:end].removesuffix("\n")
            self._add(self._xml.write(value) + self._xml.quote)
            self._held = self._held[end + len(VALUE_END) :]
            self._state = "xml"
            return True
        if self._xml.quote:
            size = len(self._held) - _count_held(self._held, VALUE_ENDS)
            self._add(self._xml.write(self._held[:size]))
            self._held = self._held[size:]
        return False


# -- the parsers of answers whose parts are marked by tokens


@dataclass
class ThinkingParser:
    """Parses thinking between two markers. inner: of the text outside; None where that has no calls."""

    family: ChannelFamily
    inner: AnswerParser | None
    _is_thinking: bool = False
    _may_think: bool = True  # whether thinking may begin
    _held: str | None = None  # what may be the label of thinking

    @property
    def calls(self) -> int:
        return self.inner.calls if self.inner else 0

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for piece in MARKS.split(text):
            if MARKS.match(piece):
                parts += self._read_mark(piece)
            elif piece:
                parts += self._read_text(piece)
        return parts

    def flush(self, is_cut: bool = False) -> list[Part]:
        return self.inner.flush(is_cut) if self.inner else []

    def _read_mark(self, mark: str) -> Sequence[Part]:
        family = self.family
        first = family.thinks_first
        if mark == family.mark(family.begin) and self._may_think:
            self._is_thinking = True
            self._may_think = not first
            self._held = ""
            return ()
        if mark == family.mark(family.end) and (self._is_thinking or not first):
            self._is_thinking = False
            return ()
        if mark == family.mark(family.call) and self.inner:
            self._is_thinking = False
        if first:
            return self._read_text(family.spell(mark))
        return self.inner.push(mark) if self.inner and not self._is_thinking else ()

    def _read_text(self, text: str) -> Sequence[Part]:
        if self._is_thinking:
            return self._think(text)
        if self.family.thinks_first and text.strip():
            self._may_think = False
        return self.inner.push(text) if self.inner else (text,)

    def _think(self, text: str) -> Sequence[Part]:
        if self._held is None:
            return (Thinking(text),)
        text = self._held + text
        self._held = text
        label = self.family.label
        if len(text) < len(label) and label.startswith(text):
            return ()
        self._held = None
        text = text.removeprefix(label)
        return (Thinking(text),) if text else ()


GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE = map(GEMMA.mark, (GEMMA.call, "<tool_call|>", QUOTE))
ALL_TYPES = frozenset(JSON_TYPES.values())


@dataclass
class GemmaCallParser(_PartCollector):
    """Parses calls between Gemma 4's markers: `call:NAME{key:<|"|>text<|"|>,other:1}`."""

    _state: Literal["text", "name", "arguments"] = "text"
    _name: str = ""
    _arguments: "_GemmaArguments" = field(default_factory=lambda: _GemmaArguments())

    def push(self, text: str) -> list[Part]:
        for piece in MARKS.split(text):
            if MARKS.match(piece):
                self._read_mark(piece)
            else:
                self._read_text(piece)
        return self._take_parts()

    def flush(self, is_cut: bool = False) -> list[Part]:
        if self._state == "name":
            self._show(self._name)
        return self._take_parts()

    def _read_mark(self, mark: str) -> None:
        if self._state == "arguments" and mark == GEMMA_QUOTE:
            self._add(self._arguments.quote())
        elif mark in (GEMMA_CALL, GEMMA_CALL_END):
            if self._state == "arguments":
                self._add(self._arguments.close())
            elif self._state == "name":
                self._show(self._name)
            self._name = ""
            self._state = "name" if mark == GEMMA_CALL else "text"

    def _read_text(self, text: str) -> None:
        match self._state:
            case "text":
                self._show(text)
            case "name":
                self._read_name(text)
            case "arguments":
                self._read_arguments(text)

    def _read_name(self, text: str) -> None:
        head, brace, rest = text.partition("{")
        self._name += head
        is_head = len(self._name) <= MAX_HEAD
        if is_head and not brace:
            return
        prefix, _, name = self._name.strip().partition(":")
        if is_head and prefix == "call" and name.strip() in self.tools.functions:
            self._state = "arguments"
            self._begin_call(name.strip())
            self._arguments = _GemmaArguments()
            self._add("{")
            self._read_arguments(rest)
        else:
            self._show(self._name + brace + rest)
            self._state = "text"

    def _read_arguments(self, text: str) -> None:
        arguments, rest = self._arguments.push(text)
        self._add(arguments)
        if not self._arguments.closers:
            self._state = "text"
            self._show(rest)


@dataclass
class _GemmaArguments:
    """Gemma's arguments as JSON, from after the first brace on.

    Attributes:
        closers: of the objects and lists that are open; none at the end.
        is_text: whether the next characters are in a text.
        bare: a key, a number or a word, as far as it is known.
        joint: JSON before the next entry.
        wants_value: after a key.
    """

    closers: list[str] = field(default_factory=lambda: ["}"])
    is_text: bool = False
    bare: str = ""
    joint: str = ""
    wants_value: bool = False

    def push(self, text: str) -> tuple[str, str]:
        """The JSON that is certain now, and what follows the last brace."""
        if self.is_text:
            return json.dumps(text, ensure_ascii=False)[1:-1], ""
        found: list[str] = []
        pieces = re.split(r"([{}\[\]:,])", text)
        for at, piece in enumerate(pieces):
            if not self.closers:
                return "".join(found), "".join(pieces[at:])
            found.append(self._read(piece))
        return "".join(found), ""

    def quote(self) -> str:
        """A text begins or ends."""
        self.is_text = not self.is_text
        if not self.is_text:
            return '"'
        return self._begin_value() + '"'

    def close(self) -> str:
        """The JSON of the end where the model left it out."""
        end = '"' if self.is_text else self._end_value()
        return end + "".join(reversed(self.closers))

    def _read(self, piece: str) -> str:
        is_key = self.closers[-1] == "}" and not self.wants_value
        match piece:
            case ":" if is_key:
                key = self.bare.strip()
                self.bare = ""
                self.wants_value = True
                return (
                    f"{self._begin_entry(json.dumps(key, ensure_ascii=False))}: " if key else ": "
                )
            case "{" | "[":
                begin = self._begin_value()
                self.closers.append("}" if piece == "{" else "]")
                return begin + piece
            case "}" | "]":
                end = self._end_value() + self.closers.pop()
                self.joint = ", "
                return end
            case ",":
                end = self._end_value()
                self.joint = ", "
                return end
        self.bare += piece
        return ""

    def _begin_entry(self, text: str) -> str:
        joint = self.joint
        self.joint = ""
        return joint + text

    def _begin_value(self) -> str:
        """What stands before a text, an object or a list, or before a key that is a text."""
        self.bare = ""
        self.wants_value = False
        return self._begin_entry("")

    def _end_value(self) -> str:
        """A value that is neither a text nor an object nor a list."""
        bare = self.bare.strip()
        is_value = self.wants_value or (self.closers[-1] == "]" and bool(bare))
        self.bare = ""
        self.wants_value = False
        return self._begin_entry(_write_argument(bare, ALL_TYPES)) if is_value else ""


HARMONY_START, HARMONY_CHANNEL, HARMONY_CONSTRAIN, HARMONY_MESSAGE = map(
    HARMONY.mark, ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
)
CHANNEL_NAME = re.compile(rf"{HARMONY_CHANNEL}\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s\ud800-\udfff]+)")
FUNCTION_PREFIX = "functions."


@dataclass
class HarmonyParser(_PartCollector):
    """Parses gpt-oss's answers, which are messages: a role, a channel and maybe a recipient, then the text.

    The channel "analysis" and messages to tools that are none of the caller's functions are thinking. Several messages
    of thinking, or of text, are joined by line feeds.
    """

    _header: str | None = ""  # of a message that begins; None within its text
    # Whether the header begins with a role; the role of the first message is in the prompt.
    _has_role: bool = False
    _kind: Literal["thinking", "text", "call"] = "text"
    _seen: set[str] = field(default_factory=set)  # kinds of messages that have text
    _joint: str = ""  # before the next text

    def push(self, text: str) -> list[Part]:
        for piece in MARKS.split(text):
            if MARKS.match(piece):
                self._read_mark(piece)
            elif self._header is None:
                self._read_text(piece)
            else:
                self._header += piece
        return self._take_parts()

    def flush(self, is_cut: bool = False) -> list[Part]:
        if self._header is not None:
            self._show_headless(self._header)
        elif not is_cut:
            self._end_message()
        self._header = ""
        return self._take_parts()

    def _read_mark(self, mark: str) -> None:
        if self._header is not None and mark == HARMONY_MESSAGE:
            self._begin_message(self._header)
        elif self._header is not None and mark in (HARMONY_CHANNEL, HARMONY_CONSTRAIN):
            self._header += mark
        elif mark not in (HARMONY_MESSAGE, HARMONY_CONSTRAIN):
            if self._header is None:
                self._end_message()
            else:
                self._show_headless(self._header)
            self._header = mark if mark == HARMONY_CHANNEL else ""
            self._has_role = mark == HARMONY_START

    def _show_headless(self, header: str) -> None:
        """Shows what looks like a header, and is text: it has neither a role nor a channel."""
        if header.strip() and not self._has_role and not MARKS.search(header):
            self._begin_message("")
            self._read_text(header)

    def _begin_message(self, header: str) -> None:
        channel = CHANNEL_NAME.search(header)
        recipient = RECIPIENT.search(header)
        to = recipient[1] if recipient else ""
        name = to.removeprefix(FUNCTION_PREFIX)
        self._header = None
        if to and name in self.tools.functions:
            self._kind = "call"
            self._seen.discard("call")
            self._begin_call(name)
        else:
            is_tool = bool(to) and not to.startswith(FUNCTION_PREFIX)
            is_thinking = is_tool or (channel is not None and channel[1] == "analysis")
            self._kind = "thinking" if is_thinking else "text"
        self._joint = "\n" if self._kind in self._seen else ""

    def _read_text(self, text: str) -> None:
        if not text:
            return
        self._seen.add(self._kind)
        text = self._joint + text
        self._joint = ""
        if self._kind == "call":
            self._add(text)
        else:
            self._parts.append(Thinking(text) if self._kind == "thinking" else text)

    def _end_message(self) -> None:
        if self._kind == "call" and "call" not in self._seen:
            self._add("{}")


NO_TOOLS = OfferedTools(MARKED, {})


def make_parser(
    family: ChannelFamily | None, tools: OfferedTools | None, opening: str = ""
) -> AnswerParser | None:
    """The parser of an answer; None for an answer that is all text.

    opening: the part of the answer that the prompt already contains, with marks; see `find_opening`.
    """
    parser: AnswerParser | None = ToolCallParser(tools) if tools else None
    if family is HARMONY:
        parser = HarmonyParser(tools or NO_TOOLS)
    elif family is GEMMA:
        parser = ThinkingParser(family, GemmaCallParser(tools or NO_TOOLS))
    elif family is not None:
        parser = ThinkingParser(family, parser)
    if parser and opening:
        parser.push(opening)
    return parser


def _read_json(text: str) -> object:
    """The value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _find_first(text: str, markers: Sequence[str]) -> int | None:
    return min((at for marker in markers if (at := text.find(marker)) >= 0), default=None)


def _count_held(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may begin one of `markers`."""
    return max(_count_overlap(text, marker) for marker in markers)


def _count_overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may begin `marker`."""
    return next(
        (
            size
            for size in range(min(len(text), len(marker) - 1), 0, -1)
            if marker.startswith(text[-size:])
        ),
        0,
    )


def gather_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields `content`, `reasoning_content` and `tool_calls` of a whole answer's message.

    `content` is None for calls or thinking alone; the other two are there if there is something of them.
    """
    text = _join_text(parts)
    thinking = join_thinking(parts)
    calls = list[dict[str, Any]]()
    for part in parts:
        if isinstance(part, CallPart):
            if part.name is not None:
                function = {"name": part.name, "arguments": ""}
                calls.append({"id": part.identity, "type": "function", "function": function})
            calls[-1]["function"]["arguments"] += part.arguments
    return {
        "content": text or None if calls or thinking else text,
        **({"reasoning_content": thinking} if thinking else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def format_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of a chunk's `delta`: of the message's fields, what is new."""
    text = _join_text(parts)
    thinking = join_thinking(parts)
    calls = []
    for part in parts:
        if isinstance(part, CallPart) and part.name is not None:
            function = {"name": part.name, "arguments": part.arguments}
            calls.append(
                {"index": part.index, "id": part.identity, "type": "function", "function": function}
            )
        elif isinstance(part, CallPart):
            calls.append({"index": part.index, "function": {"arguments": part.arguments}})
    return {
        **({"reasoning_content": thinking} if thinking else {}),
        **({"content": text} if text else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _join_text(parts: Sequence[Part]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def join_thinking(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thinking))
