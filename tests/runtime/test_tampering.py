"""Every field of a manifest changed by somebody who also set the digest right: a clear refusal, or no harm."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dflash_aot.cache.bundle.manifest import SCHEMA, encode_manifest, parse_manifest, read_manifest
from dflash_aot.cache.bundle.manifest_checks import check_consistent
from dflash_aot.cache.bundle.verification import find_file_flaws
from dflash_aot.cache.errors import BadCheckpoint, CorruptBundle, DflashError, IncompatibleBundle
from dflash_aot.runtime import Engine, SamplingParams

DIGEST = re.compile(r'"digest": "[0-9a-f]{64}"')
# What serving does not depend on: what a build took, what was found in executables, what they compute elsewhere; and
# the depth that the draft's config proposes.
HARMLESS = re.compile(r"entries\.\d+\.(seconds|memory|cost|inspection|canary)\b.*|draft\.facts\.k")


@pytest.fixture(scope="module")
def copy(bundle, tmp_path_factory) -> Path:
    """A bundle whose manifest is written anew by every test."""
    path = tmp_path_factory.mktemp("tampered") / "bundle"
    return Path(shutil.copytree(bundle("tiny"), path, ignore=shutil.ignore_patterns("entries")))


@pytest.fixture
def content(bundle) -> bytes:
    return (bundle("tiny") / "manifest.json").read_bytes()


def write(copy: Path, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    (copy / "manifest.json").write_bytes(content)
    return content


def seal(facts: Any) -> bytes:
    """JSON with a digest that is right, as somebody else would write it, by the book."""
    blank = json.dumps({**facts, "digest": ""}, indent=1, ensure_ascii=False) + "\n"
    digest = hashlib.sha256(blank.encode()).hexdigest()
    return blank.replace('"digest": ""', f'"digest": "{digest}"').encode()


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """A path to each kind of leaf: of lists, only into the first and the last item."""
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


def test_a_manifest_that_is_sealed_by_the_book_is_read(copy, content):
    """The digest is defined on bytes, so that another writer needs no more than JSON and a sha256."""
    facts = json.loads(content)
    write(copy, content)
    assert read_manifest(copy).entries == parse_manifest(copy, seal(facts)).entries


def test_without_the_right_digest_no_field_can_be_changed(copy, content):
    facts = json.loads(content)
    for path in leaves(facts):
        changed = json.dumps(tamper(facts, path), indent=1, ensure_ascii=False) + "\n"
        with pytest.raises(CorruptBundle, match=r"manifest\.json: .*dflash-precompile"):
            parse_manifest(copy, changed.encode())


def test_with_the_right_digest_a_change_is_refused(copy, content):
    """By the manifest alone, by files and keys, or by opening it; never by anything but an error of ours."""
    facts, served = json.loads(content), []
    for path in leaves({**facts, "entries": facts["entries"][2:3]}):
        real = ("entries", 2, *path[2:]) if path[0] == "entries" else path
        if real == ("digest",) or is_harmless(real):
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


def test_what_serving_does_not_depend_on_changes_nothing(copy, content, cases):
    facts = json.loads(content)
    for path in [path for path in leaves(facts) if is_harmless(path)]:
        with suppress(CorruptBundle):  # what is not even of the right form is refused, harmless or not
            facts = parsed(copy, tamper(facts, path))
    write(copy, seal(facts))
    with Engine.open(copy) as engine:
        answer = engine.generate(cases["len5"].prompt, SamplingParams(max_tokens=9, stop_token_ids=()))
    assert answer.token_ids == cases["len5"].answer[:9]


def parsed(copy: Path, facts: Any) -> Any:
    """The same, if it is a manifest."""
    parse_manifest(copy, seal(facts))
    return facts


def is_harmless(path: tuple) -> bool:
    return HARMLESS.fullmatch(".".join(map(str, path))) is not None


@pytest.mark.parametrize("field", ["results", "donated", "state", "arguments"])
def test_permuted_inputs_and_outputs_are_found_in_the_manifest(copy, content, field):
    facts = json.loads(content)
    entry = next(
        one for one in facts["entries"] if one["signature"]["program"] == "verify" and one["signature"]["bucket"]["k"]
    )
    entry["signature"][field].reverse()
    write(copy, seal(facts))
    with pytest.raises(
        CorruptBundle, match=rf"{field} is .*, models and grid make it .*Build it again: dflash-precompile"
    ):
        Engine.open(copy)


def test_permuted_weights_are_found_by_their_key(copy, content):
    facts = json.loads(content)
    facts["entries"][0]["signature"]["weights"].reverse()
    write(copy, seal(facts))
    (flaw,) = find_file_flaws(copy, read_manifest(copy))
    assert (flaw.field, flaw.promised) == ("key", facts["entries"][0]["key"])


def twice(content: str) -> str:
    return content.replace('"dtype": "float32",', '"dtype": "bfloat16",\n "dtype": "float32",', 1)


def with_schema(schema: str) -> Callable[[str], str]:
    return lambda text: text.replace(f'"schema": {SCHEMA}', f'"schema": {schema}')


def with_seconds(before: str) -> Callable[[str], str]:
    return lambda text: text.replace('"seconds": ', f'"seconds": {before}, "was": ', 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "", "Input data was truncated"),
        (lambda text: "not JSON", "invalid"),
        (lambda text: text[: len(text) // 2], "truncated"),
        (with_seconds("NaN"), "JSON is malformed"),
        (with_seconds("Infinity"), "JSON is malformed"),
        (with_seconds("1e999"), "out of range"),
        (with_seconds("[" * 100_000), "ecursion"),
        (twice, "'dtype' stands twice"),
        (lambda text: "[]", "Expected `object`"),
        (lambda text: "\ufeff" + text, "malformed"),
        (lambda text: text.replace("\n", "\n ", 1), "its content has"),
        (lambda text: DIGEST.sub('"digest": ""', text), "digest is missing"),
        (with_schema("99"), f"schema is 99, this version reads {SCHEMA}. It was built by a newer dflash-aot"),
        (with_schema("5"), f"schema is 5, this version reads {SCHEMA}. Build it again"),
        (with_schema('"6"'), "Expected `int`"),
    ],
)
def test_a_manifest_that_is_none_is_refused_with_what_is_wrong(copy, content, change, words):
    write(copy, change(content.decode()))
    with pytest.raises(CorruptBundle) as refused:
        Engine.open(copy)
    assert words in str(refused.value) and f"{copy}/manifest.json: " in str(refused.value)


def test_a_huge_manifest_is_not_even_read(copy):
    with open(copy / "manifest.json", "wb") as file:
        file.truncate(1 << 40)  # takes no place on the disk
    with pytest.raises(CorruptBundle, match=r"manifest\.json: 1099511627776 bytes, where at most \d+ are read"):
        Engine.open(copy)


def test_bytes_that_are_no_text_are_refused(copy, content):
    write(copy, content.replace(b'"platform_version": "', b'"platform_version": "\xff', 1))
    with pytest.raises(CorruptBundle, match="manifest"):
        Engine.open(copy)


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", ".", ""])
def test_a_blob_can_only_be_named_by_a_digest(copy, content, name):
    facts = json.loads(content)
    facts["entries"][0]["sha256"] = name
    write(copy, seal(facts))
    with pytest.raises(CorruptBundle, match=r"manifest\.json: .*entries.*sha256"):
        Engine.open(copy)


def test_for_another_machine_it_is_refused_before_anything_else(copy, bundle):
    manifest = read_manifest(bundle("tiny"))
    write(copy, encode_manifest(manifest).replace(b'"machine": "', b'"machine": "not '))
    with pytest.raises(CorruptBundle, match="digest"):
        Engine.open(copy)
    facts = json.loads((bundle("tiny") / "manifest.json").read_text())
    write(copy, seal(tamper(facts, ("environment", "machine"))))
    with pytest.raises(IncompatibleBundle, match="machine: built for"):
        Engine.open(copy)
