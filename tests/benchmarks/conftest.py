"""What the tests of several benchmarks need."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TRAINING = Path(__file__).parents[2] / "examples/embedded_pair"


@pytest.fixture(scope="session")
def corpus() -> ModuleType:
    """Which files the embedded pair was trained on: a module beside its training."""
    spec = importlib.util.spec_from_file_location("corpus", TRAINING / "corpus.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
