"""The table that the pickle scan uses, compared with the pickles that the installed JAX writes."""

import json
import os
import subprocess
import sys

import jax
import pytest

from dflash_aot.cache.bundle.pickle_scan import TABLES
from dflash_aot.cache.environment import libtpu_version
from tests.compile.executable_pickles import ENVIRONMENT

UPDATE = "python -m tests.compile.executable_pickles --update"


@pytest.mark.slow
@pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")
def test_table_lists_exactly_what_this_jax_version_writes():
    command = [sys.executable, "-m", "tests.compile.executable_pickles"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr
    table = TABLES / f"{jax.__version__}.json"
    assert table.exists(), f"no table for JAX {jax.__version__}. Write it: {UPDATE}"
    assert json.loads(done.stdout) == json.loads(table.read_text()), f"Read what changed, then write it: {UPDATE}"
