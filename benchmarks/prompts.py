"""Prompts of benchmarks: questions of a file or a published data set, as text and as token ids; `dflash-bench data`.

Names, prompts, limits and the choice of samples of the published sets are those of https://github.com/z-lab/dflash
(dflash/benchmark.py, and run_benchmark.sh and model/utils.py of the version that the paper's tables come from).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dflash_aot.benchmarks.messages import PromptIds
from dflash_aot.benchmarks.record import setting
from dflash_aot.benchmarks.tables import percentile
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.files.atomic_files import check_output, write_atomically
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.runtime.text.chat_template import render_chat
from dflash_aot.runtime.text.tokenizer import Tokenizer

HELD_OUT = "held-out"
HELD_OUT_FILE = Path(__file__).parent / "held_out.jsonl"
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
PASS_TESTS = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n%s\n```"
SHOWN = 600  # characters of the first prompt that `dflash-bench data` shows
DatasetRow = Mapping[str, Any]


class Question(msgspec.Struct, frozen=True):
    """`turns` of the user in a conversation, or a `text` to continue."""

    turns: tuple[str, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if bool(self.turns) == bool(self.text) or not all(self.turns):
            raise ValueError('give "turns", none of them empty, or "text"')


def format_alpaca(row: DatasetRow) -> str:
    """An instruction, with its input if there is any."""
    return f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]


@dataclass(frozen=True)
class PublishedSet:
    """A data set on the hub."""

    repository: str
    subset: str | None
    split: str
    limit: int  # rows that the published figures use
    turns: Callable[[DatasetRow], Sequence[str]]  # the user's turns of a row


PUBLISHED_SETS = {
    "gsm8k": PublishedSet(
        "openai/gsm8k", "main", "test", 128, lambda row: [row["question"] + STEP_BY_STEP]
    ),
    "math500": PublishedSet(
        "HuggingFaceH4/MATH-500", None, "test", 128, lambda row: [row["problem"] + STEP_BY_STEP]
    ),
    "aime24": PublishedSet(
        "HuggingFaceH4/aime_2024", None, "train", 30, lambda row: [row["problem"] + STEP_BY_STEP]
    ),
    "aime25": PublishedSet(
        "MathArena/aime_2025", None, "train", 30, lambda row: [row["problem"] + STEP_BY_STEP]
    ),
    "humaneval": PublishedSet(
        "openai/openai_humaneval", None, "test", 164, lambda row: [PASS_TESTS % row["prompt"]]
    ),
    "mbpp": PublishedSet(
        "google-research-datasets/mbpp", "sanitized", "test", 128, lambda row: [row["prompt"]]
    ),
    "mt-bench": PublishedSet(
        "HuggingFaceH4/mt_bench_prompts", None, "train", 80, lambda row: row["prompt"]
    ),
    "alpaca": PublishedSet(
        "tatsu-lab/alpaca", None, "train", 128, lambda row: [format_alpaca(row)]
    ),
}


def load_questions(name: str, count: int | None = None) -> list[Question]:
    """Questions of `held-out`, of PUBLISHED_SETS, or of a file of JSON lines.

    count: default is the published number, or all of a file. Raises BadInput for an unknown name, an invalid line, too
    few lines, and a hub that cannot be reached.
    """
    if name in PUBLISHED_SETS:
        return choose_questions(_load_rows(name), PUBLISHED_SETS[name], count)
    path = HELD_OUT_FILE if name == HELD_OUT else Path(name)
    if not path.is_file():
        raise BadInput(
            f"--data {name}: no such file, and none of {', '.join((HELD_OUT, *PUBLISHED_SETS))}"
        )
    questions = list(read_lines(path))
    return questions[: _check_count(name, len(questions), count)]


def read_lines(path: Path) -> Iterator[Question]:
    """Lines {"turns": [...]} or {"text": ...}; other fields are ignored. Raises BadInput."""
    decoder = msgspec.json.Decoder(Question)
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BadInput(f"{path}, line {number}: {error}") from error


def choose_questions(
    rows: Sequence[DatasetRow], source: PublishedSet, count: int | None
) -> list[Question]:
    """The published choice: the first rows after the shuffle of `datasets` with seed 0, if not all are wanted."""
    wanted = _check_count(source.repository, len(rows), count, min(source.limit, len(rows)))
    order = (
        np.random.default_rng(0).permutation(len(rows)) if wanted < len(rows) else range(len(rows))
    )
    return [Question(turns=tuple(source.turns(rows[int(place)]))) for place in order[:wanted]]


def _check_count(name: str, there: int, count: int | None, usual: int | None = None) -> int:
    if count is not None and count > there:
        raise BadInput(f"--count {count}: there are {there} in {name}")
    return count or usual or there


def _load_rows(name: str) -> Sequence[DatasetRow]:
    try:
        import datasets  # noqa: PLC0415  seconds, and an extra
    except ImportError as error:
        raise BadInput(
            f"--data {name} needs the package datasets: pip install 'dflash-aot[bench]'"
        ) from error
    source = PUBLISHED_SETS[name]
    try:
        return datasets.load_dataset(source.repository, source.subset, split=source.split)
    except Exception as error:  # of the network, the hub or several libraries
        raise BadInput(
            f"--data {name}: {source.repository} cannot be loaded: {type(error).__name__}: {error}. Without a network "
            'give a file: --data FILE.jsonl, in each line {"turns": ["…"]}'
        ) from error


def load_prompts(
    name: str,
    count: int | None,
    target: Path,
    width: int | None = None,
    answer: Callable[[PromptIds], list[int]] | None = None,
) -> list[PromptIds]:
    """One prompt per question, tokenized for the target in that directory.

    Of a text, the first `width` tokens. Of a conversation, the first turn; with `answer`, which generates answers, all
    turns, each after the answers to the earlier turns. Raises BadInput, BadCheckpoint, and what `answer` raises.
    """
    tokenizer = Tokenizer.open(target)
    prompts = []
    for question in load_questions(name, count):
        prompts.append(encode_turn(question, (), target, tokenizer, width))
        answers: list[str] = []
        while answer and len(answers) + 1 < len(question.turns):
            answers.append(tokenizer.decode(answer(prompts[-1])))
            prompts.append(encode_turn(question, answers, target, tokenizer))
    return prompts


def encode_turn(
    question: Question,
    answers: Sequence[str],
    target: Path,
    tokenizer: Tokenizer,
    width: int | None = None,
) -> PromptIds:
    """The turn after so many answers: the conversation in the target's chat template, thinking off.

    A text is its own only turn: all of it, or its first `width` tokens. Raises BadInput for a shorter text.
    """
    if question.turns:
        turns = question.turns[: len(answers) + 1]
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": turn},
            ]
        # The template has written all special tokens itself.
        return tokenizer.encode(render_chat(target, messages), add_special_tokens=False)
    prompt = tokenizer.encode(question.text)
    if width is not None and len(prompt) < width:
        raise BadInput(
            f"the text {question.text[:40]!r} … has {len(prompt)} tokens, and a prompt has {width}"
        )
    return prompt[:width]


@dataclass(frozen=True)
class DataSettings:
    """Flags of `dflash-bench data`."""

    data: str = setting(
        HELD_OUT,
        f"{HELD_OUT}, {', '.join(PUBLISHED_SETS)}, or a file of JSON lines with turns or text",
    )
    count: int | None = setting(
        None, "number of questions; default: as published, and all of a file", least=1
    )
    target: str = setting(
        EMBEDDED, "the target whose tokenizer and chat template are used: directory or hub id"
    )
    jsonl: str | None = setting(
        None, "a file to write the questions to, in the format that --data reads"
    )


def format_data(settings: DataSettings) -> list[str]:
    """Lines: the number of questions, their lengths in tokens, and the first one, indented."""
    questions = load_questions(settings.data, settings.count)
    target = locate_checkpoint(settings.target, "target")
    if settings.jsonl:
        check_output("--jsonl", settings.jsonl, {"--data": settings.data})
        lines = ({"turns": one.turns} if one.turns else {"text": one.text} for one in questions)
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_atomically(Path(settings.jsonl), content.encode())
    tokenizer = Tokenizer.open(target)
    prompts = [encode_turn(question, (), target, tokenizer) for question in questions]
    lengths = [len(prompt) for prompt in prompts]
    turns = sum(max(1, len(question.turns)) for question in questions)
    text = tokenizer.decode(prompts[0])
    return [
        f"{settings.data}: {len(questions)} prompts of {turns} turns; tokens of the first turns: "
        f"{min(lengths)} to {max(lengths)}, median {percentile(lengths, 50):.0f}, together {sum(lengths)}",
        "",
        *(f"  {line}" for line in f"{text[:SHOWN]}{' …' if len(text) > SHOWN else ''}".split("\n")),
    ]
