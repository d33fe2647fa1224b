# shellcheck shell=bash
# Sourced by quickstart.sh, develop.sh and test.sh in the repository root: the virtual environment .venv that they share.

say() { printf '\n== %s\n' "$*" >&2; }

make_environment() {
    if [[ -x .venv/bin/pip ]]; then return; fi
    local python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "Python 3.11 or newer is needed; $python is $("$python" --version 2>/dev/null || echo missing)." \
            "Name another: PYTHON=python3.12 bash $0" >&2
        exit 1
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
}

# install ARGUMENTS...   Runs pip install with the tested versions.
install() {
    .venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"
}

# Packages are installed again only when pyproject.toml or constraints.txt has changed. $1 names the set of packages.
is_installed() { [[ ".venv/.$1" -nt pyproject.toml && ".venv/.$1" -nt constraints.txt ]]; }
note_installed() { touch ".venv/.$1"; }

# write_imports FOLDER   FOLDER/dflash_aot, in which each module re-exports a module of the rooms.
# Editors and type checkers do not run the import hook of an editable install. They search FOLDER instead
# (pyproject.toml: tool.pyright, tool.mypy) and follow the re-export to the file in the room.
write_imports() {
    rm -rf "$1/dflash_aot"
    local file module
    while read -r file; do
        module="${file%.py}"
        module="${module%/__init__}"
        mkdir -p "$1/dflash_aot/${file%/*}"
        echo "from ${module//\//.} import *" >"$1/dflash_aot/$file"
    done < <(find cache compile runtime server benchmarks bin -name '*.py')
}
