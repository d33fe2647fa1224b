# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh in the repository root: the virtual environment .venv that they share.

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

# install ARGUMENTS...   pip install, in the tested versions.
install() {
    .venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"
}

# What is installed stays as it is until pyproject.toml or constraints.txt changes. NAME stands for a set of packages.
is_installed() { [[ ".venv/.$1" -nt pyproject.toml && ".venv/.$1" -nt constraints.txt ]]; }
note_installed() { touch ".venv/.$1"; }
