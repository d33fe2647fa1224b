#!/usr/bin/env bash
# Installs into .venv, then checks format, lint, types and the wheel, and runs all tests.
# With arguments it runs pytest only: bash bin/test.sh tests/cache -k grid
set -euo pipefail
cd "$(dirname "$0")/.."
source bin/environment.sh

build_wheel() {
    # Otherwise setuptools packs the files of an earlier build in build/lib.
    rm -rf build/lib build/bdist.* build/wheel
    .venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
    .venv/bin/python - build/wheel/*.whl <<'PYTHON'
import sys
import zipfile
from pathlib import Path

packed = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in name}
expected = {
    f"dflash_aot/{path}"
    for package in ("cache", "compile", "runtime", "server", "benchmarks", "bin")
    for path in Path(package).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".sh"
}
if packed != expected:
    sys.exit(f"missing in the wheel: {sorted(expected - packed)}; in the wheel only: {sorted(packed - expected)}")
print(f"{sys.argv[1]} holds all {len(packed)} files")
PYTHON
}

check_wheel() {
    # Installs the wheel in a fresh environment that finds its dependencies in .venv, by a .pth file. Python does not read
    # .pth files in a folder that a .pth file names, so the editable install in .venv is not found.
    .venv/bin/python -m venv --without-pip build/wheel/venv
    local fresh="$PWD/build/wheel/venv/bin" folder='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venv/bin/python -c "$folder" >"$("$fresh/python" -c "$folder")/dependencies.pth"
    .venv/bin/pip --python "$fresh/python" install --quiet --disable-pip-version-check \
        --no-deps --ignore-installed build/wheel/*.whl
    (
        cd /
        "$fresh/python" -c 'import dflash_aot.runtime as it; assert "/build/wheel/venv/" in it.__file__, it.__file__'
        "$fresh/dflash-precompile" --help >/dev/null
        "$fresh/dflash-run" --help >/dev/null
        "$fresh/dflash-serve" --help >/dev/null
        "$fresh/dflash-bench" data --count 1 >/dev/null
    )
}

bash bin/develop.sh

if (($#)); then
    exec .venv/bin/pytest "$@"
fi

say "format and lint"
.venv/bin/ruff format --check
.venv/bin/ruff check

say "types"
.venv/bin/mypy

say "the wheel, installed elsewhere"
build_wheel
check_wheel

say "tests"
# Hundreds of processes import the same modules: they share the bytecode in __pycache__.
unset PYTHONDONTWRITEBYTECODE
# A file's tests run on one worker, because they share fixtures. Files run in the order of their paths, because xdist's
# own order starts some of the longest files last.
.venv/bin/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
