"""Tampered manifests: a change of any field, with or without a correct digest, raises or has no effect."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.verification import check_consistent, find_file_flaws
from dflash_aot.cache.errors import BadCheckpoint, CorruptBundle, DflashError
from dflash_aot.runtime import Engine
from tests.cache.damage import seal

# Fields that serving does not depend on: build time and memory, inspection, recorded self-tests, and the K that the
# draft's config suggests.
HARMLESS = re.compile(r"entries\.\d+\.(seconds|memory|cost|analysis|self_test)\b.*|draft\.facts\.heads\.k")


@pytest.fixture(scope="module")
def copy(bundle, tmp_path_factory) -> Path:
    """A copy of a bundle; every test rewrites its manifest."""
    path = tmp_path_factory.mktemp("tampered") / "bundle"
    return Path(shutil.copytree(bundle("tiny"), path, ignore=shutil.ignore_patterns("entries")))


@pytest.fixture
def content(bundle) -> bytes:
    return (bundle("tiny") / "manifest.json").read_bytes()


def write(copy: Path, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    (copy / "manifest.json").write_bytes(content)
    return content


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yields the path of each leaf; of lists, only in the first and the last item."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list) and value:
        for at in sorted({0, len(value) - 1}):
            yield from leaves(value[at], (*path, at))
    else:
        yield path


def change(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str() if re.fullmatch("[0-9a-f]{64}", value):
            return value[::-1]
        case str():
            return f"{value}x"
        case None:
            return 1
    return [1]  # an empty list


def tamper(facts: Any, path: tuple) -> Any:
    facts = json.loads(json.dumps(facts))
    inner = facts
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = change(inner[path[-1]])
    return facts


def test_any_change_with_a_correct_digest_raises(copy, content):
    """The manifest's checks, the files and keys, or opening the bundle raise, and only errors of the project."""
    facts, served = json.loads(content), []
    for path in leaves({**facts, "entries": facts["entries"][2:3]}):
        real = ("entries", 2, *path[2:]) if path[0] == "entries" else path
        if real == ("digest",) or HARMLESS.fullmatch(".".join(map(str, real))):
            continue
        write(copy, seal(tamper(facts, real)))
        try:
            manifest = read_manifest(copy)
            check_consistent(copy, manifest)
            if not find_file_flaws(copy, manifest):
                Engine.open(copy).close()
                served.append(real)
        except DflashError as error:
            named = str(copy) in str(error) and "dflash-precompile" in str(error)
            assert named or isinstance(error, BadCheckpoint), error
    assert served == []


@pytest.mark.parametrize("field", ["results", "state"])
def test_permuted_inputs_or_outputs_raise(copy, content, field):
    facts = json.loads(content)
    entry = next(
        one for one in facts["entries"] if one["signature"]["program"] == "verify" and one["signature"]["bucket"]["k"]
    )
    entry["signature"][field].reverse()
    write(copy, seal(facts))
    words = rf"{field} is .*, but models and grid need .*Build it again: dflash-precompile"
    with pytest.raises(CorruptBundle, match=words):
        Engine.open(copy)
