"""Grammars of structured output: what a request asks for, compiled by llguidance within limits.

llguidance instead of xgrammar: it refuses keywords that it cannot follow (`not`, `if`, `contains`, `uniqueItems`),
which xgrammar 0.2.8 accepts and leaves out; it compiles a schema in 1 to 110 ms where xgrammar takes 20 to 690; and it
needs no torch. Its masks take longer, medians of 11 to 70 µs against 2 to 7 µs (151,000 tokens, 2 to 40 properties).
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, gbnf_to_lark

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.runtime.structured_output.grammar_matcher import CompletionFinder, GrammarMatcher
from dflash_aot.runtime.structured_output.json_schema import (
    JSON_FORM,
    MAX_GRAMMAR_BYTES,
    check_schema,
)
from dflash_aot.runtime.text.tokenizer import PANIC, Tokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_CHOICES = 1024
KEPT_GRAMMARS = 64  # the latest, compiled: services send the same schema again and again
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


SPECIAL = b"\xff"  # llguidance's mark of a token without text, before its name
NO_TOKEN = 0xFFFF_FFFF
MAX_TOKEN_BYTES = 1000  # llguidance aborts at 1024
FALLBACK_BYTES = 32  # longest token in a text that the encoder cannot write
# In a Lark grammar: texts, regexes and comments; a token by its number or name.
LARK_TOKENS = re.compile(
    r""""(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//.*|(?P<token><(?:\[\d+\]|[^\s<>\[\]"]+)>)"""
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
        """Returns the tokens of a part of an answer: the encoder's, if they have the text's bytes. Never raises."""
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
        self._compile = lru_cache(maxsize=KEPT_GRAMMARS)(self._compile_grammar)

    def compile(self, asked: Mapping[str, Any]) -> GrammarMatcher:
        """The matcher of a new request. Raises BadInput for what is malformed, too large or not supported."""
        if flaw := check_structured_outputs(asked):
            raise BadInput(f"{FIELD}: {flaw}")
        ((kind, value),) = asked.items()
        try:
            written = (
                _write_grammar(value, self._texts) if kind == "grammar" else _WRITERS[kind](value)
            )
        except ValueError as error:
            # Half of a character that JSON and Python let pass, for example.
            raise BadInput(f"{FIELD}.{kind} is refused: {quote_first_line(str(error))}") from error
        matcher, shortest = self._compile(written, tuple(value) if kind == "choice" else ())
        if matcher.is_error():
            raise BadInput(f"{FIELD}.{kind} is refused: {quote_first_line(matcher.get_error())}")
        return GrammarMatcher(matcher.deep_copy(), self._vocab, self._finder, shortest, self._ends)

    def _compile_grammar(
        self, grammar: str, choices: Sequence[str]
    ) -> tuple[LLMatcher, Sequence[int] | None]:
        """The grammar, and the shortest answer that is found. Other threads go on: llguidance releases the GIL."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        return matcher, None if matcher.is_error() else self._finder.find_shortest(matcher, choices)


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


def _write_schema(given: str | Mapping[str, Any]) -> str:
    try:
        schema = json.loads(_check_size("json", given)) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{FIELD}.json is not JSON: {error}") from error
    check_schema(schema, f"{FIELD}.json")
    # As text, because llguidance takes no larger integer than 2^64 from a dict.
    return LLMatcher.grammar_from_json_schema(json.dumps(dict(schema)), overrides=JSON_FORM)


def _write_grammar(grammar: str, texts: Mapping[str, str]) -> str:
    """Grammars are written as Lark, or as GBNF, which llama.cpp and vLLM use and which names its rules with `::=`.

    texts: of tokens that have a text, by the names that Lark gives to tokens without a text.
    """
    _check_size("grammar", grammar)
    if "::=" in grammar:
        try:
            return LLMatcher.grammar_from_lark(gbnf_to_lark.gbnf_to_lark(grammar))
        except Exception as error:
            raise BadInput(
                f"{FIELD}.grammar is not GBNF: {quote_first_line(str(error))}"
            ) from error

    def write_token(found: re.Match[str]) -> str:
        text = texts.get(found["token"] or "")
        return found[0] if text is None else json.dumps(text)

    return LLMatcher.grammar_from_lark(LARK_TOKENS.sub(write_token, grammar))


def _write_choice(choices: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark(
        "start: " + _check_size("choice", " | ".join(map(json.dumps, choices)))
    )


_WRITERS: Mapping[str, Callable[[Any], str]] = {
    "json": _write_schema,
    "json_object": lambda _: _write_schema({"type": "object"}),
    "regex": lambda regex: LLMatcher.grammar_from_regex(_check_size("regex", regex)),
    "choice": _write_choice,
}
