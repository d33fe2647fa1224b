"""What a model is asked: lines of a file, or a published set by its name, as z-lab's benchmark asks them.

Names, prompts, limits and the choice of samples are those of https://github.com/z-lab/dflash (dflash/benchmark.py, and
run_benchmark.sh and model/utils.py of the version that the paper's tables were made with).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dflash_aot.cache.errors import BadInput

HELD_OUT = "held-out"
HELD_OUT_FILE = Path(__file__).parent / "held_out.jsonl"
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
PASS_TESTS = "Write a solution to the following problem and make sure that it passes the tests:\n"
Row = Mapping[str, Any]


class Question(msgspec.Struct, frozen=True):
    """`turns` of a conversation, or a `text` to be continued as it stands."""

    turns: tuple[str, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if bool(self.turns) == bool(self.text) or not all(self.turns):
            raise ValueError('give "turns", none of them empty, or "text"')


@dataclass(frozen=True)
class Source:
    """A set on the hub: where it is, how many of it are asked, and what a row of it asks."""

    repository: str
    subset: str | None
    split: str
    limit: int
    turns: Callable[[Row], Sequence[str]]


SOURCES = {
    "gsm8k": Source("openai/gsm8k", "main", "test", 128, lambda row: [row["question"] + STEP_BY_STEP]),
    "math500": Source("HuggingFaceH4/MATH-500", None, "test", 128, lambda row: [row["problem"] + STEP_BY_STEP]),
    "aime24": Source("HuggingFaceH4/aime_2024", None, "train", 30, lambda row: [row["problem"] + STEP_BY_STEP]),
    "aime25": Source("MathArena/aime_2025", None, "train", 30, lambda row: [row["problem"] + STEP_BY_STEP]),
    "humaneval": Source(
        "openai/openai_humaneval", None, "test", 164, lambda row: [f"{PASS_TESTS}```python\n{row['prompt']}\n```"]
    ),
    "mbpp": Source("google-research-datasets/mbpp", "sanitized", "test", 128, lambda row: [row["prompt"]]),
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", None, "train", 80, lambda row: row["prompt"]),
    "alpaca": Source(
        "tatsu-lab/alpaca",
        None,
        "train",
        128,
        lambda row: [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]],
    ),
}


def load_questions(name: str, count: int | None = None) -> list[Question]:
    """`held-out`, a name of SOURCES, or a file of JSON lines; `count` of them, or as many as published, or all.

    Raises BadInput for a name or a line that cannot be used, for too few lines, and where the hub cannot be reached.
    """
    if name in SOURCES:
        return choose_questions(_load_rows(name), SOURCES[name], count)
    path = HELD_OUT_FILE if name == HELD_OUT else Path(name)
    if not path.is_file():
        raise BadInput(f"--data {name}: no such file, and no name of {', '.join((HELD_OUT, *SOURCES))}")
    questions = list(read_lines(path))
    return questions[: _check_count(name, len(questions), count)]


def read_lines(path: Path) -> Iterator[Question]:
    """{"turns": [...]} or {"text": ...}; whatever else a line holds is not read. Raises BadInput."""
    decoder = msgspec.json.Decoder(Question)
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BadInput(f"{path}, line {number}: {error}") from error


def choose_questions(rows: Sequence[Row], source: Source, count: int | None) -> list[Question]:
    """The published choice: the first ones behind a shuffle, where there are more than are asked.

    As `datasets` shuffles with seed 0, so that the samples are those of the published figures.
    """
    wanted = _check_count(source.repository, len(rows), count, min(source.limit, len(rows)))
    order = np.random.default_rng(0).permutation(len(rows)) if wanted < len(rows) else range(len(rows))
    return [Question(turns=tuple(source.turns(rows[int(place)]))) for place in order[:wanted]]


def _check_count(name: str, there: int, count: int | None, usual: int | None = None) -> int:
    if count is not None and count > there:
        raise BadInput(f"--count {count}: there are {there} in {name}")
    return count or usual or there


def _load_rows(name: str) -> Sequence[Row]:
    try:
        import datasets  # noqa: PLC0415  seconds, and an extra
    except ImportError as error:
        raise BadInput(f"--data {name} needs the package datasets: pip install 'dflash-aot[bench]'") from error
    source = SOURCES[name]
    try:
        return datasets.load_dataset(source.repository, source.subset, split=source.split)
    except Exception as error:  # of the network, of the hub, of several libraries beneath
        raise BadInput(
            f"--data {name}: {source.repository} cannot be loaded: {type(error).__name__}: {error}. Without a network "
            'give a file: --data FILE.jsonl, in each line {"turns": ["…"]}'
        ) from error
