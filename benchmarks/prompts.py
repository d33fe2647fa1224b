"""Questions as a model reads them: token ids."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_aot.benchmarks.questions import Question, load_questions
from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.text.chat_template import render_chat
from dflash_aot.runtime.text.tokenizer import Tokenizer

Prompt = list[int]


def load_prompts(
    name: str,
    count: int | None,
    target: Path,
    width: int | None = None,
    answer: Callable[[Prompt], list[int]] | None = None,
) -> list[Prompt]:
    """A prompt for each question, for the target in that directory; of texts, the first `width` tokens.

    Of a conversation the first turn; with `answer`, which continues a prompt, all turns behind its answers. Raises
    BadInput, BadCheckpoint, and what `answer` raises.
    """
    tokenizer, prompts = Tokenizer.open(target), []
    for question in load_questions(name, count):
        prompts.append(encode_turn(question, (), target, tokenizer, width))
        answers: list[str] = []
        while answer and len(answers) + 1 < len(question.turns):
            answers.append(tokenizer.decode(answer(prompts[-1])))
            prompts.append(encode_turn(question, answers, target, tokenizer))
    return prompts


def encode_turn(
    question: Question, answers: Sequence[str], target: Path, tokenizer: Tokenizer, width: int | None = None
) -> Prompt:
    """What is asked once there are so many answers: the conversation by the target's template, thinking off.

    A text is one turn: as it stands, or its first `width` tokens. Raises BadInput for one of fewer.
    """
    if question.turns:
        turns = question.turns[: len(answers) + 1]
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        # The template has written all special tokens itself.
        return tokenizer.encode(render_chat(target, messages), add_special_tokens=False)
    prompt = tokenizer.encode(question.text)
    if width is not None and len(prompt) < width:
        raise BadInput(
            f"a prompt of {width} tokens is asked for, and the text {question.text[:40]!r} … has {len(prompt)}"
        )
    return prompt[:width]
