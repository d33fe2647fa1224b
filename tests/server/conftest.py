"""A real server: dflash-serve in a process of its own, on the embedded pair."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import pytest

from dflash_aot.runtime.engine import Engine

PATIENCE = 120  # seconds, of a machine with much else to do
KEY = "sk-the-key-of-these-tests"


@dataclass
class Server:
    """Started with `flags`; `lines` are what it said until it listened, and after `wait` all of it."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    @classmethod
    def start(cls, bundle: Path, *flags: str, key: str | None = None) -> Self:
        """Returns when it listens, which is before it is ready. Executables are loaded when they are needed, unless
        the flags say otherwise: that is sooner."""
        fixed = (f"--bundle={bundle}", "--port=0", "--nopreload")
        command = [sys.executable, "-m", "dflash_aot.bin.serve", *fixed, *flags]
        environment = {name: value for name, value in os.environ.items() if name != "DFLASH_API_KEY"}
        environment |= {} if key is None else {"DFLASH_API_KEY": key}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        server = cls(process)
        server.url = server.read_until(r"listening at (\S+)")
        return server

    def read_until(self, pattern: str) -> str:
        """The first group of the first line that has it."""
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
        """Its exit code."""
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
    """One without keys that all tests of a process share; whoever breaks it starts one of their own."""
    server = Server.start(bundle("served")).wait_until_ready()
    yield server
    assert server.stop() == 0, "".join(server.lines)
    assert "Traceback" not in "".join(server.lines)


@pytest.fixture
def start_server(bundle: Callable[[str], Path]) -> Iterator[Callable[..., Server]]:
    """Flags → one of a test's own, killed at its end if it is there still."""
    started: list[Server] = []

    def start(*flags: str, key: str | None = None, name: str = "served") -> Server:
        started.append(Server.start(bundle(name), *flags, key=key))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def engine(bundle: Callable[[str], Path]) -> Iterator[Engine]:
    """What the server's answers are compared with."""
    with Engine.open(bundle("served")) as opened:
        yield opened
