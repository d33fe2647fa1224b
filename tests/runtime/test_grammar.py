"""Grammars and their matchers, over a tokenizer whose tokens are single bytes but for a few words."""

import json
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dflash_aot.cache.errors import BadInput, EngineFailed
from dflash_aot.runtime.bounded_worker import GRAMMAR_GUARD
from dflash_aot.runtime.structured_output.grammar import MAX_REPEATS, GrammarCache, GrammarCompiler
from dflash_aot.runtime.structured_output.grammar_matcher import MAX_REQUEST_STEPS, MAX_STEPS, CompletionFinder
from dflash_aot.runtime.structured_output.json_schema import MAX_CHAIN, MAX_DEPTH, MAX_GRAMMAR_BYTES
from dflash_aot.runtime.text.tokenizer import Tokenizer
from tests.runtime.tokenizer_kinds import (
    ADDED_TOKENS,
    metaspace,
    stripped_byte_fallback,
    with_added_tokens,
    word_pieces,
)

END, YES = 0, 1  # tokens with a meaning of their own
VOCAB = 300  # of the head: some of its rows have no token


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": END, "yes": YES, **{letter: number for number, letter in enumerate(letters, 2)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.add_special_tokens(["<end>"])
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return backend


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer(tokenizer), VOCAB, [END])


@pytest.fixture
def encode(tokenizer):
    return lambda text: tokenizer.encode(text).ids


