"""Grammars of structured output: what a request asks for, compiled by llguidance within limits, and kept.

llguidance instead of xgrammar: it refuses keywords that it cannot follow (`not`, `if`, `contains`, `uniqueItems`),
which xgrammar 0.2.8 accepts and leaves out; it compiles a schema in 1 to 110 ms where xgrammar takes 20 to 690; and it
needs no torch. Its masks take longer, medians of 11 to 70 µs against 2 to 7 µs (151,000 tokens, 2 to 40 properties).
"""

import hashlib
import json
import math
import re
import resource
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, gbnf_to_lark

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.runtime.bounded_worker import (
    GRAMMAR_GUARD,
    GUARD_STACK,
    SPARE_STACK,
    TRIES,
    CallExceeded,
    CallFailed,
    CallLimits,
    Leaving,
    run_with_stack,
)
from dflash_aot.runtime.structured_output.grammar_matcher import CompletionFinder, GrammarMatcher
from dflash_aot.runtime.structured_output.json_schema import (
    JSON_FORM,
    MAX_CHAIN,
    MAX_GRAMMAR_BYTES,
    NormalSchema,
    SchemaRefused,
    check_schema,
    is_deep,
    list_patterns,
    list_schemas,
    normalize_schema,
)
from dflash_aot.runtime.text.tokenizer import PANIC, Tokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_CHOICES = 1024
MAX_GRAMMAR_MEMORY = 16 << 20  # bytes, compiled and followed for some rounds
MAX_REPEATS = 1000  # of a regular expression: optional parts in a row take a time that grows with their square
# Parts of a refused schema are compiled alone for so long, to say which is at fault.
MAX_EXPLAIN_SECONDS = 0.3
FIELD = "structured_outputs"
# Steps and sizes at which llguidance gives a grammar up: its defaults, reduced to what takes well under a second.
LIMITS: Mapping[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": True,
    "verbose_errors": False,
}


