"""Chat template of a checkpoint: looks it up, and renders a conversation as a prompt."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.cache.files.checkpoint_files import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TOOL_TEMPLATE_FILE,
    read_checkpoint_file,
    read_checkpoint_object,
    read_tokenizer_files,
)
from dflash_aot.runtime.bounded_worker import CHAT_GUARD, TRIES, CallFailed, CallLimits

TemplateVariables = Mapping[str, str | bool | int | float]
# Qwen3's template reads this variable. Drafts are trained on answers without thinking, unless their authors say so.
DEFAULT_VARIABLES: TemplateVariables = {"enable_thinking": False}
DEFAULT_LIMITS = CallLimits()
LOAD_LIMITS = CallLimits(seconds=60.0, memory=1 << 32)  # for transformers and the tokenizer files


def read_chat_template(directory: Path, tools: bool = False) -> str | None:
    """Returns the text of the checkpoint's chat template; None if the checkpoint has no template.

    The template is the file `chat_template.jinja`, or stands in `tokenizer_config.json`: alone, or under the name
    "default" among several named templates. This is the only look-up in the project.

    tools: for chats with tools, for which a template named "tool_use" comes first; as a file it is
    `additional_chat_templates/tool_use.jinja`. Raises BadCheckpoint for a template that cannot be read.
    """
    files = [*([directory / TOOL_TEMPLATE_FILE] if tools else []), directory / TEMPLATE_FILE]
    for path in files:
        if (content := read_checkpoint_file(path)) is not None:
            try:
                return content.decode()
            except UnicodeDecodeError as error:
                raise BadCheckpoint(f"{path} cannot be read as a chat template: {error}") from error
    return _read_config_template(directory / TOKENIZER_CONFIG_FILE, tools)


def _read_config_template(path: Path, tools: bool) -> str | None:
    content = read_checkpoint_file(path)
    try:
        config = json.loads(content or b"{}")
    except (ValueError, RecursionError):  # reported when a chat is rendered
        return None
    template = config.get("chat_template") if isinstance(config, dict) else None
    named = template
    if isinstance(template, list):
        named = {
            one["name"]: one.get("template")
            for one in template
            if isinstance(one, dict) and isinstance(one.get("name"), str)
        }
    found = template
    if isinstance(named, dict):
        found = named.get("tool_use") if tools else None
        found = named.get("default") if found is None else found
    if template is None or isinstance(found, str):
        return found
    raise BadCheckpoint(
        f"{path}: chat_template is neither a text nor a list with a template named 'default'"
    )


def render_chat(
    directory: Path,
    messages: Sequence[Mapping[str, Any]],
    variables: TemplateVariables = DEFAULT_VARIABLES,
    limits: CallLimits = DEFAULT_LIMITS,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns the prompt that the checkpoint's chat template makes of `messages`, up to where the answer begins.

    messages: each with `role` and `content`. variables: what the template may read in addition to the messages. They
    override DEFAULT_VARIABLES, by which thinking is off. tools: functions that the answer may call, in OpenAI's format.

    transformers renders the template, in Jinja's sandbox and in a subprocess that keeps to `limits`. The template
    writes special tokens itself: encode the prompt with `add_special_tokens=False`. The checkpoint's files are read at
    the first call for a directory; those of the last directory stay in memory, and may then disappear.

    Raises BadInput if there are no messages, if the template refuses them, or if the template does not read a
    variable. Raises BadCheckpoint if there is no tokenizer or no template, or if the template fails or exceeds a limit.
    """
    if not messages:
        raise BadInput("a chat needs at least one message")
    chat = _open_chat(directory, bool(tools))
    given = {
        name: value for name, value in variables.items() if DEFAULT_VARIABLES.get(name) != value
    }
    request = {
        "name": chat.name,
        "template": chat.template,
        "messages": [*messages],
        "tools": [*tools] or None,
        "variables": {**DEFAULT_VARIABLES, **given},
        "given": [*given],
    }
    try:
        for _ in range(TRIES):
            rendered = CHAT_GUARD.call("render", request, limits)
            if rendered is not None:
                break
            _load_tokenizer(chat, directory)  # the guard was started anew, or has read others
        else:
            raise CallFailed("the process that renders is busy with other engines")
    except (TypeError, ValueError) as error:  # no JSON, or an integer of over 4300 digits
        raise BadInput(
            f"messages, tools or variables of the chat cannot be written as JSON: {error}"
        ) from error
    except CallFailed as error:
        if given:
            raise BadInput(
                f"the chat template failed with {', '.join(given)} as they were given: {error}"
            ) from error
        raise BadCheckpoint(f"the chat template of {chat.source} failed: {error}") from error
    if "unread" in rendered:
        raise BadInput(
            f"the chat template reads no variable {rendered['unread']!r} of its caller's: leave it out"
        )
    if "refusal" in rendered:
        raise BadInput(f"the chat template refuses these messages: {rendered['refusal']}")
    return rendered["text"]


def _load_tokenizer(chat: "_ChatTemplate", directory: Path) -> None:
    files = {name: content.decode("latin-1") for name, content in chat.files.items()}
    try:
        CHAT_GUARD.call("read_tokenizer", {"name": chat.name, "files": files}, LOAD_LIMITS)
    except CallFailed as error:
        raise BadCheckpoint(f"the tokenizer in {directory} cannot be read: {error}") from error


@dataclass(frozen=True)
class _ChatTemplate:
    """The chat template of a checkpoint.

    Attributes:
        template: its text.
        source: the file that holds it, for messages.
        files: of the tokenizer, which has the special tokens, by name.
        name: of these files, for the guard.
    """

    template: str
    source: Path
    files: Mapping[str, bytes]
    name: str


@lru_cache(maxsize=2)
def _open_chat(directory: Path, tools: bool) -> _ChatTemplate:
    """Raises BadCheckpoint if there is no tokenizer, no template, or if a file cannot be read."""
    if not (directory / TOKENIZER_FILE).exists():
        raise BadCheckpoint(
            f"there is no {directory / TOKENIZER_FILE}. Give a directory with the target's tokenizer"
        )
    files = read_tokenizer_files(directory)
    source = directory / (
        TEMPLATE_FILE if (directory / TEMPLATE_FILE).exists() else TOKENIZER_CONFIG_FILE
    )
    if (template := read_chat_template(directory, tools)) is None:
        read_checkpoint_object(directory / TOKENIZER_CONFIG_FILE)  # raises for a broken file
        raise BadCheckpoint(
            f"{source} has no chat template. Give a plain prompt, or the directory of a chat model"
        )
    return _ChatTemplate(template, source, files, uuid.uuid4().hex)