def allowed(mask: np.ndarray) -> set[int]:
    """The tokens whose bits are set, read bit by bit."""
    return {token for token in range(VOCAB) if int(mask[token // 32]) & (1 << (token % 32))}


def test_mask_allows_what_the_grammar_does(compiler, encode):
    matcher = compiler.compile({"choice": ["yes", "yak", "no"]})
    _, masks = matcher.mask_block([])
    assert masks.shape == (1, 10) and allowed(masks[0]) == {YES, *encode("y"), *encode("n")}
    matcher.accept(encode("y")[0])
    assert allowed(matcher.mask_block([])[1][0]) == set(encode("ea"))
    for token in encode("ak"):
        assert not matcher.is_complete
        matcher.accept(token)
    assert matcher.is_complete


def test_end_token_is_allowed_only_at_an_end(compiler, encode):
    matcher = compiler.compile({"regex": "[0-9]{2,3}"})
    assert END not in allowed(matcher.mask_block([])[1][0])
    for digit in encode("12"):
        matcher.accept(digit)
    assert allowed(matcher.mask_block([])[1][0]) == {END, *encode("0123456789")}


def test_masks_follow_the_drafted_tokens(compiler, encode):
    matcher, drafted = compiler.compile({"regex": "ab[cd]e"}), encode("abde")
    block, masks = matcher.mask_block(drafted)
    assert block == drafted
    assert [allowed(mask) for mask in masks[:4]] == [set(encode(text)) for text in ("a", "b", "cd", "e")]
    assert allowed(masks[4]) == set(range(VOCAB)), "nothing follows a complete answer"
    assert allowed(matcher.mask_block([])[1][0]) == set(encode("a"))


def test_forced_tokens_replace_wrong_drafts(compiler, encode):
    matcher = compiler.compile(
        {"json": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}}
    )
    block, masks = matcher.mask_block(encode("?" * 9))
    assert block[:7] == encode('{"a": "') and block[7:] == encode("??")
    assert allowed(masks[7]) == set(encode("xy"))
    assert allowed(masks[8]) == set(range(VOCAB)), "nothing is forced after it"


def test_token_against_the_grammar_is_an_error(compiler, encode):
    with pytest.raises(EngineFailed, match="the grammar cannot be followed"):
        compiler.compile({"choice": ["no"]}).accept(encode("x")[0])


@pytest.mark.parametrize(
    ("grammar", "text"), [('start: "a" start "b" | "c"', "aacbb"), ('root ::= "a" root "b" | "c"', "acb")]
)
def test_grammars_are_lark_or_gbnf(compiler, encode, grammar, text):
    matcher = compiler.compile({"grammar": grammar})
    for token in encode(text):
        assert not matcher.is_complete
        matcher.accept(token)
    assert matcher.is_complete


def nest(depth: int) -> dict:
    return {"type": "object"} if depth == 1 else {"type": "array", "items": nest(depth - 1)}


def inside(schema: dict) -> dict:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def chain(length: int) -> dict:
    links = {str(at): {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(length)}
    return {**links, str(length): {"type": "string"}}


REFUSED = [
    ({}, "exactly one of json, json_object, regex, choice, grammar"),
    ({"regex": "a", "choice": ["a"]}, "exactly one of"),
    ({"xml": "a"}, "exactly one of"),
    ({"json": 1}, "json needs a JSON schema"),
    ({"json": "[1]"}, "holds a list: a JSON schema is an object"),
    ({"json": "{"}, "json is not JSON: Expecting property name"),
    ({"json": {"enum": {1, 2}}}, "json is not JSON: .*set"),
    ({"json": {"type": "thing"}}, r"structured_outputs\.json is refused: .*thing"),
    ({"json": inside({"not": {"pattern": "a+"}})}, r"refused: #/properties/a/not cannot be followed: .*'a\+'"),
    ({"json": {"$ref": "https://example.com/a"}}, "refused: .*other documents are not fetched"),
    ({"json": {"$ref": "#/$defs/a", "$defs": {}}}, r"#/\$ref refers to '#/\$defs/a', and there is no 'a' in #/\$defs"),
    ({"json": {"allOf": [{"type": "null"}, {"type": "string"}]}}, "refused: #: Unsatisfiable"),
    ({"json": inside({"pattern": "^(?!a)b$"})}, r"refused: #/properties/a: the pattern '\^\(\?!a\)b\$': look-around"),
    (
        {"json": {"$defs": {"x/y": inside({"pattern": "(a"})}, "$ref": "#/$defs/x~1y"}},
        r"#/\$defs/x~1y/properties/a: the",
    ),
    ({"json": {"patternProperties": {"a(?=b)": {}}}}, r"refused: #: the pattern 'a\(\?=b\)': look-around"),
    ({"json": inside({"oneOf": [{"type": "integer"}, {"type": "number"}]})}, "a/oneOf cannot .*: branches 0 and 1 may"),
    ({"json": {"type": "array", "uniqueItems": True}}, "refused: #/uniqueItems cannot be followed"),
    ({"json": {"minLength": "a"}}, "refused: #/minLength is .* a whole number of at least 0 is needed"),
    ({"json": {"type": "string", "format": "date", "pattern": "^2021-02-29$"}}, "refused: #: Unsatisfiable"),
    ({"json": {"type": "string", "format": "date-time", "pattern": "^1900-02-29"}}, "refused: #: Unsatisfiable"),
    ({"json": {"not": {}}}, "no document fulfils it"),
    ({"json": {"$ref": "#/$defs/0", "$defs": chain(MAX_CHAIN)}}, f"more than {MAX_CHAIN} levels deep through its ref"),
    ({"json": nest(MAX_DEPTH + 1)}, f"levels deep: at most {MAX_DEPTH}"),
    ({"json": "[" * 100_000}, f"has 100000 bytes: at most {MAX_GRAMMAR_BYTES}"),
    ({"json": {"const": "a" * MAX_GRAMMAR_BYTES}}, f"at most {MAX_GRAMMAR_BYTES}"),
    ({"json_object": False}, "json_object can be true only"),
    ({"choice": []}, "choice needs 1 to 1024 texts"),
    ({"choice": ["a", ""]}, "none of them empty"),
    ({"choice": "ab"}, "choice needs a list"),
    ({"regex": "("}, "regex is refused"),
    ({"regex": "a(?=b)"}, "regex is refused"),
    ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"at most {MAX_GRAMMAR_BYTES}"),
    ({"regex": ""}, "regex needs a text"),
    ({"regex": "a\ud800"}, "regex is refused"),
    ({"json": {"type": "number", "maximum": float("nan")}}, r"structured_outputs\.json is refused"),
    ({"grammar": "start: missing"}, "grammar is refused"),
    ({"regex": r"\?[?*]" + "a?" * (MAX_REPEATS + 1)}, f"{MAX_REPEATS + 1} repeats and .*: at most {MAX_REPEATS}"),
    ({"json": inside({"allOf": [{"pattern": "b*" * (MAX_REPEATS + 1)}]})}, f"json has .*: at most {MAX_REPEATS}"),
    ({"json": {"patternProperties": {"b*" * (MAX_REPEATS + 1): True}}}, f"at most {MAX_REPEATS} are"),
    ({"grammar": f"start: /{'a?' * (MAX_REPEATS + 1)}/"}, f"grammar has .*: at most {MAX_REPEATS}"),
    ({"grammar": "::="}, "grammar is"),
    ({"grammar": 'start: %json {"not": {"pattern": "a+"}} "b"'}, "grammar is refused: a schema: #/not cannot be"),
    ({"grammar": 'start: a "b"\na[max_tokens=3]: /[a-z]+/'}, "the attribute max_tokens is not supported"),
    ({"grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1}?\n" for n in range(600)) + 'r600: "a"'}, "more than 512 lev"),
]


def test_bad_grammars_are_refused_with_the_reason(compiler):
    for asked, message in REFUSED:
        with pytest.raises(BadInput, match=message):
            compiler.compile(asked)


TAGGED = [
    {"properties": {"kind": {"const": kind}, "n": {"type": "integer"}}, "required": ["kind"]} for kind in ("a", "b")
]
AN: dict = {"type": "object"}
OBJECT = {**AN, "additionalProperties": False, "properties": {"x": {}, "y": {}}}
# a schema, documents that it accepts, and others
FOLLOWED = [
    ({"uniqueItems": False, "propertyNames": {"type": "string"}, "format": "password", "type": "string"}, ["a"], [1]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": TAGGED[0], "b": TAGGED[1]}, **AN},
     [{"kind": "a", "n": 1}, {"kind": "b"}], [{"kind": "c"}, {"n": 1}]),
    ({"oneOf": [{"required": ["x"]}, {"required": ["y"]}], **OBJECT}, [{"x": 1}, {"y": 1}], [{}, {"x": 1, "y": 1}]),
    ({"oneOf": [{"minimum": 5}, {"maximum": 7}], "type": "integer"}, [4, 8], [5, 7]),
    ({"not": {"enum": ["no", "not", 1, None]}, "type": ["string", "integer"]}, ["n", "", "note", 2], ["no", "not", 1]),
    ({"not": {"type": ["string", "null"]}}, [1, {}], ["a", None]),
    ({"not": {"anyOf": [{"pattern": "^ab"}, {"minLength": 4}]}, "type": "string"}, ["", "ba"], ["ab", "abc", "wxyz"]),
    ({"if": {"required": ["x"]}, "then": {"required": ["y"]}, **OBJECT}, [{}, {"y": 1}, {"x": 1, "y": 1}], [{"x": 1}]),
    ({"dependentRequired": {"x": ["y"]}, **OBJECT}, [{}, {"y": 1}, {"x": 1, "y": 1}], [{"x": 1}]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"x": ["y"]}, **OBJECT}, [{}], [{"x": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{}, {"ab": 1}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}], [{"c": 1}]),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, [{"a": 1}, {"b": 1}], [{}]),
    ({"$ref": "#/$defs/list", "$defs": {"list": {"items": {"$ref": "#"}, "type": "array"}}}, [[[], []]], [1]),
    ({"$id": "https://example.com/x", "items": {"$ref": "x#a"}, "$defs": {"b": {"$anchor": "a", "type": "null"}}},
     [[None]], [[1]]),
    ({"$schema": "draft-04", "minimum": 1, "exclusiveMinimum": True, "type": "integer"}, [2], [1]),
    ({"type": "array", "items": [{"type": "null"}], "additionalItems": False}, [[], [None]], [[1], [None, None]]),
    ({"format": "date"}, ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-02-30"]),
    ({"format": "time"}, ["12:00:00Z", "23:59:60Z"], ["12:00:60Z", "24:00:00Z"]),
    ({"format": "hostname"}, ["a.b-c"], ["ab--c", "-a", "a" * 64]),
    ({"format": "json-pointer"}, ["", "/a~1"], ["a", "/~2"]),
    ({"format": "regex"}, ["a(b|[cd])*"], ["(", "\\a"]),
    ({"type": "string", "pattern": '^[^"]*$'}, ["a"], ['"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "accepted", "refused"), FOLLOWED)
def test_schemas_are_followed_as_they_mean(compiler, encode, schema, accepted, refused):
    for document in (*accepted, *refused):
        matcher = compiler.compile({"json": schema})._matcher
        text = encode(json.dumps(document))
        taken = matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
        assert taken == (document in accepted), document


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "(a{1,9999}){1,9999}"},
        {"regex": "(.*a){60}.{500}"},
        {"json": {"type": "string", "pattern": "^(a+)+$"}},
        {"json": {"type": "array", "minItems": 100_000, "items": {"type": "string", "maxLength": 100_000}}},
        {"json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
        {"json": {"anyOf": [{"type": "object", "properties": {f"a{n}": {"$ref": "#"}}} for n in range(500)]}},
        {"grammar": 'start: x x x x x\nx: y y y y y | \ny: start start start | "a"'},
    ],
    ids=["powers", "long", "nested", "sizes", "loop", "many", "ambiguous"],
)
def test_hostile_grammars_are_refused_or_followed_within_limits(compiler, encode, asked):
    """None ends in another exception, and none goes on for ever."""
    try:
        matcher = compiler.compile(asked)
        for _ in range(20):
            _, masks = matcher.mask_block(encode("aaaa"))
            if not (tokens := allowed(masks[0])) or matcher.is_complete:
                break
            matcher.accept(max(tokens))
    except (BadInput, EngineFailed) as error:
        assert "structured_outputs" in str(error) or "the grammar cannot be followed" in str(error)


EXPONENTIAL = [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(10, 40)]
BEYOND = [
    ({"json": {"allOf": EXPONENTIAL}}, "processor|of memory"),
    ({"json": {"oneOf": [{"const": number} for number in range(3600)]}}, "more than 1 s of processor time"),
    ({"regex": "a?" * (MAX_REPEATS // 2) + "b"}, "too many expressions"),
    ({"choice": ["".join(chr(97 + at * 7919 % 26) for at in range(60_000))]}, "masks of a round take"),
    ({"grammar": "start: " + " | ".join(f"/a{at}[a-z]*/" for at in range(3500))}, "is refused"),
    ({"regex": "(" * 30_000 + ")" * 30_000}, "is refused"),
]


@pytest.fixture(scope="module")
def cache(tokenizer) -> Iterator[GrammarCache]:
    yield GrammarCache(Tokenizer(tokenizer), VOCAB, [END])
    GRAMMAR_GUARD.close()


@pytest.mark.parametrize(("asked", "reason"), BEYOND)
def test_grammars_beyond_a_limit_are_refused_before_the_server_compiles_them(cache, asked, reason):
    with pytest.raises(BadInput, match=f"{reason}|no reply within"):  # on a busy machine
        cache.compile(asked)


def test_cached_grammars_start_anew_for_each_request(cache, encode):
    first, second = (cache.compile({"choice": ["yes", "no"]}) for _ in range(2))
    first.accept(YES)
    assert allowed(second.mask_block([])[1][0]) == {YES, *encode("yn")}


def test_grammars_of_one_owner_push_out_none_of_another(cache, monkeypatch):
    monkeypatch.setattr("dflash_aot.runtime.structured_output.grammar.KEPT_BYTES", most := 8 << 20)
    for owner, count in {1: 2, 2: 40}.items():
        for number in range(count):
            cache.compile({"choice": [f"{number}"]}, owner)
    assert [owner for owner, _ in cache._kept].count(1) == 2
    assert sum(kept.size for kept in cache._kept.values()) <= most


def test_guard_that_was_ended_is_started_again(cache):
    GRAMMAR_GUARD.close()
    assert cache.compile({"choice": ["after"]}).shortest


def test_answer_whose_masks_take_too_long_is_ended(compiler, encode, monkeypatch):
    monkeypatch.setattr("dflash_aot.runtime.structured_output.grammar_matcher.MAX_EXCESS_SECONDS", -1.0)
    with pytest.raises(EngineFailed, match=r"^structured_outputs: its masks take too long"):
        compiler.compile({"regex": "a+"}).accept(encode("a")[0])


class CountingFinder(CompletionFinder):
    """Counts the choices of its searches."""

    choices, most = 0, 0

    def find(self, matcher, most, budget):
        before = self.choices
        found = super().find(matcher, most, budget)
        self.most = max(self.most, self.choices - before)
        return found

    def _choose(self, matcher, chance, steps):
        self.choices += 1
        return super()._choose(matcher, chance, steps)


@pytest.mark.parametrize("regex", ["[a-z]{3000}", "[а-я]{100}"])
def test_searches_of_a_request_are_bounded_for_any_grammar(compiler, encode, regex, monkeypatch):
    """An answer that never takes the token of its completion, with room for several hundred tokens."""
    finder = CountingFinder(compiler._tokenizer, VOCAB)
    monkeypatch.setattr(compiler, "_finder", finder)
    matcher, letters = compiler.compile({"regex": regex}), encode("zyxw" if "z" in regex else "я")
    for taken in range(500):
        if matcher.is_complete or matcher.accept(letters[taken % len(letters)], 500 - taken) is not None:
            break
    assert finder.choices <= MAX_REQUEST_STEPS + 2 * MAX_STEPS and finder.most <= MAX_STEPS


@pytest.mark.parametrize(
    ("asked", "shortest"),
    [({"choice": ["no", "yes"]}, "yes"), ({"choice": ["yak", "no"]}, "no"), ({"regex": "yes"}, "yes")],
)
def test_shortest_answer_counts_tokens_not_characters(compiler, encode, asked, shortest):
    expected = [YES] if shortest == "yes" else encode(shortest)
    matcher = compiler.compile(asked)
    assert matcher.shortest == expected
    assert not matcher.needs_more(len(expected)) and matcher.needs_more(len(expected) - 1)


def test_limit_is_refused_only_where_proven_too_small(compiler):
    digits = compiler.compile({"regex": "yes{1,5}|[0-9]{3,9}[a-z]{60}"})
    assert not digits.needs_more(1), "yes is one token"
    letters = compiler.compile({"regex": "[a-z0-9]{9}"})
    assert len(letters.shortest) == 9 and letters.needs_more(0) and letters.needs_more(1)
    assert not letters.needs_more(8), "too many beginnings to try"


@pytest.mark.parametrize("kind", [metaspace, word_pieces])
def test_tokenizer_that_cannot_be_followed_is_refused(kind):
    backend = kind()
    with pytest.raises(BadInput, match="tokenizer of this target is neither byte-level BPE nor has byte fallback"):
        GrammarCompiler(Tokenizer(backend), backend.get_vocab_size(), [])


# -- tokenizers with added tokens


def follow(compiler: GrammarCompiler, tokenizer: Tokenizer, asked: dict, seed: int) -> str:
    """The text of a random answer. Each token that a mask allows is accepted, as its bytes in the detokenizer are."""
    chance, taken = random.Random(seed), []
    matcher = compiler.compile(asked)
    while not matcher.is_complete and len(taken) < 150:
        _, masks = matcher.mask_block([])
        tokens = [token for token in range(compiler._vocab) if int(masks[0][token // 32]) & (1 << (token % 32))]
        for token in chance.sample(tokens, min(len(tokens), 12)):
            assert matcher._matcher.deep_copy().consume_token(token)
            assert token in compiler._ends or tokenizer.token_bytes(token) or "<[" in str(asked)
        matcher.accept(chosen := chance.choice(tokens))
        taken += [] if chosen in compiler._ends else [chosen]
    return tokenizer.decode(taken)


@pytest.mark.parametrize("name", ADDED_TOKENS)
def test_what_a_mask_allows_is_accepted_for_added_tokens(name):
    backend = with_added_tokens(name)
    tokenizer, (special, plain) = Tokenizer(backend), ADDED_TOKENS[name]
    compiler = GrammarCompiler(tokenizer, backend.get_vocab_size() + 7, [backend.token_to_id(special[0])])
    for token in range(backend.get_vocab_size()):
        data = tokenizer.token_bytes(token)  # llguidance marks tokens without text by the byte 0xff
        assert compiler._tokenizer.decode_bytes([token]) == data.removeprefix(b"\xff")
    for seed, text in enumerate((*special, *plain)):
        escaped = re.sub(r"([][|])", r"\\\1", text)
        schema = {"type": "object", "properties": {text: {"enum": [text, "a"]}}, "required": [text]}
        forms = {
            "regex": (f"{escaped}[a-c]{{2}}", lambda found, text=text: found[:-2] == text),
            "choice": ([text * 2, f"a{text}"], lambda found, text=text: found in (text * 2, f"a{text}")),
            "json": ({**schema, "additionalProperties": False}, lambda found, text=text: text in json.loads(found)),
            "grammar": (f'start: {json.dumps(text)} "b"', lambda found, text=text: found == f"{text}b"),
        }
        for kind, (asked, is_followed) in forms.items():
            assert is_followed(follow(compiler, tokenizer, {kind: asked}, seed)), (kind, text)
    follow(compiler, tokenizer, {"regex": "(?s:.{9})"}, 1)


@pytest.mark.parametrize("name", ["Qwen3", "tool markers marked special"])
def test_marker_is_one_token_where_there_is_one(name):
    """As a text, and by the name or the number that Lark grammars give to tokens."""
    backend = with_added_tokens(name)
    tokenizer, marker = Tokenizer(backend), backend.token_to_id("<tool_call>")
    compiler = GrammarCompiler(tokenizer, backend.get_vocab_size(), [])
    for form in (
        {"choice": ["<tool_call>a"]},
        *({"grammar": f'start: {one} "a"'} for one in ("<tool_call>", f"<[{marker}]>")),
    ):
        matcher = compiler.compile(form)
        block, _ = matcher.mask_block([7, 7])
        assert block == [marker, backend.token_to_id("a")] and matcher.mask_block([7, 7])[0] == block
    assert tokenizer.decode([marker]) == "<tool_call>"


def test_sizes_of_tokenizer_and_head_may_differ(tokenizer):
    """Tokens beyond the head are never allowed; nor are ids that the tokenizer lacks."""
    size = tokenizer.get_vocab_size()
    for vocab in (size - 3, size + 40):
        compiler = GrammarCompiler(Tokenizer(tokenizer), vocab, [END, vocab + 3, -1])
        matcher = compiler.compile({"regex": "(?s:.*)"})
        _, masks = matcher.mask_block([])
        tokens = [token for token in range(vocab) if int(masks[0][token // 32]) & (1 << (token % 32))]
        assert END in tokens and max(tokens) < min(vocab, size) and matcher.ends == {END}


def test_tokenizer_that_puts_a_space_before_texts_is_followed():
    tokenizer = Tokenizer(backend := stripped_byte_fallback())
    compiler = GrammarCompiler(tokenizer, backend.get_vocab_size(), [])
    assert follow(compiler, tokenizer, {"choice": ["the cat"]}, 0) == "the cat"
