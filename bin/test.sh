#!/usr/bin/env bash
# Installs into .venv, then everything that must hold: format, lint, types, the wheel, and all tests, the slow ones too.
# With arguments only pytest: bash bin/test.sh tests/cache -k grid
set -euo pipefail
cd "$(dirname "$0")/.."
source bin/environment.sh

build_wheel() {
    # setuptools would pack what an earlier build left in build/lib.
    rm -rf build/lib build/bdist.* build/wheel
    .venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
    .venv/bin/python - build/wheel/*.whl <<'PYTHON'
import sys
import zipfile
from pathlib import Path

packed = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in name}
rooms = {
    f"dflash_aot/{path}"
    for room in ("cache", "compile", "runtime", "server", "benchmarks", "bin")
    for path in Path(room).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".sh"
}
if packed != rooms:
    sys.exit(f"missing in the wheel: {sorted(rooms - packed)}; in the wheel only: {sorted(packed - rooms)}")
print(f"all {len(packed)} files of the rooms are in {sys.argv[1]}")
PYTHON
}

check_wheel() {
    # A fresh environment with nothing but the wheel in it, and .venv's packages behind it. In a folder that a .pth file
    # names, .pth files are not read: .venv's editable install stays out.
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
# By files, for those of one share what they build, in the order of their paths: pytest knows no other.
.venv/bin/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
