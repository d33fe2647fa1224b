"""Structured output in the engine: every answer follows its grammar, with drafts the same as without."""

import json
import re
from typing import Any

import jax
import numpy as np
import pytest

from dflash_aot.cache.errors import BadInput, GridMiss
from dflash_aot.compile.programs.sampling import read_mask
from dflash_aot.runtime import Engine, SamplingParams

KS = (0, 7)
VOCAB = 1024
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "json text": {"json": json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4})},
    "regex": {"regex": "[0-9]{3}-[a-z]{2,4}"},
    "choice": {"choice": ["yes", "no", "maybe so"]},
    "grammar": {"grammar": 'start: "x" start "y" | "z"'},
}


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.open(bundle("served")) as engine:
        yield engine
        assert (engine.stats().compile_events, engine.stats().failures) == (0, 0)


def follows(asked: dict[str, Any], text: str) -> bool:
    """By other means than the engine's."""
    match asked:
        case {"json": dict()}:
            person = json.loads(text)
            assert list(person) == ["name", "age", "tags"] and len(person["name"]) <= 12
            return 0 <= person["age"] <= 120 and set(person["tags"]) <= {"red", "green", "blue"}
        case {"json": _}:
            values = json.loads(text)
            return 2 <= len(values) <= 4 and all(type(one) is bool for one in values)
        case {"regex": regex}:
            return re.fullmatch(regex, text) is not None
        case {"choice": choices}:
            return text in choices
    return re.fullmatch("(x*)z(y*)", text) is not None and text.count("x") == text.count("y")


@pytest.mark.parametrize(
    ("form", "temperature"),
    [("json", 0.0), ("json", 1.5), ("json text", 1.5), ("regex", 0.0), ("choice", 1.5), ("grammar", 0.0)],
)
def test_answers_follow_their_grammar_at_every_k(engine, form, temperature):
    params = {"max_tokens": 100, "temperature": temperature, "seed": 4, "structured_outputs": FORMS[form]}
    plain, drafted = (engine.generate("Once upon", SamplingParams(**params, k=k)) for k in KS)
    assert plain.finish_reason == "stop" and follows(FORMS[form], plain.text)
    assert (plain.token_ids, plain.text) == (drafted.token_ids, drafted.text)


def test_forced_tokens_need_no_draft_of_the_model(engine):
    long = "all that follows here is given " * 8
    result = engine.generate("a", SamplingParams(structured_outputs={"choice": [long]}, k=7))
    assert result.text == long and len(result.accepted) <= len(result.token_ids) / 7


NESTED = {
    "$ref": "#/$defs/part",
    "$defs": {
        "part": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "format": "date-time"},
                "mail": {"type": "string", "format": "email"},
                "size": {"type": "number"},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
            },
            "required": ["size", "parts"],
        }
    },
}


def is_part(document: Any) -> bool:
    mail, at = document.get("mail", "a@b.c"), document.get("at", "2000-01-01T00:00:00Z")
    own = isinstance(document["size"], int | float) and "@" in mail and re.match(r"\d{4}-\d\d-\d\d[Tt]", at)
    return bool(own) and all(map(is_part, document["parts"]))


def test_document_cut_by_max_tokens_follows_its_schema(engine):
    """With every budget from the least one on, the same for every K."""
    form = {"temperature": 1.5, "seed": 1, "structured_outputs": {"json": NESTED}}
    with pytest.raises(BadInput, match=r"the shortest answer found for this form has \d+ tokens") as refused:
        engine.generate("a", SamplingParams(**form, max_tokens=1))
    least, cut = int(re.search(r"has (\d+) tokens", str(refused.value))[1]), 0
    for budget in (least, least + 1, least + 5, least + 14, least + 40):
        results = [engine.generate("a", SamplingParams(**form, max_tokens=budget, k=k)) for k in KS]
        assert results[0].token_ids == results[1].token_ids and len(results[0].token_ids) <= budget
        assert is_part(json.loads(results[0].text))
        cut += results[0].finish_reason == "length"
    assert cut >= 2


