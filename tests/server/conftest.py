"""Fixtures: dflash-serve in its own process, on the embedded pair."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import pytest

from dflash_aot.runtime.engine import Engine

PATIENCE = 120  # seconds, for a busy machine
KEY = "sk-the-key-of-these-tests"
EMBEDDED_TARGET = Path(__file__).parents[2] / "cache" / "embedded" / "target"


@dataclass
class Server:
    """A server process. `lines`: standard error as far as it was read, after `wait` all of it."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    @classmethod
    def start(cls, bundle: Path, *flags: str, key: str | None = None) -> Self:
        """Returns when the server listens, before it is ready. Without --preload in the flags, executables are loaded
        at their first use, so that the server is ready sooner."""
        fixed = (f"--bundle={bundle}", "--port=0", "--nopreload")
        command = [sys.executable, "-m", "dflash_aot.bin.serve", *fixed, *flags]
        environment = {name: value for name, value in os.environ.items() if name != "DFLASH_API_KEY"}
        environment |= {} if key is None else {"DFLASH_API_KEY": key}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        server = cls(process)
        server.url = server.read_until(r"listening at (\S+)")
        return server

    def read_until(self, pattern: str) -> str:
        """The first group of the pattern in the first line that matches."""
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError("".join(self.lines))

    def wait_until_ready(self) -> Self:
        self.read_until("(ready) after")
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self.process.stderr
        self.lines += self.process.stderr.read().splitlines(keepends=True)
        return self.process.wait(PATIENCE)

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, verify=False)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def served(bundle: Callable[[str], Path]) -> Iterator[Server]:
    """A server without keys, shared by all tests of a process; a test that would break it starts its own."""
    server = Server.start(bundle("served")).wait_until_ready()
    yield server
    assert server.stop() == 0, "".join(server.lines)
    assert "Traceback" not in "".join(server.lines)


@pytest.fixture
def start_server(bundle: Callable[[str], Path]) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*flags: str, key: str | None = None, name: str = "served") -> Server:
        started.append(Server.start(bundle(name), *flags, key=key))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def make_hostile_target(tmp_path: Path) -> Callable[[str], Path]:
    """A regular expression → the embedded target with a tokenizer that splits texts by it."""

    def make(pattern: str) -> Path:
        target = Path(shutil.copytree(EMBEDDED_TARGET, tmp_path / "target"))
        tokenizer = json.loads((target / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
        (target / "tokenizer.json").write_text(json.dumps(tokenizer))
        return target

    return make


@pytest.fixture(scope="module")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a copy of the embedded target with another chat template, and with added tokens in place of its last ones.

    So it has what the embedded tokenizer lacks: markers that are tokens.
    """

    def make(template: str, tokens: Sequence[str] = (), special: bool = False, **config: object) -> Path:
        target = tmp_path_factory.mktemp("target") / "target"
        shutil.copytree(EMBEDDED_TARGET, target)
        tokenizer = json.loads((target / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        first = len(vocabulary) - len(tokens)
        gone = {token for token, number in vocabulary.items() if number >= first}
        tokenizer["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token not in gone}
        merges = [one if isinstance(one, list) else one.split(" ") for one in tokenizer["model"]["merges"]]
        tokenizer["model"]["merges"] = [one for one in merges if not gone & {*one, "".join(one)}]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, content in enumerate(tokens, first):
            tokenizer["added_tokens"].append({"id": number, "content": content, "special": special, **flags})
        (target / "tokenizer.json").write_text(json.dumps(tokenizer))
        facts = json.loads((target / "tokenizer_config.json").read_text())
        (target / "tokenizer_config.json").write_text(json.dumps({**facts, "chat_template": template, **config}))
        return target

    return make


@pytest.fixture(scope="session")
def engine(bundle: Callable[[str], Path]) -> Iterator[Engine]:
    """An engine of the same bundle, for the expected responses."""
    with Engine.open(bundle("served")) as opened:
        yield opened
