"""What `--data` means, to look at it, and to take it to where there is no network."""

import json
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.benchmarks.estimates import percentile
from dflash_aot.benchmarks.prompts import encode_turn
from dflash_aot.benchmarks.questions import HELD_OUT, SOURCES, Question, load_questions
from dflash_aot.benchmarks.settings import setting
from dflash_aot.cache.bundle.atomic_files import write_atomically
from dflash_aot.cache.locations import EMBEDDED, locate_checkpoint
from dflash_aot.runtime.text.tokenizer import Tokenizer

SHOWN = 600  # characters of the first prompt


@dataclass(frozen=True)
class Settings:
    """Which questions, and whose tokens."""

    data: str = setting(HELD_OUT, f"{HELD_OUT}, {', '.join(SOURCES)}, or a file of JSON lines with turns or text")
    count: int | None = setting(None, "so many of them; default: as published, and all of a file", least=1)
    target: str = setting(EMBEDDED, "the target whose tokenizer and chat template are used: directory or hub id")
    jsonl: str | None = setting(None, "a file to write them to, as --data takes it")


def show(settings: Settings) -> str:
    """How many, how long in tokens, and the first one. Raises BadInput, BadCheckpoint."""
    questions = load_questions(settings.data, settings.count)
    target = locate_checkpoint(settings.target, "target")
    if settings.jsonl:
        write_lines(questions, Path(settings.jsonl))
    tokenizer = Tokenizer.open(target)
    prompts = [encode_turn(question, (), target, tokenizer) for question in questions]
    lengths = [len(prompt) for prompt in prompts]
    turns = sum(max(1, len(question.turns)) for question in questions)
    first = tokenizer.decode(prompts[0])
    return (
        f"{settings.data}: {len(questions)} prompts of {turns} turns; tokens of the first turns: "
        f"{min(lengths)} to {max(lengths)}, median {percentile(lengths, 50):.0f}, together {sum(lengths)}\n\n"
        f"{first[:SHOWN]}{' …' if len(first) > SHOWN else ''}"
    )


def write_lines(questions: list[Question], path: Path) -> None:
    """Each as `load_questions` reads it. Raises OSError."""
    lines = ({"turns": one.turns} if one.turns else {"text": one.text} for one in questions)
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
