"""What editors and type checkers follow: build/imports, where modules re-export those of the rooms."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TOOLS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imports")
    script = 'source bin/environment.sh; write_imports "$1"'
    subprocess.run(["bash", "-euc", script, "bash", folder], cwd=REPOSITORY, check=True)
    return folder


def test_each_module_of_the_rooms_is_re_exported(imports):
    rooms = [package.removeprefix("dflash_aot.") for package in TOOLS["setuptools"]["package-dir"]]
    modules = {path.relative_to(REPOSITORY) for room in rooms for path in (REPOSITORY / room).rglob("*.py")}
    assert {path.relative_to(imports / "dflash_aot") for path in imports.rglob("*.py")} == modules


def test_definition_is_found_in_the_file_of_its_room(imports):
    """Python itself searches the two folders here, as pyright does, before the editable install is asked."""
    code = "import inspect; from dflash_aot.cache.grid import Grid; print(inspect.getsourcefile(Grid))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(imports), str(REPOSITORY)])}
    found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert Path(found.strip()) == REPOSITORY / "cache/grid.py"