# In a Lark grammar: texts, comments and regular expressions, and what begins a JSON schema.
LARK_PARTS = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/)|(?P<json>%json\b)|[^"/%]+|.""",
    re.DOTALL,
)
REPEATS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+\]?|(?P<repeat>[?*+{])", re.DOTALL)
RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\[[^\]]*\])?(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
NAME = re.compile(r"[A-Za-z_]\w*")
# Of llguidance: what the sampler of its own server does.
UNUSED_ATTRIBUTES = re.compile(r"\[[^\[\]]*\b(max_tokens|temperature)\s*=")


def check_structured_outputs(asked: object) -> str | None:
    """Returns why `asked` is not one of the kinds of structured output in its form, None if it is."""
    if not isinstance(asked, Mapping) or len(asked) != 1 or not asked.keys() <= set(KINDS):
        return f"it needs exactly one of {', '.join(KINDS)}"
    ((kind, value),) = asked.items()
    match kind:
        case "json" if isinstance(value, str | Mapping):
            return None
        case "json":
            return "json needs a JSON schema: an object, or its text"
        case "json_object":
            return None if value is True else "json_object can be true only"
        case "choice" if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            fits = 0 < len(value) <= MAX_CHOICES and all(
                isinstance(one, str) and one for one in value
            )
            return None if fits else f"choice needs 1 to {MAX_CHOICES} texts, none of them empty"
        case "choice":
            return "choice needs a list of texts"
    return None if isinstance(value, str) and value else f"{kind} needs a text"


def read_structured_outputs(asked: Mapping[str, Any]) -> tuple[str, Any]:
    """The kind and its value. Raises BadInput."""
    if flaw := check_structured_outputs(asked):
        raise BadInput(f"{FIELD}: {flaw}")
    ((kind, value),) = asked.items()
    return kind, value


def read_own_bytes() -> int:
    """Memory of this process that is not of files; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:  # not Linux
        return 0
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()


@dataclass(frozen=True)
class CheckedGrammar:
    """A grammar that keeps to the limits.

    Attributes:
        grammar: as llguidance takes it.
        shortest: the shortest answer that was found.
        size: bytes of memory that it takes.
    """

    grammar: str
    shortest: Sequence[int] | None
    size: int


SPECIAL = b"\xff"  # llguidance's mark of a token without text, before its name
NO_TOKEN = 0xFFFF_FFFF
MAX_TOKEN_BYTES = 1000  # llguidance aborts at 1024
MAX_FORCED_LETTERS = 2000
FALLBACK_BYTES = 32  # longest token in a text that the encoder cannot write
# In a Lark grammar: texts, regexes and comments; a token by its number or name.
LARK_TOKENS = re.compile(
    r""""(?:\\.|[^"\\])*+"?|/(?:\\.|[^/\\\n])++/?|//.*|(?P<token><(?:\[\d+\]|[^\s<>\[\]"]+)>)"""
)


class GrammarTokens:
    """The tokens as llguidance reads them: their bytes are those that the detokenizer shows.

    llguidance's own reader of a tokenizer.json takes each added token `<...>` for special, and its encoder writes the
    same token for those letters: a mask then allows a token that the parser refuses.

    Attributes:
        tokens: the bytes of each token of the target's head; b"" for those that no text has.
        eos_token_id: none, because the compiler sets the end tokens.
        bos_token_id: none.
    """

    eos_token_id = NO_TOKEN
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Collection[int]):
        """ends: tokens of the head that are never text. Raises BadInput where texts cannot be followed byte by byte."""
        if not tokenizer.has_byte_tokens:
            raise BadInput(
                f"{FIELD}: the tokenizer of this target is neither byte-level BPE nor has byte fallback"
            )
        self._tokenizer = tokenizer
        self.tokens = [_limit_token(data) for data in tokenizer.list_text_bytes(vocab)]
        for token in (token for token in tokenizer.special_tokens if token < vocab):
            self.tokens[token] = SPECIAL + tokenizer.token_bytes(token)[:MAX_TOKEN_BYTES]
        for token in {*ends} - tokenizer.special_tokens.keys():
            self.tokens[token] = SPECIAL + (self.tokens[token] or b"<end>")
        self._before = ""
        self._tokens_before: list[int] = []
        if self._encode("a") is None:  # it puts a space before a text, and this is within a text
            self._before = "\n"
            self._tokens_before = tokenizer.encode(self._before, add_special_tokens=False)

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a part of an answer: the encoder's, if they have the text's bytes. Never raises.

        Of a long text, which llguidance asks for again in each round, only its beginning, which is more than a round
        can use.
        """
        text = text[:MAX_FORCED_LETTERS]
        found = self._encode(text)
        return self._find_longest(text.encode()) if found is None else found

    def _encode(self, text: str) -> list[int] | None:
        try:
            ids = self._tokenizer.encode(self._before + text, add_special_tokens=False)
        except (BadCheckpoint, BadInput):
            return None
        size = len(self._tokens_before)
        if ids[:size] != self._tokens_before or max(ids, default=0) >= len(self.tokens):
            return None
        data = b"".join([self.tokens[token] for token in ids[size:]])
        return ids[size:] if data == text.encode() else None

    def _find_longest(self, data: bytes) -> list[int]:
        """The longest token at each place."""
        found: list[int] = []
        at = 0
        while at < len(data):
            ends = range(min(len(data), at + FALLBACK_BYTES), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), at)
            if end > at:
                found.append(self._ids[data[at:end]])
            at = max(end, at + 1)
        return found

    @cached_property
    def _ids(self) -> Mapping[bytes, int]:
        return {data: token for token, data in enumerate(self.tokens) if data}


