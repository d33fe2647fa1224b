"""What is asked: files, published sets from rows made by hand, and the held-out texts."""

import json

import datasets
import pytest

from dflash_aot.benchmarks.questions import (
    HELD_OUT,
    HELD_OUT_FILE,
    SOURCES,
    Question,
    choose_questions,
    load_questions,
)
from dflash_aot.cache.errors import BadInput

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture
def lines(tmp_path):
    """Lines → a file of them."""

    def write(*written: object) -> str:
        path = tmp_path / "asked.jsonl"
        path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in written))
        return str(path)

    return write


def test_a_file_asks_what_its_lines_say(lines):
    path = lines({"turns": ["Hello", "Again"], "id": 7}, "", {"text": "import os"})
    asked = [Question(turns=("Hello", "Again")), Question(text="import os")]
    assert load_questions(path) == asked
    assert load_questions(path, 1) == asked[:1]


@pytest.mark.parametrize(
    "line",
    [{"turns": []}, {"turns": ["", "b"]}, {"turns": "Hello"}, {"text": ""}, {"text": "a", "turns": ["b"]}, {}, "{"],
)
def test_a_line_that_asks_nothing_is_refused(lines, line):
    with pytest.raises(BadInput, match=r"asked\.jsonl, line 2"):
        load_questions(lines({"text": "fine"}, line))


def test_a_name_that_is_nothing_is_refused():
    with pytest.raises(BadInput, match="gsm9k: no such file, and no name of held-out, gsm8k"):
        load_questions("gsm9k")


def test_more_than_there_are_is_refused(lines):
    with pytest.raises(BadInput, match=r"--count 3: there are 2"):
        load_questions(lines({"text": "a"}, {"text": "b"}), 3)


# -- published sets


@pytest.mark.parametrize(
    ("name", "row", "turns"),
    [
        ("gsm8k", {"question": "How many {x}?", "answer": "4"}, [f"How many {{x}}?{BOXED}"]),
        ("math500", {"problem": "$1+1$"}, [f"$1+1${BOXED}"]),
        ("aime24", {"problem": "$1+1$"}, [f"$1+1${BOXED}"]),
        ("aime25", {"problem": "$1+1$"}, [f"$1+1${BOXED}"]),
        (
            "humaneval",
            {"prompt": "def f():\n"},
            [
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\ndef f():\n\n```"
            ],
        ),
        ("mbpp", {"prompt": "Write f.", "code": "def f(): ..."}, ["Write f."]),
        ("mt-bench", {"prompt": ["First?", "Then?"]}, ["First?", "Then?"]),
        ("alpaca", {"instruction": "Add.", "input": "1 2"}, ["Add.\n\nInput:\n1 2"]),
        ("alpaca", {"instruction": "Sing.", "input": ""}, ["Sing."]),
    ],
)
def test_a_row_is_asked_as_published(name, row, turns):
    assert choose_questions([row], SOURCES[name], None) == [Question(turns=tuple(turns))]


def test_as_many_are_asked_as_published():
    limits = {name: source.limit for name, source in SOURCES.items()}
    assert limits == {
        **dict.fromkeys(("gsm8k", "math500", "mbpp", "alpaca"), 128),
        **dict.fromkeys(("aime24", "aime25"), 30),
        "humaneval": 164,
        "mt-bench": 80,
    }


def test_they_are_those_that_datasets_chooses():
    rows = datasets.Dataset.from_list([{"question": f"{number}?"} for number in range(1000)])
    chosen = [f"{question}{BOXED}" for question in rows.shuffle(seed=0).select(range(128))["question"]]
    asked = choose_questions(rows, SOURCES["gsm8k"], None)
    assert [question.turns[0] for question in asked] == chosen
    assert choose_questions(rows, SOURCES["gsm8k"], 5) == asked[:5]


def test_a_set_that_is_asked_whole_keeps_its_order():
    rows = [{"prompt": [f"{number}?"]} for number in range(80)]
    asked = choose_questions(rows, SOURCES["mt-bench"], None)
    assert [question.turns[0] for question in asked] == [row["prompt"][0] for row in rows]


# -- held out


@pytest.fixture(scope="module")
def held_out() -> list[dict]:
    return [json.loads(line) for line in HELD_OUT_FILE.read_text().splitlines()]


def test_the_held_out_texts_are_loaded_by_their_name(held_out):
    assert [question.text for question in load_questions(HELD_OUT)] == [line["text"] for line in held_out]
    assert len({line["text"] for line in held_out}) == len(held_out) == 64


def test_no_held_out_text_is_of_a_file_that_was_trained_on(held_out, corpus):
    assert [line["source"] for line in held_out if not corpus.is_held_out(corpus.Path(line["source"]))] == []
    trained = corpus.read_split(held_out=False)
    assert [line["source"] for line in held_out if any(line["text"][:140] in text for text in trained)] == []


def test_a_text_that_was_trained_on_would_be_found(corpus):
    trained = corpus.read_split(held_out=False)
    text = max(trained, key=len)
    assert any(text[1000:1140] in one for one in trained)
