"""Opens and reads the files of a checkpoint: regular files only, each up to a size that depends on its name.

Links are followed, because Hugging Face's cache consists of links. Everything else that reads a checkpoint, a library
too, gets bytes or a descriptor from here.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.cache.errors import MALFORMED, BadCheckpoint
from dflash_aot.cache.files.atomic_files import open_plain, read_plain

MB = 1 << 20
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * MB  # the limit of the safetensors library
# Some four times the largest files of published checkpoints.
MAX_FILE_BYTES = {
    CONFIG_FILE: 4 * MB,
    GENERATION_CONFIG_FILE: 4 * MB,
    TOKENIZER_FILE: 128 * MB,
    TOKENIZER_CONFIG_FILE: 16 * MB,
    "special_tokens_map.json": 16 * MB,
    "added_tokens.json": 16 * MB,
    TEMPLATE_FILE: MB,
    "tool_use.jinja": MB,
    "chat_template.json": MB,
    INDEX_FILE: 64 * MB,
}


# Of the texts in a tokenizer.json. The longest tokens of published ones have some hundred bytes, a normalizer's table
# up to 400 KB, the added tokens together 200 KB. Added tokens of 50 MB take the tokenizer 4 GB and half a minute.
LONG_TEXT_BYTES = 1 << 14
MAX_LONG_TEXTS = 4
MAX_TEXT_BYTES = 1 << 20
MAX_ADDED_CHARACTERS = 1 << 20


class AddedToken(msgspec.Struct):
    """One of the `added_tokens`."""

    content: str


class AddedTokens(msgspec.Struct):
    """What is read of a tokenizer.json before the tokenizer's library reads it."""

    added_tokens: list[AddedToken] = []


def read_checkpoint_file(path: Path) -> bytes | None:
    """Returns the content of a file of MAX_FILE_BYTES; None if it does not exist.

    Raises BadCheckpoint if it is a directory, a fifo or a device, is larger than its limit, or cannot be read; also for
    a tokenizer with tokens of a length that no text has.
    """
    with _as_bad_checkpoint(path):
        try:
            content = read_plain(path, MAX_FILE_BYTES[path.name], follow_links=True)
        except FileNotFoundError:
            return None
    if path.name == TOKENIZER_FILE:
        _check_texts(path, content)
    return content


def _check_texts(path: Path, content: bytes) -> None:
    """Raises BadCheckpoint for a tokenizer.json with too long texts, in linear time."""
    unescaped = content.replace(rb"\\", b"..").replace(rb"\"", b"..")
    texts = [len(text) - 1 for text in re.findall(b'"[^"]{%d,}' % LONG_TEXT_BYTES, unescaped)]
    if len(texts) > MAX_LONG_TEXTS or max(texts, default=0) > MAX_TEXT_BYTES:
        raise BadCheckpoint(
            f"{path} holds {len(texts)} texts of up to {max(texts)} bytes, where at most {MAX_LONG_TEXTS} of more than "
            f"{LONG_TEXT_BYTES} bytes and none of more than {MAX_TEXT_BYTES} are read: is it damaged?"
        )
    try:
        added = msgspec.json.decode(content, type=AddedTokens).added_tokens
    except MALFORMED:
        return  # the tokenizer's library says what is wrong
    characters = sum(len(token.content) for token in added)
    if characters > MAX_ADDED_CHARACTERS:
        raise BadCheckpoint(
            f"{path} holds {len(added)} added tokens with {characters} characters together: at most "
            f"{MAX_ADDED_CHARACTERS} are read: is it damaged?"
        )


def read_checkpoint_object(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None if the file does not exist.

    Raises BadCheckpoint, also for a file that is not JSON or holds no object.
    """
    if (content := read_checkpoint_file(path)) is None:
        return None
    try:
        text = content.decode()
        values = json.loads(text, object_pairs_hook=dict if path.name != CONFIG_FILE else _unite)
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors alike
        raise BadCheckpoint(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        found = "null" if values is None else f"a {type(values).__name__}"
        raise BadCheckpoint(f"{path} holds {found}, expected an object")
    return values


def _unite(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of a config. Raises ValueError for a key that is there twice: one value would be ignored."""
    values = dict(pairs)
    if len(values) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice} is there twice: remove one")
    return values


def list_tensor_names(directory: Path) -> frozenset[str]:
    """Returns the names of a checkpoint's tensors, by its index or the header of its only file, without reading more.

    Empty where there are no weights yet, and where a file is malformed: loading the weights reports that. Raises
    BadCheckpoint as `read_checkpoint_file` does.
    """
    if (directory / INDEX_FILE).exists():
        names = (read_checkpoint_object(directory / INDEX_FILE) or {}).get("weight_map")
    else:
        names = _read_header(directory / SINGLE_FILE)
    return frozenset(names if isinstance(names, dict) else ()) - {"__metadata__"}


def _read_header(path: Path) -> Any:
    """Returns the header of a safetensors file: its length in 8 bytes, then JSON. None if there is none."""
    try:
        with open_weights(path) as name, open(name, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(size)) if size <= MAX_HEADER_BYTES else None
    except (FileNotFoundError, ValueError, RecursionError):
        return None


@contextmanager
def open_weights(path: Path) -> Iterator[str]:
    """Opens a safetensors file of any size, and yields a name of the open file for libraries that open names.

    Raises BadCheckpoint as `read_checkpoint_file` does; FileNotFoundError.
    """
    with ExitStack() as opened:
        with _as_bad_checkpoint(path):
            descriptor = opened.enter_context(open_plain(path, follow_links=True))
        yield f"/dev/fd/{descriptor}"


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """The files of a tokenizer by their names, for a library that reads a directory.

    Raises BadCheckpoint.
    """
    contents = {
        name: read_checkpoint_file(directory / name)
        for name in MAX_FILE_BYTES
        if name not in (INDEX_FILE, GENERATION_CONFIG_FILE)
    }
    return {name: content for name, content in contents.items() if content is not None}


@contextmanager
def _as_bad_checkpoint(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadCheckpoint(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path}: {error}, so no file can have this name") from error
