"""No command lets text from outside control a terminal or write a line that looks like one of the command's own."""

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_aot.bin import bundle as dflash_bundle
from dflash_aot.bin import precompile, run, serve
from dflash_aot.bin.command_line import LineFormatter, print_json, print_lines
from dflash_aot.cache.bundle.manifest import decode_manifest
from dflash_aot.cache.bundle.verification import find_contradiction
from dflash_aot.cache.errors import CorruptBundle
from tests.cache.damage import seal

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("bin", "cache", "compile", "runtime", "server", "benchmarks")
PRINTING = {"bin/command_line.py", "bin/run.py"}  # the latter prints generated text, and the prompt sign of a chat
FORGED = "signed: yes, by the release key (verified)"
HOSTILE_NAME = (  # of a file: without / and NUL, and at most 255 bytes
    f"x\r\n{FORGED}\n\x1b[2K\x1b[1A\x9b2K\u202e\u2066\u200f\u2028{FORGED}\u2029\x85\u200b\u3164\U000e0041\x7f"
)
HOSTILE = f"{HOSTILE_NAME}\0"


def check(*texts: str) -> None:
    """Fails for a character that is not visible, apart from our line breaks, and for a forged line."""
    for line in "\n".join(texts).split("\n"):
        assert line.isprintable() and not line.startswith(FORGED)


def replace_at(value: Any, path: tuple, new: object) -> Any:
    """A copy of a JSON value with another value at this path."""
    if not path:
        return new
    step, *rest = path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    changed = {key: replace_at(inner, tuple(rest), new) if key == step else inner for key, inner in items}
    return changed if isinstance(value, dict) else list(changed.values())


def list_texts(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all texts of a JSON value; of lists, only in the first item."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else [*enumerate(value)][:1]:
            yield from list_texts(inner, (*path, key))


@pytest.fixture
def hostile_manifests(copy) -> list[bytes]:
    """Manifests with hostile texts: in both references, in all texts that stay consistent, in all that are decoded."""
    facts = json.loads((copy / "manifest.json").read_bytes())
    everywhere = consistent = facts
    for path in list_texts(facts):
        try:
            decode_manifest(seal(replace_at(facts, path, HOSTILE)), "", "")
        except CorruptBundle as error:
            check(str(error))
            continue
        everywhere, changed = replace_at(everywhere, path, HOSTILE), replace_at(consistent, path, HOSTILE)
        if find_contradiction(decode_manifest(seal(changed), "", "")) is None:
            consistent = changed
    names = replace_at(consistent, ("entries", 0, "analysis", "layouts"), {HOSTILE: HOSTILE})
    references = replace_at(replace_at(facts, ("target", "reference"), HOSTILE), ("draft", "reference"), HOSTILE)
    return [seal(value) for value in (references, names, everywhere)]


def test_commands_escape_every_text_of_a_manifest(command, bundle, copy, hostile_manifests, make_key, tmp_path):
    private, public = make_key("hostile")
    remote = tmp_path / "remote"
    remote.mkdir()
    commands = (
        ["inspect", copy],
        ["diff", bundle("tiny"), copy],
        ["verify", copy, "--noquarantine"],
        ["verify", copy, f"--key={public}"],
        ["verify", copy, f"--record_golden={tmp_path / 'golden.json'}"],
        ["gc", copy, "--keep_hours=0", "--dry_run"],
        ["push", copy, f"file://{tmp_path}/pushed"],
        ["fetch", f"file://{remote}"],
        ["sign", copy, f"--key={private}"],
    )
    assert {name for name, *_ in commands} == {*dflash_bundle.COMMANDS}
    codes = set()
    for content in hostile_manifests:
        for place in (copy, remote):
            (place / "manifest.json").write_bytes(content)
        for arguments in commands:
            for form in ([], ["--json"]):
                done = command(dflash_bundle, *arguments, *form)
                check(done.out, done.err)
                codes.add(done.code)
        for module, *arguments in ((run, "--prompt=a", "--stats"), (serve, "--port=0")):
            done = command(module, f"--bundle={copy}", *arguments)
            check(done.out, done.err)
            assert done.code
    assert codes >= {0, 1, 3}  # some of the manifests are consistent, and some are not
    done = command(precompile, f"--rebuild={copy}")
    check(done.out, re.sub("\r[^\r\n]*", "", done.err))  # progress bars


# -- output


def test_output_and_log_are_escaped(capsys):
    print_lines("one", f"two {HOSTILE}")
    printed = capsys.readouterr().out
    check(printed)
    assert printed.startswith("one\ntwo x\\r\\nsigned") and printed.count("\n") == 2
    print_json({"path": Path(HOSTILE_NAME), "name": f"{HOSTILE}\udcff"})
    printed = capsys.readouterr().out
    check(printed)
    assert printed.isascii() and json.loads(printed) == {"path": HOSTILE_NAME, "name": f"{HOSTILE}\udcff"}
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        details = (type(error), error, error.__traceback__)
    record = {"levelname": "ERROR", "msg": "failed: %s", "args": (HOSTILE,), "exc_info": details}
    first, *traceback = LineFormatter("%(levelname)s: %(message)s").format(logging.makeLogRecord(record)).split("\n")
    check(first, *traceback)
    assert first.startswith("ERROR: failed: x\\r\\n") and traceback
    assert all(line.startswith("  ") for line in traceback)


def find_printing_modules(root: Path) -> set[str]:
    """Modules that write to standard output or standard error by themselves."""
    return {
        path.relative_to(root).as_posix()
        for room in ROOMS
        for path in (root / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    }


def test_only_the_escaping_module_prints(tmp_path):
    assert find_printing_modules(REPOSITORY) == PRINTING
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thing.py").write_text("print(1)\n")
    assert find_printing_modules(tmp_path) == {"cache/thing.py"}
