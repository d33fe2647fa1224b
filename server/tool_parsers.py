"""Parsers of answers: tool parsers and reasoning parsers, as the family of the chat template needs them.

A parser splits the text of an answer, while it comes in, into text, thinking and tool calls.
"""

import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from dflash_aot.server.chat_families import (
    GEMMA,
    HARMONY,
    IN_CHANNELS,
    SURROGATE,
    ChannelFamily,
    OfferedTools,
)
from dflash_aot.server.tool_grammars import JSON_TYPES, find_types

logger = logging.getLogger(__name__)
BLANK = " \t\r\n"


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
SEPARATORS = BLANK + ",;[]"  # between the calls of one tag, or of an answer of Llama's

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
        """The quotation mark around an argument that is certainly a text, and therefore streamed; else ""."""
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
    _opening: str = ""  # the tag before a possible call; text if no call follows
    _opened_at: int = 0  # calls before the tag
    # "tag": after a tag, before, between and after calls. "junk": after a tag and a call, text that is no call.
    _state: Literal["text", "tag", "arguments", "rest", "junk", "xml", "value"] = "text"
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
        held = self._opening + self._held if self._state == "tag" else self._held
        if self._state == "value":
            held = held[: len(held) - _count_held(held, VALUE_ENDS)]
            self._add(self._xml.write(held) if held.strip() else "")
        is_blank = self.calls > 0 and not held.strip(SEPARATORS)
        if self._state in ("text", "junk", "tag") and not is_blank:
            self._show(held)
        self._held = self._opening = ""
        self._state = "text"
        return self._take_parts()

    def _step(self) -> bool:
        """Reads on in what is held. Returns False where more text is needed."""
        match self._state:
            case "text":
                return self._find_begin() if self.tools.family.begin else self._find_bare_begin()
            case "tag":
                return self._read_tag()
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
        tags = (CALL,) if self.tools.family.arguments else (CALL, FUNCTION_BEGIN)
        at = _find_first(self._held, tags)
        end = len(self._held) - _count_held(self._held, tags) if at is None else at
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
        self._state = "tag"

    def _read_tag(self) -> bool:
        """Reads what follows a tag: a call, or the end of the tag."""
        text = self._held.lstrip(SEPARATORS)
        self._opening += self._held[: len(self._held) - len(text)]
        self._held = text
        if not text:
            return False
        has_calls = self.calls > self._opened_at
        for tag in (CALL_END, CALL) if self.tools.family.begin and has_calls else ():
            if text.startswith(tag):
                self._held = text.removeprefix(CALL_END)
                self._state = "text"
                return True
            if tag.startswith(text):
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
        """What follows the calls of a tag: text up to the tag's end, or to another tag."""
        tags = (CALL_END, CALL)
        at = _find_first(self._held, tags)
        end = len(self._held) - _count_held(self._held, tags) if at is None else at
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
        """After the arguments: up to the end of the object, or of the tag if the object has no end."""
        end = self._find_end(_Nesting(depth=1))
        closed = self._held.find(CALL_END) if self.tools.family.begin else -1
        if closed >= 0 and (end is None or closed < end):
            end = closed
        if end is None:
            return False
        if not re.fullmatch(r"\s*}?", self._held[:end]):
            logger.warning("keys of a call besides its name and its arguments were left out")
        self._held = self._held[end:]
        self._started = True
        self._scanned = 0
        self._state = "tag"
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
            self._state = "tag"
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


# -- the parsers of answers with channels


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
        for piece in SURROGATE.split(text):
            if SURROGATE.match(piece):
                parts += self._read_surrogate(piece)
            elif piece:
                parts += self._read_text(piece)
        return parts

    def flush(self, is_cut: bool = False) -> list[Part]:
        return self.inner.flush(is_cut) if self.inner else []

    def _read_surrogate(self, surrogate: str) -> Sequence[Part]:
        family = self.family
        first = family.thinks_first
        if surrogate == family.to_surrogates(family.begin) and self._may_think:
            self._is_thinking = True
            self._may_think = not first
            self._held = ""
            return ()
        if surrogate == family.to_surrogates(family.end) and (self._is_thinking or not first):
            self._is_thinking = False
            return ()
        if surrogate == family.to_surrogates(family.call) and self.inner:
            self._is_thinking = False
        if first:
            return self._read_text(family.spell(surrogate))
        return self.inner.push(surrogate) if self.inner and not self._is_thinking else ()

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


GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE = map(
    GEMMA.to_surrogates, (GEMMA.call, "<tool_call|>", '<|"|>')
)
ALL_TYPES = frozenset(JSON_TYPES.values())


@dataclass
class GemmaCallParser(_PartCollector):
    """Parses calls between Gemma 4's markers: `call:NAME{key:<|"|>text<|"|>,other:1}`."""

    _state: Literal["text", "name", "arguments"] = "text"
    _name: str = ""
    _arguments: "_GemmaArguments" = field(default_factory=lambda: _GemmaArguments())

    def push(self, text: str) -> list[Part]:
        for piece in SURROGATE.split(text):
            if SURROGATE.match(piece):
                self._read_surrogate(piece)
            else:
                self._read_text(piece)
        return self._take_parts()

    def flush(self, is_cut: bool = False) -> list[Part]:
        if self._state == "name":
            self._show(self._name)
        return self._take_parts()

    def _read_surrogate(self, surrogate: str) -> None:
        if self._state == "arguments" and surrogate == GEMMA_QUOTE:
            self._add(self._arguments.quote())
        elif surrogate in (GEMMA_CALL, GEMMA_CALL_END):
            if self._state == "arguments":
                self._add(self._arguments.close())
            elif self._state == "name":
                self._show(self._name)
            self._name = ""
            self._state = "name" if surrogate == GEMMA_CALL else "text"

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
    HARMONY.to_surrogates, ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
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
        for piece in SURROGATE.split(text):
            if SURROGATE.match(piece):
                self._read_surrogate(piece)
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

    def _read_surrogate(self, surrogate: str) -> None:
        if self._header is not None and surrogate == HARMONY_MESSAGE:
            self._begin_message(self._header)
        elif self._header is not None and surrogate in (HARMONY_CHANNEL, HARMONY_CONSTRAIN):
            self._header += surrogate
        elif surrogate not in (HARMONY_MESSAGE, HARMONY_CONSTRAIN):
            if self._header is None:
                self._end_message()
            else:
                self._show_headless(self._header)
            self._header = surrogate if surrogate == HARMONY_CHANNEL else ""
            self._has_role = surrogate == HARMONY_START

    def _show_headless(self, header: str) -> None:
        """Shows what looks like a header, and is text: it has neither a role nor a channel."""
        if header.strip() and not self._has_role and not SURROGATE.search(header):
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


NO_TOOLS = OfferedTools(IN_CHANNELS, {})


def make_parser(
    family: ChannelFamily | None, tools: OfferedTools | None, opening: str = ""
) -> AnswerParser | None:
    """The parser of an answer; None for an answer that is all text.

    opening: the part of the answer that the prompt already contains, with surrogates; see `find_opening`.
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


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them


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


def _read_json(text: str) -> object:
    """The value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _find_first(text: str, tags: Sequence[str]) -> int | None:
    return min((at for tag in tags if (at := text.find(tag)) >= 0), default=None)


def _count_held(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of `text` may begin one of `tags`."""
    return max(_count_overlap(text, tag) for tag in tags)


def _count_overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` may begin `tag`."""
    return next(
        (
            size
            for size in range(min(len(text), len(tag) - 1), 0, -1)
            if tag.startswith(text[-size:])
        ),
        0,
    )


def gather_parts(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields `content`, `reasoning_content` and `tool_calls` of a whole answer's message.

    `content` is None for calls or thinking alone. The other two are present if the answer has thinking, or calls.
    """
    text = join_text(parts)
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
    text = join_text(parts)
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


def join_text(parts: Sequence[Part]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def join_thinking(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thinking))
