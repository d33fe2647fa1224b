"""Checkpoints and reference numbers that every room's tests share."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """One set: a checkpoint pair and what the reference implementation made of it."""

    directory: Path
    name: str = "golden"

    @cached_property
    def facts(self) -> dict:
        return json.loads((self.directory / f"{self.name}.json").read_text())

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        return load_file(self.directory / f"{self.name}.safetensors")

    @property
    def target(self) -> Path:
        return self.directory / "target"

    @property
    def draft(self) -> Path:
        return self.directory / "draft"


SETS = {
    "tied": Golden(GOLDEN / "qwen3-tiny-tied"),
    "untied": Golden(GOLDEN / "qwen3-tiny-untied"),
    "swa": Golden(GOLDEN / "qwen3-tiny-swa", "golden_swa_causal"),
}


@pytest.fixture(params=SETS, scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """Every Qwen3 set, one after the other."""
    return SETS[request.param]


@pytest.fixture(scope="session")
def tied() -> Golden:
    return SETS["tied"]


@pytest.fixture(scope="session")
def untied() -> Golden:
    return SETS["untied"]
