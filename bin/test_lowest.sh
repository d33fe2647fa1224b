#!/usr/bin/env bash
# bash bin/test_lowest.sh [PYTEST ARGUMENTS]   Tests the lower bounds in pyproject.toml: Python 3.11, JAX 0.10.
# Without arguments: golden runs, bundles, the engine, programs, and executables for described TPUs. PyTorch is not installed.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=build/lowest CONSTRAINTS=requirements/lowest.txt
source bin/environment.sh
SUPPORTED=(3.11)

if ! find_python 3.11 >/dev/null; then
    say "Python 3.11 is not installed: the lower bounds in pyproject.toml were not tested"
    exit
fi
make_environment
if ! is_installed test; then
    say "installing the oldest supported versions into $VENV"
    install --editable ".[test]"
    note_installed test
fi
if ((!$#)); then
    set -- tests/cache --ignore=tests/cache/test_rope.py tests/compile/test_{golden_programs,programs,tpu_executables}.py \
        tests/runtime/test_golden_runs.py tests/runtime/test_engine_{batches,ends,faults,life,requests}.py tests/bin/test_bundle.py
fi
say "tests"
"$VENV"/bin/pytest -o cache_dir="$VENV/pytest_cache" --numprocesses auto --maxprocesses 4 --dist loadfile --max-worker-restart 0 -rs -m "not slow" "$@"
