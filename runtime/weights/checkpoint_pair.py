"""Checkpoint pair of a bundle: where target and draft are, whether they match the bundle, the target's end tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.bundle_spec import DraftModel, TargetModel
from dflash_aot.cache.errors import BadCheckpoint, IncompatibleBundle
from dflash_aot.cache.files.checkpoint_files import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    read_checkpoint_object,
)
from dflash_aot.cache.files.locations import locate_checkpoint
from dflash_aot.cache.model_config.config_file import read_config, shorten_value
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import TEXT_SECTION, read_target
from dflash_aot.cache.printable import escape_line
from dflash_aot.cache.weight_recipe import CheckpointRole


def locate_checkpoint_pair(
    manifest: Manifest, target: str | Path | None, draft: str | Path | None
) -> dict[CheckpointRole, Path]:
    """Returns the directories of both checkpoints: the given, otherwise the bundle's own. Raises BadCheckpoint."""
    return {
        "target": locate_checkpoint(str(target or manifest.target.reference), "target"),
        "draft": locate_checkpoint(str(draft or manifest.draft.reference), "draft"),
    }


def check_pair_facts(
    path: Path, manifest: Manifest, directories: Mapping[CheckpointRole, Path]
) -> None:
    """Checks that the checkpoints have the facts that the executables in `path` were built for.

    Raises IncompatibleBundle naming each fact that differs.
    """
    target = read_target(read_config(directories["target"]))
    draft = read_draft(read_config(directories["draft"]), target)
    found = msgspec.structs.replace(
        manifest,
        target=TargetModel(str(directories["target"]), target),
        draft=DraftModel(str(directories["draft"]), draft),
    )
    if wrong := manifest.differences(found):
        role: CheckpointRole = "target" if wrong[0].field.startswith("target.") else "draft"
        raise IncompatibleBundle(
            f"{directories[role]} is not what {path} was built for:",
            *(
                f"  {one.field}: built for {one.a!r}, this checkpoint has {one.b!r}"
                for one in wrong
            ),
            f"Build a bundle for it: {found.build_command(Path('DIR'))}",
        )


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end an answer.

    Attributes:
        sources: token id → the files that name it.
        texts: token id → its text, where a file has it.
        warnings: what the files name and the target does not have.
    """

    sources: Mapping[int, tuple[str, ...]]
    texts: Mapping[int, str]
    warnings: tuple[str, ...] = ()

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self.sources)

    def __str__(self) -> str:
        """Each token, and where it is named."""
        each = [
            f"{token}{f' {escape_line(self.texts[token])}' if token in self.texts else ''} ({', '.join(files)})"
            for token, files in sorted(self.sources.items())
        ]
        return ", ".join(each) or "none: every answer goes on to its limit"


def read_end_tokens(target: Path, vocab: int) -> EndTokens:
    """Returns the target's end tokens: those of its config, its generation config and its tokenizer together.

    A chat model may end its turns by the tokenizer's eos_token alone. vocab: tokens of the target's head. Raises
    BadCheckpoint.
    """
    sources: dict[int, tuple[str, ...]] = {}
    warnings: list[str] = []
    for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):
        for token in _list_config_ends(target / name):
            if 0 <= token < vocab:
                sources[token] = (*sources.get(token, ()), name)
            else:
                warnings.append(
                    f"{target / name}: eos_token_id {token} is no token of 0 to {vocab - 1}: ignored"
                )
    generation = read_checkpoint_object(target / GENERATION_CONFIG_FILE) or {}
    if suppressed := generation.get("suppress_tokens"):
        warnings.append(
            f"{target / GENERATION_CONFIG_FILE}: suppress_tokens {shorten_value(suppressed)}: not applied; a request's "
            "logit_bias of -100 keeps a token out"
        )
    texts, end, named = _read_tokenizer_end(target)
    if end is not None and 0 <= end < vocab:
        sources[end] = (*sources.get(end, ()), TOKENIZER_CONFIG_FILE)
    elif named is not None:
        warnings.append(
            f"{target / TOKENIZER_CONFIG_FILE}: eos_token {escape_line(named)} is no token of the target: ignored"
        )
    return EndTokens(sources, texts, tuple(dict.fromkeys(warnings)))


def _list_config_ends(path: Path) -> list[int]:
    """`eos_token_id` of a config: a token, a list of tokens, also of its section of the text model."""
    config = read_checkpoint_object(path) or {}
    sections = [config, config.get(TEXT_SECTION)]
    found: list[int] = []
    for section in (section for section in sections if isinstance(section, dict)):
        ends = section.get("eos_token_id")
        each = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if any(type(token) is not int for token in each):
            raise BadCheckpoint(
                f"{path}: eos_token_id is {ends!r}: expected a token id or a list of them"
            )
        found += each
    return [*dict.fromkeys(found)]


def _read_tokenizer_end(target: Path) -> tuple[Mapping[int, str], int | None, str | None]:
    """The added tokens by id, and the tokenizer's eos_token with its id. A broken file has none of them.

    The first use of the tokenizer reports what is broken.
    """
    try:
        # Older tokenizers have the file of the special tokens alone.
        older = read_checkpoint_object(target / "special_tokens_map.json") or {}
        config = {**older, **(read_checkpoint_object(target / TOKENIZER_CONFIG_FILE) or {})}
        content = read_checkpoint_object(target / TOKENIZER_FILE) or {}
    except BadCheckpoint:
        return {}, None, None
    added = content.get("added_tokens")
    texts = {
        token["id"]: token["content"]
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, dict)
        and type(token.get("id")) is int
        and isinstance(token.get("content"), str)
    }
    end = config.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if not isinstance(end, str) or not content:
        return texts, None, None
    ids = {text: token for token, text in texts.items()}
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = ids.get(end, vocab.get(end) if isinstance(vocab, dict) else None)
    return texts, found if type(found) is int else None, end
