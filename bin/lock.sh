#!/usr/bin/env bash
# bash bin/lock.sh [--upgrade]   Chooses versions for the dependencies in pyproject.toml, for Python 3.11 to 3.13, and writes:
#   constraints.txt           all extras: what quickstart.sh, develop.sh and test.sh install
#   requirements/cpu.txt      what a deployment installs, with hashes: pip install --require-hashes -r requirements/cpu.txt
#   requirements/tpu.txt      the same, with libtpu
#   requirements/lowest.txt   the lower bounds in pyproject.toml, for Python 3.11: what the second step of .ci/run installs
#   requirements/clients.txt  tests/server/clients.txt with what these need, for an environment of their own
# Versions that are already in these files stay, unless a bound excludes them; with --upgrade all are chosen anew.
set -euo pipefail
cd "$(dirname "$0")/.."

# resolve SOURCE OUTPUT ARGUMENTS...
resolve() {
    .venv/bin/uv pip compile --quiet --python-version 3.11 --no-emit-package dflash-aot --no-annotate \
        --custom-compile-command "bash bin/lock.sh" "$1" --output-file "${@:2}"
}

resolve pyproject.toml constraints.txt --universal --all-extras "$@"
resolve pyproject.toml requirements/cpu.txt --universal --constraints constraints.txt --generate-hashes "$@"
resolve pyproject.toml requirements/tpu.txt --universal --constraints constraints.txt --generate-hashes --extra tpu "$@"
resolve pyproject.toml requirements/lowest.txt --resolution lowest-direct --all-extras "$@"
resolve tests/server/clients.txt requirements/clients.txt --universal "$@"
