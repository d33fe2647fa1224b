"""Questions as token ids, with the embedded pair's tokenizer and template."""

import json
import shutil
from pathlib import Path

import pytest

from dflash_aot.benchmarks.prompts import encode_turn, load_prompts
from dflash_aot.benchmarks.questions import HELD_OUT, Question
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.locations import EMBEDDED, locate_checkpoint
from dflash_aot.runtime.text.tokenizer import Tokenizer

TARGET = locate_checkpoint(EMBEDDED, "target")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(TARGET)


def test_a_text_is_asked_as_it_stands_or_from_its_beginning(tokenizer):
    whole = tokenizer.encode("import os\nimport sys\n")
    assert encode_turn(Question(text="import os\nimport sys\n"), (), TARGET, tokenizer) == whole
    assert encode_turn(Question(text="import os\nimport sys\n"), (), TARGET, tokenizer, 3) == whole[:3]


def test_a_text_that_is_too_short_is_refused(tokenizer):
    with pytest.raises(BadInput, match=r"500 tokens .* 'import os' … has"):
        encode_turn(Question(text="import os"), (), TARGET, tokenizer, 500)


def test_turns_are_a_conversation_with_its_answers(tokenizer):
    question = Question(turns=("One?", "Two?", "Three?"))

    def rendered(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    first = "<|im_start|>user\nOne?<|im_end|>\n"
    ask = "<|im_start|>assistant\n"
    assert encode_turn(question, (), TARGET, tokenizer) == rendered(first + ask)
    second = f"{first}{ask}1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n{ask}"
    assert encode_turn(question, ("1",), TARGET, tokenizer) == rendered(second)


def test_every_turn_is_asked_behind_the_answers_to_those_before(tokenizer, tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"turns": ["One?", "Two?", "Three?"]}\n{"text": "import os"}\n')
    answers = {"One?": "1", "Two?": "2"}
    asked: list[list[int]] = []

    def answer(prompt: list[int]) -> list[int]:
        asked.append(prompt)
        return tokenizer.encode(answers[tokenizer.decode(prompt).split("user\n")[-1].splitlines()[0]])

    prompts = load_prompts(str(path), None, TARGET, None, answer)
    question = Question(turns=("One?", "Two?", "Three?"))
    turns = [encode_turn(question, said, TARGET, tokenizer) for said in ((), ("1",), ("1", "2"))]
    assert prompts == [*turns, tokenizer.encode("import os")]
    assert asked == turns[:2]
    assert load_prompts(str(path), None, TARGET) == [turns[0], prompts[-1]]


def test_special_tokens_stand_where_the_template_writes_them_and_before_a_text(tmp_path):
    """With a tokenizer that puts one before whatever it encodes."""
    target = Path(shutil.copytree(TARGET, tmp_path / "target"))
    facts = json.loads((target / "tokenizer.json").read_text())
    end = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    before = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    facts["post_processor"] = {
        **{"type": "TemplateProcessing", "single": before, "pair": before},
        "special_tokens": {"<|endoftext|>": end},
    }
    (target / "tokenizer.json").write_text(json.dumps(facts))
    tokenizer = Tokenizer.open(target)
    assert encode_turn(Question(text="import os"), (), target, tokenizer)[0] == 0
    assert 0 not in encode_turn(Question(turns=("One?",)), (), target, tokenizer)


def test_held_out_prompts_are_as_long_as_asked_for():
    short, long = (load_prompts(HELD_OUT, 64, TARGET, width) for width in (64, 512))
    assert len(short) == 64 and {len(prompt) for prompt in short} == {64}
    assert {len(prompt) for prompt in long} == {512}
    assert [prompt[:64] for prompt in long] == short