def _limit_token(data: bytes) -> bytes:
    """The bytes of a token that llguidance can follow, otherwise b""."""
    is_marked = data[:1] == SPECIAL and len(data) > 1
    return b"" if is_marked or len(data) > MAX_TOKEN_BYTES else data


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Threads may share it.

    Args:
        tokenizer: of the target.
        vocab: tokens of the target's head. The tokenizer may have fewer, or more, which are never allowed.
        ends: the end tokens, which a grammar allows where the answer may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Collection[int]):
        """Raises BadInput for a tokenizer that llguidance cannot read."""
        ends = {token for token in ends if 0 <= token < vocab}
        self._tokenizer = _read_tokens(GrammarTokens(tokenizer, vocab, ends), ends)
        # Added tokens with text, as Lark grammars name them.
        self._texts = {
            name: text
            for token, text in tokenizer.added_tokens.items()
            if token not in tokenizer.special_tokens
            for name in (text, f"<[{token}]>")
        }
        self._limits = LLParserLimits(**LIMITS)
        self._vocab, self._ends = vocab, frozenset(ends)
        self._finder = CompletionFinder(self._tokenizer, vocab)

    def compile(self, asked: Mapping[str, Any]) -> GrammarMatcher:
        """The matcher of a new request. Raises BadInput for what is malformed, too large or not supported."""
        kind, value = read_structured_outputs(asked)
        matcher = self._build(self._write(kind, value))
        if matcher.is_error():
            reason = self._explain(kind, value, matcher.get_error())
            raise BadInput(f"{FIELD}.{kind} is refused: {reason}")
        shortest = self._finder.find_shortest(matcher, value if kind == "choice" else ())
        return self._follow(matcher, shortest)

    def check(self, asked: Mapping[str, Any]) -> CheckedGrammar:
        """A grammar that was compiled and followed within the limits. Raises BadInput.

        For a process of its own: nothing here ends a library that takes too long, or too much memory or stack.
        """
        before = read_own_bytes()
        kind, value = read_structured_outputs(asked)
        matcher = self.compile(asked)
        if flaw := matcher.try_rounds():
            raise BadInput(f"{FIELD}.{kind} is refused: {flaw}")
        size = read_own_bytes() - before
        if size > MAX_GRAMMAR_MEMORY:
            raise BadInput(
                f"{FIELD}.{kind} is refused: it takes {size >> 20} MiB of memory, and a grammar may take "
                f"{MAX_GRAMMAR_MEMORY >> 20}"
            )
        return CheckedGrammar(self._write(kind, value), matcher.shortest, max(size, 0))

    def has_made(self, matcher: GrammarMatcher) -> bool:
        """Whether the matcher is one of this compiler's."""
        return matcher.is_made_with(self._finder)

    def open(self, checked: CheckedGrammar) -> GrammarMatcher:
        """The matcher of a grammar that `check` returned for the same tokenizer. Raises BadInput."""
        matcher = self._build(checked.grammar)
        if matcher.is_error():  # not with the same limits
            raise BadInput(f"{FIELD} is refused: {_quote_reason(matcher.get_error())}")
        return self._follow(matcher, checked.shortest)

    def _follow(self, matcher: LLMatcher, shortest: Sequence[int] | None) -> GrammarMatcher:
        return GrammarMatcher(matcher, self._vocab, self._finder, shortest, self._ends)

    def _write(self, kind: str, value: Any) -> str:
        try:
            if kind == "grammar":
                return _write_grammar(value, self._texts)
            return _WRITERS[kind](value)
        except ValueError as error:
            # Half of a character that JSON and Python let pass, for example.
            raise BadInput(f"{FIELD}.{kind} is refused: {quote_first_line(str(error))}") from error

    def _build(self, grammar: str) -> LLMatcher:
        """Other threads go on: llguidance releases the GIL."""
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _explain(self, kind: str, value: Any, error: str) -> str:
        """llguidance's reason for a refusal, and for a JSON schema the place."""
        if kind != "json":
            return _quote_reason(error)
        normal = _normalize(value)
        place, schema, error = self._find_fault(normal, error)
        if "oneOf" in error and normal.doubts:
            return normal.doubts[0]
        patterns = (
            [schema["pattern"]] if "pattern" in schema else schema.get("patternProperties", ())
        )
        refused = next((one for one in patterns if self._try({"pattern": one})), None)
        what = f"the pattern {ascii(refused)[:200]}: " if refused else ""
        return f"{place}: {what}{_quote_reason(error)}"

    def _find_fault(self, normal: NormalSchema, error: str) -> tuple[str, Mapping[str, Any], str]:
        """The innermost part that is refused when it is compiled alone; its place, and why."""
        definitions = normal.schema.get("$defs", {})
        named = {f"#/$defs/{name}": name for name in definitions}
        place, schema = "#", normal.schema
        tried = {id(schema)}
        began = time.thread_time()
        while True:
            parts = [*list_schemas(schema, place)]
            if name := named.get(schema.get("$ref", "")):
                parts.append((definitions[name], normal.places[name]))
            for part, at in parts:
                if id(part) in tried or not isinstance(part, dict):
                    continue
                if time.thread_time() - began > MAX_EXPLAIN_SECONDS:
                    return place, schema, error
                tried.add(id(part))
                if failed := self._try({**part, "$defs": definitions}):
                    name = named.get(at)
                    place = at if name is None else normal.places[name]
                    schema, error = part, failed
                    break
            else:
                return place, schema, error

    def _try(self, schema: Mapping[str, Any]) -> str:
        """Why a schema is refused; empty if it is not."""
        return self._build(_write_normal(schema)).get_error()


