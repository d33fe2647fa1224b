"""Tool calls: how a family of models writes them, as a grammar for calls that must come and as a parser of the text.

Two families are known, by their chat templates: Hermes (Qwen2.5, Qwen3: `<tool_call>` around each call) and Llama 3.1
(the answer is one call). Prompts are made by the checkpoint's own chat template, which is given the tools.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_aot.runtime.structured_output.json_schema import JSON_FORM

BLANK = " \t\r\n"
MAX_HEAD = 160  # characters of a call before its arguments
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
        arguments: the key of its arguments.
        parallel: whether an answer may hold several calls.
    """

    begin: str
    end: str
    arguments: str
    parallel: bool


HERMES = ToolFamily("<tool_call>\n", "\n</tool_call>", "arguments", parallel=True)
LLAMA = ToolFamily("", "", "parameters", parallel=False)


def find_family(template: str) -> ToolFamily | None:
    """The family of a chat template; None for a template that knows no tools."""
    if not re.search(r"\btools\b", template):
        return None
    if "<tool_call>" in template:
        return HERMES
    return LLAMA if '"parameters"' in template else None


def write_call_grammar(family: ToolFamily, functions: Mapping[str, Any], parallel: bool) -> str:
    """A Lark grammar of one call, or of one or more, of these functions: name → JSON schema of the arguments.

    A function whose schema names its arguments gets no others, unless the schema mentions or requires others.
    """
    calls = []
    rules = []
    for number, (name, schema) in enumerate(functions.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{family.arguments}": ')
        calls.append(f'{head} arguments_{number} "}}"')
        rules.append(
            f"arguments_{number}: %json {json.dumps({**_close(schema), 'x-guidance': JSON_FORM})}"
        )
    begin, end = (f"{json.dumps(part)} " if part else "" for part in (family.begin, family.end))
    several = '("\\n" call)*' if parallel and family.parallel else ""
    return "\n".join(
        [f"start: call {several}", f"call: {begin}({' | '.join(calls)}) {end}", *rules]
    )


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


Part = str | CallPart  # text outside calls, or a part of a call


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


@dataclass
class ToolCallParser:
    """Splits the text of an answer into text and calls, while it comes in.

    Text that may be the beginning of a call is held back until that is certain. What does not turn out to be a call is
    text.
    """

    family: ToolFamily
    calls: int = 0
    _held: str = ""
    _opening: str = ""  # blanks and the marker before what may be a call
    _state: Literal["text", "head", "arguments", "tail"] = "text"
    _nesting: _Nesting = field(default_factory=_Nesting)
    _started: bool = False  # a call that is the whole answer can begin no more

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while (found := self._step()) is not None:
            parts += found
        return parts

    def flush(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        held = self._held
        self._held = ""
        held = (
            self._opening + held if self._state == "head" else held if self._state == "text" else ""
        )
        self._state = "text"
        return [held] if held else []

    def _step(self) -> list[Part] | None:
        """The next parts of what is held; None where more text is needed."""
        match self._state:
            case "text":
                return self._find_begin()
            case "head":
                return self._read_head()
            case "arguments":
                return self._read_arguments()
        return self._find_end()

    def _find_begin(self) -> list[Part] | None:
        marker = self.family.begin.strip()
        if not marker:  # a call is the whole answer
            return self._find_bare_begin()
        # A single call was asked for: what comes after it is dropped.
        if self.calls and not self.family.parallel:
            self._held = ""
            return None
        before, found, after = self._held.partition(marker)
        if not found:
            before = before[: len(before) - _count_overlap(before, marker)]
        before = before.rstrip(BLANK)
        if found:
            self._opening = self._held[len(before) : len(self._held) - len(after)]
            self._state = "head"
        self._held = after if found else self._held[len(before) :]
        return [before] if before else [] if found else None

    def _find_bare_begin(self) -> list[Part] | None:
        text = self._held if self._started else self._held.lstrip(BLANK)
        if not text:
            return None
        if text[0] == "{" and not self._started:
            self._state = "head"
            return []
        self._started, self._held = True, ""
        return [text]

    def _read_head(self) -> list[Part] | None:
        """`{"name": "...", "arguments": `, as the family writes it."""
        head = rf'\s*\{{\s*"name"\s*:\s*"([^"\\}}]+)"\s*,\s*"{self.family.arguments}"\s*:\s*(?=\{{)'
        match = re.match(head, self._held[:MAX_HEAD])
        if match:
            self._held = self._held[match.end() :]
            self._state = "arguments"
            self._nesting = _Nesting()
            self.calls += 1
            return [
                CallPart(self.calls - 1, name=match[1], identity=f"call_{uuid.uuid4().hex[:24]}")
            ]
        if len(self._held) < MAX_HEAD and "}" not in self._held:
            return None
        self._state = "text"
        self._started = True
        return [self._opening] if self._opening else []

    def _read_arguments(self) -> list[Part] | None:
        end = self._nesting.find_end(self._held)
        piece = self._held if end is None else self._held[:end]
        self._held = self._held[len(piece) :]
        if end is not None:
            self._state = "tail"
        return [CallPart(self.calls - 1, piece)] if piece else None

    def _find_end(self) -> list[Part] | None:
        """After the arguments: the rest of the call is dropped."""
        marker = self.family.end.strip() or "}"
        _, found, after = self._held.partition(marker)
        if not found:
            self._held = self._held[-len(marker) :]
            return None
        self._held = after
        self._state = "text"
        self._started = True
        return []


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
    """The fields `content` and `tool_calls` of a whole answer's message; `content` is None for calls alone."""
    text = _join_text(parts)
    calls = list[dict[str, Any]]()
    for part in parts:
        if isinstance(part, CallPart):
            if part.name is not None:
                function = {"name": part.name, "arguments": ""}
                calls.append({"id": part.identity, "type": "function", "function": function})
            calls[-1]["function"]["arguments"] += part.arguments
    return {"content": text or None, "tool_calls": calls} if calls else {"content": text}


def format_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of a chunk's `delta`: `content`, and `tool_calls` with what is new of each call."""
    text = _join_text(parts)
    calls = []
    for part in parts:
        if isinstance(part, CallPart) and part.name is not None:
            function = {"name": part.name, "arguments": part.arguments}
            calls.append(
                {"index": part.index, "id": part.identity, "type": "function", "function": function}
            )
        elif isinstance(part, CallPart):
            calls.append({"index": part.index, "function": {"arguments": part.arguments}})
    return ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})


def _join_text(parts: Sequence[Part]) -> str:
    return "".join(part for part in parts if isinstance(part, str))
