#!/usr/bin/env bash
# bash bin/test_lowest.sh [PYTEST ARGUMENTS]   Tests the lower bounds in pyproject.toml: Python 3.11, JAX 0.10.
# Without arguments a smoke set: a golden run of each kind of pair, a bundle, the engine, executables for a described TPU.
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
    golden=tests/runtime/test_golden_runs.py::test_every_prompt_matches_the_reference_round_by_round
    for pair in tied swa pruned llama dflash2 hybrid; do
        set -- "$@" "${golden}[$pair]" # a name that does not exist ends the run without a test
    done
    set -- "$@" tests/cache/test_store.py tests/runtime/test_engine_requests.py \
        tests/bin/test_rebuild.py::test_build_for_a_described_tpu_is_reproducible_in_every_byte
fi
say "tests"
unset PYTHONDONTWRITEBYTECODE # as in test.sh
"$VENV"/bin/pytest -o cache_dir="$VENV/pytest_cache" --numprocesses auto --maxprocesses 4 --dist loadfile --max-worker-restart 0 -rs "$@"