def _read_tokens(tokens: GrammarTokens, ends: Collection[int]) -> LLTokenizer:
    try:
        return LLTokenizer(TokenizerWrapper(tokens), eos_token=sorted(ends) or None)
    except MemoryError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == PANIC):
            raise
        reason = quote_first_line(str(error))
        raise BadInput(
            f"{FIELD}: llguidance cannot read the tokenizer of this target: {reason}"
        ) from error


def _check_size(kind: str, text: str) -> str:
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_GRAMMAR_BYTES:
        raise BadInput(f"{FIELD}.{kind} has {size} bytes: at most {MAX_GRAMMAR_BYTES} are accepted")
    return text


def _check_regex(regex: str, kind: str) -> str:
    """The regular expression. Raises BadInput for more repeats than are compiled in well under a second."""
    repeats = sum(1 for part in REPEATS.finditer(regex) if part["repeat"])
    if repeats > MAX_REPEATS:
        raise BadInput(
            f"{FIELD}.{kind} has a regular expression with {repeats} repeats and optional parts: at most {MAX_REPEATS} "
            "are accepted"
        )
    return regex


def _write_schema(given: str | Mapping[str, Any]) -> str:
    return _write_normal(_normalize(given).schema)


def _normalize(given: str | Mapping[str, Any]) -> NormalSchema:
    try:
        schema = json.loads(_check_size("json", given)) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{FIELD}.json is not JSON: {error}") from error
    check_schema(schema, f"{FIELD}.json")
    for pattern in list_patterns(schema):
        _check_regex(pattern, "json")
    try:
        return normalize_schema(schema)
    except SchemaRefused as reason:
        raise BadInput(f"{FIELD}.json is refused: {reason}") from reason


def _write_normal(schema: Mapping[str, Any]) -> str:
    # As text, because llguidance takes no larger integer than 2^64 from a dict.
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_FORM)


def _quote_reason(error: str) -> str:
    """A reason in one line: of a regular expression's, whose first lines quote it, the last."""
    lines = [line for line in error.splitlines() if line.strip()] or [""]
    reason = next((line for line in lines if line.startswith("error: ")), lines[0])
    return quote_first_line(reason.removeprefix("error: "))


def _write_grammar(grammar: str, texts: Mapping[str, str]) -> str:
    """Grammars are written as Lark, or as GBNF, which llama.cpp and vLLM use and which names its rules with `::=`.

    texts: of tokens that have a text, by the names that Lark gives to tokens without a text.
    """
    _check_size("grammar", grammar)
    if "::=" not in grammar:
        return _write_lark(grammar, texts)
    try:
        lark = gbnf_to_lark.gbnf_to_lark(grammar)
    except Exception as error:
        raise BadInput(f"{FIELD}.grammar is not GBNF: {quote_first_line(str(error))}") from error
    return _write_lark(lark, {})


