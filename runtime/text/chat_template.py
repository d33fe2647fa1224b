"""A conversation as the prompt its checkpoint was trained on."""

import inspect
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dflash_aot.cache.errors import BadCheckpoint, BadInput, DflashError

TemplateVariables = Mapping[str, str | bool | int | float]
# Qwen3's template reads it; drafts are trained on answers without thinking, unless their authors say so.
DEFAULT_VARIABLES: TemplateVariables = {"enable_thinking": False}


def render_chat(
    directory: Path, messages: list[dict[str, str]], variables: TemplateVariables = DEFAULT_VARIABLES
) -> str:
    """The text of `messages` (each with `role` and `content`) in the checkpoint's chat template, ready to be answered.

    variables: what the template may read beside the messages, over USUAL: thinking is off.

    The template is `chat_template.jinja` or stands in `tokenizer_config.json`; it is rendered by transformers, in
    Jinja's sandbox. It writes special tokens itself: encode with `add_special_tokens=False`.
    The files are read at the first call for a directory; the latest one's stay in memory.
    `BadInput` if there are no messages, or the template refuses them, or does not read a variable; `BadCheckpoint` if
    there is no tokenizer, no template, or it fails.
    """
    if not messages:
        raise BadInput("a chat needs at least one message")
    tokenizer = _load_tokenizer(directory)
    source = directory / "chat_template.jinja"
    source = source if source.is_file() else directory / "tokenizer_config.json"
    if tokenizer.chat_template is None:
        raise BadCheckpoint(f"{source} has no chat template. Give a plain prompt, or the directory of a chat model")
    unusual = {name: value for name, value in variables.items() if DEFAULT_VARIABLES.get(name) != value}
    _check_variables(tokenizer, unusual)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **{**DEFAULT_VARIABLES, **unusual}
        )
    except TemplateError as error:
        if type(error) is TemplateError:  # by raise_exception; what is wrong with the template itself has its own types
            raise BadInput(f"the chat template refuses these messages: {error}") from error
        raise _failed(source, error, unusual) from error
    except Exception as error:  # a template is the checkpoint's own program: it can raise anything
        raise _failed(source, error, unusual) from error


def _check_variables(tokenizer: Any, variables: TemplateVariables) -> None:
    """What a template does not read would change nothing. What transformers takes itself, a template among it, is not
    for those who chat. Raises BadInput."""
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
    for name in variables:
        if name in taken or not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise BadInput(f"the chat template reads no variable {name!r} of its caller's: leave it out")


def has_template(directory: Path) -> bool:
    """Whether the checkpoint says how it renders chats; whether that is of use, `render_chat` finds."""
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        configuration = json.loads((directory / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(configuration, dict) and configuration.get("chat_template") is not None


def _failed(source: Path, error: Exception, variables: TemplateVariables) -> DflashError:
    if variables:
        return BadInput(f"the chat template failed with {', '.join(variables)} as they were given: {error}")
    return BadCheckpoint(f"the chat template of {source} failed: {type(error).__name__}: {error}")


@lru_cache(maxsize=1)  # half a second for a large vocabulary, which each turn of a conversation would take again
def _load_tokenizer(directory: Path) -> Any:
    if not (directory / "tokenizer.json").is_file():
        raise BadCheckpoint(f"there is no {directory / 'tokenizer.json'}. Give a directory with the target's tokenizer")
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes a second, which plain prompts don't owe

    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, or the bare Exception of tokenizers
        raise BadCheckpoint(f"the tokenizer in {directory} cannot be read: {error}") from error
