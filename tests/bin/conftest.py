"""Runs commands in the test process, because a process of their own takes seconds to import JAX."""

import io
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from absl.testing import flagsaver
from msgspec import structs

from dflash_aot.cache.bundle.manifest import (
    InstructionEstimate,
    ScheduleEstimate,
    UnestimatedWork,
    encode_manifest,
    read_manifest,
)
from tests.runtime.conftest import make_up, smallest  # noqa: F401  fixtures
from tests.server.conftest import make_target  # noqa: F401  a fixture


@dataclass(frozen=True)
class Done:
    """Exit code and output of a finished command."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the `main` of a command module. An exception other than SystemExit fails the test."""

    def run(module: ModuleType, *arguments: str | Path, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        saved = flagsaver.save_flag_values(module.FLAGS)
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as end:
                module.main()
        finally:
            flagsaver.restore_flag_values(saved, module.FLAGS)
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        return Done(end.value.code, written.out, written.err)

    return run


@pytest.fixture
def copy(bundle: Callable[[str], Path], tmp_path: Path) -> Path:
    """A bundle that a test may damage or build into."""
    return Path(shutil.copytree(bundle("tiny"), tmp_path / "bundle"))


@pytest.fixture
def estimated(copy: Path) -> Path:
    """A bundle as if for a TPU v5e: its executables have estimates of 3, 4, 5 … ms, each twice the bound."""
    manifest = read_manifest(copy)
    entries = []
    for milliseconds, entry in enumerate(manifest.entries, 3):
        seconds = milliseconds * 1e-3
        longest = InstructionEstimate("fusion.7", "while/body/dot_general", "f32[1,64]", 36, seconds / 4)
        left_out = UnestimatedWork("all-reduce", 4, 2_000_000)
        schedule = ScheduleEstimate(seconds, 1, 0.0, 1e-4, (longest,), (left_out,), ("%while.1 counts once",))
        cost = structs.replace(entry.cost, schedule=schedule, bound_seconds=seconds / 2)
        entries.append(structs.replace(entry, cost=cost))
    environment = structs.replace(manifest.environment, platform="tpu", device_kind="TPU v5 lite", topology="v5e:1x1")
    changed = structs.replace(manifest, entries=tuple(entries), environment=environment)
    (copy / "manifest.json").write_bytes(encode_manifest(changed))
    return copy