def _write_lark(grammar: str, texts: Mapping[str, str]) -> str:
    """A Lark grammar whose tokens with a text are texts, and whose JSON schemas are normalized. Raises BadInput."""

    def write_token(found: re.Match[str]) -> str:
        text = texts.get(found["token"] or "")
        return found[0] if text is None else json.dumps(text)

    grammar = LARK_TOKENS.sub(write_token, grammar)
    written = []
    rules = []
    at = 0
    while found := LARK_PARTS.match(grammar, at):
        at = found.end()
        written.append(found[0])
        if found[0].startswith("/"):
            _check_regex(found[0], "grammar")
        rules.append(" " if found["text"] else found[0])
        if found["json"]:
            schema, at = _normalize_part(grammar, at)
            written.append(f" {json.dumps(schema)}")
    _check_rules("".join(rules))
    return LLMatcher.grammar_from_lark("".join(written))


def _normalize_part(grammar: str, at: int) -> tuple[Mapping[str, Any], int]:
    """The schema that begins at a place of a grammar, normalized, and where it ends."""
    try:
        blanks = len(grammar[at:]) - len(grammar[at:].lstrip())
        schema, end = json.JSONDecoder().raw_decode(grammar, at + blanks)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{FIELD}.grammar has a schema that is not JSON: {error}") from error
    check_schema(schema, f"a schema in {FIELD}.grammar")
    for pattern in list_patterns(schema):
        _check_regex(pattern, "grammar")
    options = {name: schema[name] for name in ("x-guidance",) if name in schema}
    try:
        return {**normalize_schema(schema).schema, **options}, end
    except SchemaRefused as reason:
        raise BadInput(f"{FIELD}.grammar is refused: a schema: {reason}") from reason


def _check_rules(rules: str) -> None:
    """Refuses chains of rules that are too long, and attributes that a server cannot follow."""
    if found := UNUSED_ATTRIBUTES.search(rules):
        raise BadInput(f"{FIELD}.grammar is refused: the attribute {found[1]} is not supported")
    starts = [*RULE.finditer(rules)]
    ends = [one.start() for one in starts[1:]] + [len(rules)]
    links = {
        one[1]: [(name, 1) for name in NAME.findall(rules[one.end() : end])]
        for one, end in zip(starts, ends, strict=True)
    }
    if is_deep(links, "start"):
        raise BadInput(
            f"{FIELD}.grammar is refused: its rules are more than {MAX_CHAIN} levels deep: at most "
            f"{MAX_CHAIN} are accepted"
        )


