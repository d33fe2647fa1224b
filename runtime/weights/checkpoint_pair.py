"""Checkpoint pair of a bundle: where target and draft are, whether they match the bundle, the target's end tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.errors import BadCheckpoint, IncompatibleBundle
from dflash_aot.cache.files.checkpoint_files import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    read_checkpoint_object,
)
from dflash_aot.cache.files.locations import locate_checkpoint
from dflash_aot.cache.model_config.architecture import Draft
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import TEXT_SECTION, read_target
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
    for directory, built, found in (
        (directories["target"], manifest.target.facts, target),
        (
            directories["draft"],
            _without_suggestions(manifest.draft.facts),
            _without_suggestions(draft),
        ),
    ):
        if wrong := _list_differences(built, found):
            raise IncompatibleBundle(
                f"{directory} is not what {path} was built for:",
                *(
                    f"  {name}: built for {old!r}, this checkpoint has {new!r}"
                    for name, old, new in wrong
                ),
                "Build a bundle for it: "
                f"dflash-precompile --target {directories['target']} --draft {directories['draft']} --bundle DIR",
            )


def _without_suggestions(draft: Draft) -> Draft:
    """Removes the suggested K, which the executables don't depend on."""
    return msgspec.structs.replace(draft, k=None)


def read_end_tokens(target: Path) -> frozenset[int]:
    """Returns the target's end-of-sequence tokens: from `generation_config.json`, otherwise from `config.json`.

    transformers looks them up in the same order. Raises BadCheckpoint.
    """
    for path in (target / GENERATION_CONFIG_FILE, target / CONFIG_FILE):
        config = read_checkpoint_object(path) or {}
        ends = config.get("eos_token_id")
        if ends is None and isinstance(text := config.get(TEXT_SECTION), dict):
            ends = text.get("eos_token_id")
        if ends is not None:
            found = ends if isinstance(ends, list) else [ends]
            if any(type(token) is not int for token in found):
                raise BadCheckpoint(
                    f"{path}: eos_token_id is {ends!r}: expected a token id or a list of them"
                )
            return frozenset(found)
    return frozenset()


def _list_differences(built: Any, found: Any, prefix: str = "") -> list[tuple[str, object, object]]:
    """Returns (dotted name, built, found) of each field in which two structs of the same type differ."""
    wrong: list[tuple[str, object, object]] = []
    for name in built.__struct_fields__:
        old = getattr(built, name)
        new = getattr(found, name)
        if hasattr(old, "__struct_fields__") and type(old) is type(new):
            wrong += _list_differences(old, new, f"{prefix}{name}.")
        elif old != new:
            wrong.append((f"{prefix}{name}", old, new))
    return wrong