def test_completion_of_a_cut_answer_has_no_logprobs(engine):
    """The target would never end, because every token with a closing bracket is banned."""
    banned = {token: -100.0 for token in range(VOCAB) if b")" in engine.tokenizer.token_bytes(token)}
    form = {"regex": "\\([a-z ]*\\)"}
    result = engine.generate("a", SamplingParams(structured_outputs=form, max_tokens=40, logit_bias=banned, logprobs=0))
    assert (result.finish_reason, len(result.token_ids)) == ("length", 40) and re.fullmatch(form["regex"], result.text)
    chosen = [score.token_id for score in result.logprobs]
    assert 20 < len(chosen) < 40 and chosen == result.token_ids[: len(chosen)]


def test_compiled_grammar_needs_its_form(engine):
    with pytest.raises(BadInput, match="grammar is given without structured_outputs"):
        engine.generate([5], grammar=engine.compile_grammar({"regex": "[a-z]+"}))


def test_bundle_without_constrained_executables_refuses_with_the_command(bundle, speaking_target):
    words = "only greedy .* needs constrained executables: structured_outputs.*--sampling greedy,constrain"
    with Engine.open(bundle("tied"), target=speaking_target) as engine, pytest.raises(GridMiss, match=words):
        engine.generate("a", SamplingParams(structured_outputs=FORMS["json"]))


@pytest.mark.parametrize(("first", "count"), [(0, 70), (35, 35)])
def test_read_mask_finds_bits_of_a_vocabulary_part(first, count):
    rng = np.random.default_rng(0)
    words = rng.integers(-(1 << 31), 1 << 31, (2, 3, 3)).astype(np.int32)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    tokens = np.arange(first, first + count, dtype=np.int32)
    assert np.array_equal(jax.jit(read_mask)(words, tokens), bits[..., first : first + count])


def test_no_token_before_min_tokens_ends_the_answer(engine):
    """A bias against the stop token, as long as there is min_tokens, gives the same text a step at a time."""
    params: dict[str, Any] = {"temperature": 0.9, "seed": 3}
    prompt = engine.tokenizer.encode("import os\n\nclass ")
    free = engine.generate(prompt, SamplingParams(**params, max_tokens=24, ignore_eos=True)).token_ids
    stop, least = free[2], 9
    stopped = {**params, "stop_token_ids": [stop]}
    assert len(engine.generate(prompt, SamplingParams(**stopped)).token_ids) <= 3
    begin = engine.generate(prompt, SamplingParams(**stopped, max_tokens=least, logit_bias={stop: -100.0})).token_ids
    for k in KS:
        result = engine.generate(prompt, SamplingParams(**stopped, min_tokens=least, max_tokens=40, k=k))
        assert result.token_ids[:least] == begin and stop not in result.token_ids[:-1]
        rest = engine.generate([*prompt, *begin], SamplingParams(**stopped, max_tokens=40 - least)).token_ids
        assert result.token_ids[least:] == rest


def test_min_tokens_without_stop_tokens_needs_no_mask(bundle, speaking_target):
    """A bundle of greedy executables serves it: only stop texts are looked for later."""
    with Engine.open(bundle("tied"), target=speaking_target, k=7) as engine:
        text = engine.generate("import os", SamplingParams(max_tokens=30, ignore_eos=True)).text
        early, later = text[3:6], len(engine.tokenizer.encode(text[:8]))
        params = {"max_tokens": 30, "ignore_eos": True, "stop": [early]}
        assert engine.generate("import os", SamplingParams(**params)).text == text[: text.index(early)]
        assert len(engine.generate("import os", SamplingParams(**params, min_tokens=later)).text) > len(text[:6])
        with pytest.raises(GridMiss, match="min_tokens.*--sampling greedy,constrain"):
            engine.generate("import os", SamplingParams(min_tokens=2))


def test_min_tokens_that_cannot_come_are_refused(engine):
    with pytest.raises(BadInput, match="min_tokens is 5, and max_tokens only 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(GridMiss, match="length=1001"):
        engine.generate([1, 2], SamplingParams(min_tokens=1000))
