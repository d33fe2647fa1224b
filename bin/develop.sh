#!/usr/bin/env bash
# Installs dflash-aot with the tools of its developers into .venv, and lets editors follow its imports.
# After adding or renaming a module, run it again.
set -euo pipefail
cd "$(dirname "$0")/.."
source bin/environment.sh

make_environment
if ! is_installed test; then
    say "installing dflash-aot and its tools into .venv (a few minutes, most of it downloads)"
    install --editable ".[dev]"
    note_installed test
fi
write_imports build/imports
