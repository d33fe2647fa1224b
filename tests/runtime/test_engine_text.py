"""Text above token ids: what goes in, and what comes out."""

import pytest

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.text.tokenizer import Tokenizer

PROMPT = "def bundle"


@pytest.fixture(scope="module")
def engine(bundle, speaking_target):
    with Engine.open(bundle("tiny"), target=str(speaking_target)) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(speaking_target) -> Tokenizer:
    return Tokenizer.open(speaking_target)


@pytest.fixture(scope="module")
def tokens(engine, tokenizer) -> list[int]:
    """The answer up to the end of the grid."""
    return engine.generate(tokenizer.encode(PROMPT), SamplingParams(stop_token_ids=())).token_ids


def test_text_and_its_token_ids_give_the_same_answer(engine, tokenizer, tokens):
    result = engine.generate(PROMPT, SamplingParams(stop_token_ids=()))
    assert result.token_ids == tokens
    assert result.prompt_tokens == len(tokenizer.encode(PROMPT)) > 1
    assert result.text == tokenizer.decode(tokens) != ""


@pytest.mark.parametrize(("prompt", "words"), [("", "prompt is empty"), ("\ud800", "UTF-8")])
def test_empty_text_is_refused(engine, prompt, words):
    with pytest.raises(BadInput, match=words):
        engine.generate(prompt)