def _write_choice(choices: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark(
        "start: " + _check_size("choice", " | ".join(map(json.dumps, choices)))
    )


_WRITERS: Mapping[str, Callable[[Any], str]] = {
    "json": _write_schema,
    "json_object": lambda _: _write_schema({"type": "object"}),
    "regex": lambda regex: LLMatcher.grammar_from_regex(
        _check_regex(_check_size("regex", regex), "regex")
    ),
    "choice": _write_choice,
}


# -- the grammars of all API keys: checked by the guard first, then compiled here, and kept by their bytes

NO_OWNER = 0  # of requests that name none
KEPT_BYTES = 128 << 20  # of all grammars together
LEAST_BYTES = 1 << 16  # that a grammar is counted with
REFUSED_SECONDS = 60.0  # in which the same grammar is refused without another try
CHECK_LIMITS = CallLimits(
    seconds=1.0, memory=1 << 28, reply_characters=1 << 24, wall_seconds=4.0, stack=GUARD_STACK
)
# For a tokenizer of several hundred thousand tokens.
OPEN_LIMITS = CallLimits(seconds=60.0, memory=1 << 32)


class GrammarCache:
    """The grammars of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Collection[int]):
        """Arguments and errors as of `GrammarCompiler`."""
        self._compiler = GrammarCompiler(tokenizer, vocab, ends)
        self._given = {"tokenizer": tokenizer.to_json(), "vocab": vocab, "ends": [*ends]}
        self._name = uuid.uuid4().hex
        self._is_prepared = False
        self._lock = threading.Lock()
        # by owner and digest
        self._kept: OrderedDict[tuple[int, str], _Kept] = OrderedDict()
        self._bytes: Counter[int] = Counter()  # by owner

    def prepare(self) -> None:
        """Starts the guard and gives it the tokenizer. Raises BadInput."""
        try:
            GRAMMAR_GUARD.call("open_grammars", {"name": self._name, **self._given}, OPEN_LIMITS)
        except CallFailed as error:
            raise BadInput(f"{FIELD}: grammars cannot be checked: {error}") from error
        self._is_prepared = True

    def compile(
        self, asked: Mapping[str, Any], owner: int = NO_OWNER, leaving: Leaving | None = None
    ) -> GrammarMatcher:
        """The matcher of a new request. Raises BadInput for what is malformed, or beyond a limit.

        owner: whose grammar it is; those of one owner never push out all of another's. leaving: ends the work.
        """
        kind, _ = read_structured_outputs(asked)
        try:
            text = json.dumps(asked)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"{FIELD}.{kind} is not JSON: {error}") from error
        name = (owner, hashlib.sha256(text.encode()).hexdigest())
        if (kept := self._find(name)) is None:
            kept = self._compile(asked, kind, leaving)
            self._keep(name, kept)
        if isinstance(kept.outcome, str):
            raise BadInput(kept.outcome)
        return kept.outcome.copy()

    def _compile(self, asked: Mapping[str, Any], kind: str, leaving: Leaving | None) -> "_Kept":
        """Raises BadInput for what another try may pass."""
        checked = self._check(asked, kind, leaving)
        if isinstance(checked, str):
            return _Kept(checked, LEAST_BYTES, time.monotonic() + REFUSED_SECONDS)
        matcher = run_with_stack(SPARE_STACK, lambda: self._compiler.open(checked))
        return _Kept(matcher, max(checked.size, LEAST_BYTES), math.inf)

    def _check(
        self, asked: Mapping[str, Any], kind: str, leaving: Leaving | None
    ) -> CheckedGrammar | str:
        """The grammar, or why it is refused. Raises BadInput where the check was not completed."""
        call = {"name": self._name, "asked": asked}
        if not self._is_prepared:
            self.prepare()
        try:
            for _ in range(TRIES):
                found = GRAMMAR_GUARD.call("check_grammar", call, CHECK_LIMITS, leaving)
                if found is not None:
                    break
                self.prepare()  # the guard was started anew, or has read another engine's tokenizer
            else:
                raise CallFailed("the process that checks it is busy with other engines")
        except CallExceeded as error:
            return f"{FIELD}.{kind} is refused: {error}"
        except CallFailed as error:
            # The process may have to start, which takes longer than a check.
            self._is_prepared = False
            raise BadInput(f"{FIELD}.{kind} is refused: {error}") from error
        return found["refusal"] if "refusal" in found else CheckedGrammar(**found)

    def has_made(self, matcher: GrammarMatcher) -> bool:
        """Whether the matcher is of this engine's tokenizer."""
        return self._compiler.has_made(matcher)

    def _find(self, name: tuple[int, str]) -> "_Kept | None":
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or kept.until < time.monotonic():
                return None
            self._kept.move_to_end(name)
            return kept

    def _keep(self, name: tuple[int, str], kept: "_Kept") -> None:
        """Forgets grammars of the owner with the most bytes, the least recently used first."""
        with self._lock:
            self._forget(name)
            self._kept[name] = kept
            self._bytes[name[0]] += kept.size
            while self._bytes.total() > KEPT_BYTES:
                ((largest, _),) = self._bytes.most_common(1)
                self._forget(next(one for one in self._kept if one[0] == largest))

    def _forget(self, name: tuple[int, str]) -> None:
        if kept := self._kept.pop(name, None):
            self._bytes[name[0]] -= kept.size


@dataclass(frozen=True)
class _Kept:
    """What came of a grammar.

    Attributes:
        outcome: its matcher, or why it is refused.
        size: bytes.
        until: monotonic seconds, after which it is compiled again: a busy machine may be why it took long.
    """

    outcome: GrammarMatcher | str
    size: int
    until: float
