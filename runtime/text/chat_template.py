"""Chat template of a checkpoint: looks it up, and renders a conversation as a prompt."""

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash_aot.cache.errors import BadCheckpoint, BadInput, DflashError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
TemplateVariables = Mapping[str, str | bool | int | float]
# Qwen3's template reads this variable. Drafts are trained on answers without thinking, unless their authors say so.
DEFAULT_VARIABLES: TemplateVariables = {"enable_thinking": False}


def read_chat_template(directory: Path) -> str | None:
    """Returns the text of the checkpoint's chat template; None if the checkpoint has no template.

    The template is the file `chat_template.jinja`, or stands in `tokenizer_config.json`: alone, or under the name
    "default" among several named templates. This is the only look-up in the project.

    Raises BadCheckpoint for a template that cannot be read.
    """
    path = directory / TEMPLATE_FILE
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else _read_config_template(directory / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read as a chat template: {error}") from error


def _read_config_template(path: Path) -> str | None:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # the tokenizer's loader refuses a broken file
        return None
    template = config.get("chat_template") if isinstance(config, dict) else None
    named = template
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
    found = named.get("default") if isinstance(named, dict) else template
    if template is None or isinstance(found, str):
        return found
    raise BadCheckpoint(f"{path}: chat_template is neither a text nor a list with a template named 'default'")


def render_chat(
    directory: Path, messages: list[dict[str, str]], variables: TemplateVariables = DEFAULT_VARIABLES
) -> str:
    """Returns the prompt that the checkpoint's chat template makes of `messages`, up to where the answer begins.

    messages: each with `role` and `content`. variables: what the template may read beside the messages; they override
    DEFAULT_VARIABLES, by which thinking is off.

    transformers renders the template, in Jinja's sandbox. The template writes special tokens itself: encode the prompt
    with `add_special_tokens=False`. The checkpoint's files are read at the first call for a directory; those of the
    last directory stay in memory.

    Raises BadInput if there are no messages, if the template refuses them, or if the template does not read a
    variable. Raises BadCheckpoint if there is no tokenizer or no template, or if the template fails.
    """
    from jinja2 import TemplateError  # noqa: PLC0415  the look-up above must not import Jinja

    if not messages:
        raise BadInput("a chat needs at least one message")
    chat = _load_chat_tokenizer(directory)
    given = {name: value for name, value in variables.items() if DEFAULT_VARIABLES.get(name) != value}
    chat.check_variables(given)
    try:
        return chat.tokenizer.apply_chat_template(
            messages,
            chat_template=chat.template,
            tokenize=False,
            add_generation_prompt=True,
            **{**DEFAULT_VARIABLES, **given},
        )
    except TemplateError as error:
        if type(error) is TemplateError:  # by raise_exception; errors in the template itself are of subclasses
            raise BadInput(f"the chat template refuses these messages: {error}") from error
        raise chat.failure(error, given) from error
    except Exception as error:  # a template is a program of the checkpoint's authors: it can raise anything
        raise chat.failure(error, given) from error


@dataclass(frozen=True)
class _ChatTokenizer:
    """A transformers tokenizer, and the chat template that it renders.

    Attributes:
        tokenizer: a `PreTrainedTokenizerFast`; its special tokens are variables of the template.
        template: the text of the template.
        source: the file that holds the template, for messages.
    """

    tokenizer: Any
    template: str
    source: Path

    def check_variables(self, variables: TemplateVariables) -> None:
        """Raises BadInput for a variable that the template does not read, or that transformers itself takes.

        A variable that is not read would have no effect. Callers must not set transformers' own arguments, such as
        `chat_template`.
        """
        reserved = {*inspect.signature(self.tokenizer.apply_chat_template).parameters, "messages"}
        for name in variables:
            if name in reserved or not re.search(rf"\b{re.escape(name)}\b", self.template):
                raise BadInput(f"the chat template reads no variable {name!r} of its caller's: leave it out")

    def failure(self, error: Exception, variables: TemplateVariables) -> DflashError:
        """Returns the error to raise when rendering failed: the caller's fault where the caller set variables."""
        if variables:
            return BadInput(f"the chat template failed with {', '.join(variables)} as they were given: {error}")
        return BadCheckpoint(f"the chat template of {self.source} failed: {type(error).__name__}: {error}")


@lru_cache(maxsize=1)  # loading a large vocabulary takes half a second: too long for each turn of a conversation
def _load_chat_tokenizer(directory: Path) -> _ChatTokenizer:
    """Raises BadCheckpoint if there is no tokenizer, no template, or if a file cannot be read."""
    if not (directory / "tokenizer.json").is_file():
        raise BadCheckpoint(f"there is no {directory / 'tokenizer.json'}. Give a directory with the target's tokenizer")
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  takes a second, and plain prompts don't need it

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, or the bare Exception of tokenizers
        raise BadCheckpoint(f"the tokenizer in {directory} cannot be read: {error}") from error
    source = directory / (TEMPLATE_FILE if (directory / TEMPLATE_FILE).is_file() else CONFIG_FILE)
    if (template := read_chat_template(directory)) is None:
        raise BadCheckpoint(f"{source} has no chat template. Give a plain prompt, or the directory of a chat model")
    return _ChatTokenizer(tokenizer, template, source)
