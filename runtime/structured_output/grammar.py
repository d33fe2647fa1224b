"""Grammars of structured output: what a request asks for, compiled by llguidance within limits.

llguidance instead of xgrammar: it refuses keywords that it cannot follow (`not`, `if`, `contains`, `uniqueItems`),
which xgrammar 0.2.8 accepts and leaves out; it compiles a schema in 1 to 110 ms where xgrammar takes 20 to 690; and it
needs no torch. Its masks take longer, medians of 11 to 70 µs against 2 to 7 µs (151,000 tokens, 2 to 40 properties).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, gbnf_to_lark

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.runtime.structured_output.grammar_matcher import CompletionFinder, GrammarMatcher
from dflash_aot.runtime.structured_output.json_schema import (
    JSON_FORM,
    MAX_GRAMMAR_BYTES,
    check_schema,
)
from dflash_aot.runtime.text.tokenizer import PANIC

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


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Threads may share it.

    Args:
        tokenizer_json: the tokenizer of the target.
        vocab: tokens of the target's head, some of which the tokenizer may not have.
        ends: the end tokens, which a grammar allows where the answer may end.
    """

    def __init__(self, tokenizer_json: str, vocab: int, ends: Collection[int]):
        """Raises BadInput for a tokenizer that llguidance cannot read."""
        self._tokenizer = _read_tokenizer(tokenizer_json, vocab, ends)
        self._limits = LLParserLimits(**LIMITS)
        self._vocab, self._ends = vocab, frozenset(self._tokenizer.eos_tokens)
        self._finder = CompletionFinder(self._tokenizer, vocab)
        self._compile = lru_cache(maxsize=KEPT_GRAMMARS)(self._compile_grammar)

    def compile(self, asked: Mapping[str, Any]) -> GrammarMatcher:
        """The matcher of a new request. Raises BadInput for what is malformed, too large or not supported."""
        if flaw := check_structured_outputs(asked):
            raise BadInput(f"{FIELD}: {flaw}")
        ((kind, value),) = asked.items()
        try:
            written = _WRITERS[kind](value)
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


def _read_tokenizer(tokenizer_json: str, vocab: int, ends: Collection[int]) -> LLTokenizer:
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab, eos_token=sorted(ends) or None)
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


def _write_grammar(grammar: str) -> str:
    """Grammars are written as Lark, or as GBNF, which llama.cpp and vLLM use and which names its rules with `::=`."""
    _check_size("grammar", grammar)
    if "::=" not in grammar:
        return LLMatcher.grammar_from_lark(grammar)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark.gbnf_to_lark(grammar))
    except Exception as error:
        raise BadInput(f"{FIELD}.grammar is not GBNF: {quote_first_line(str(error))}") from error


def _write_choice(choices: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark(
        "start: " + _check_size("choice", " | ".join(map(json.dumps, choices)))
    )


_WRITERS: Mapping[str, Callable[[Any], str]] = {
    "json": _write_schema,
    "json_object": lambda _: _write_schema({"type": "object"}),
    "regex": lambda regex: LLMatcher.grammar_from_regex(_check_size("regex", regex)),
    "choice": _write_choice,
    "grammar": _write_grammar,
}
