# shellcheck shell=bash
# Sourced by quickstart.sh, develop.sh and test.sh in the repository root: the virtual environment .venv that they share.
# Another environment, which .ci/run uses: VENV names its folder, CONSTRAINTS the file of its versions, PYTHON its interpreter.

VENV="${VENV:-.venv}"
CONSTRAINTS="${CONSTRAINTS:-constraints.txt}"
SUPPORTED=(3.13 3.12 3.11) # with tested versions in constraints.txt

say() { printf '\n== %s\n' "$*" >&2; }

# resolve_python COMMAND   Prints the path of this interpreter if it runs, is supported, and can make environments.
resolve_python() {
    "$1" - "${SUPPORTED[@]}" 2>/dev/null <<'PYTHON'
import ensurepip, ssl, sys
sys.exit("{}.{}".format(*sys.version_info) not in sys.argv[1:] or print(sys.executable))
PYTHON
}

# find_python VERSION...   Prints the path of the first of these interpreters that is on the PATH or in pyenv.
# Each is run, because pyenv has commands on the PATH for versions that are not selected.
find_python() {
    local version
    for version in "$@"; do
        resolve_python "python$version" && return
        resolve_python "$(compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version.*/bin/python" | tail -n 1)" && return
    done
    resolve_python python3
}

make_environment() {
    if [[ ! -x $VENV/bin/pip ]]; then
        local python
        if ! python="$(if [[ ${PYTHON:-} ]]; then resolve_python "$PYTHON"; else find_python "${SUPPORTED[@]}"; fi)"; then
            echo "Python ${SUPPORTED[*]} is supported, with its venv module. Found none that works in" \
                "${PYTHON:-the PATH and pyenv}. Install one (Debian: apt install python3 python3-venv)," \
                "or name one: PYTHON=/path/to/python3.13 bash $0" >&2
            exit 1
        fi
        "$python" -m venv "$VENV"
    fi
    say "$("$VENV/bin/python" --version) in $VENV"
}

# install ARGUMENTS...   Runs pip install with the tested versions. Python compiles the modules that it imports.
install() {
    "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-compile --constraint "$CONSTRAINTS" "$@"
}

# Packages are installed again only when pyproject.toml or the versions have changed. $1 names the set of packages.
is_installed() { [[ "$VENV/.$1" -nt pyproject.toml && "$VENV/.$1" -nt "$CONSTRAINTS" ]]; }
note_installed() { touch "$VENV/.$1"; }

# install_clients FOLDER LIST   Makes an environment of these packages only; a complete one of this list is kept.
install_clients() {
    [[ "$1/.installed" -nt "$2" ]] && return
    say "installing clients that others wrote into $1"
    "$VENV/bin/python" -m venv --clear "$1" &&
        "$1/bin/pip" install --quiet --disable-pip-version-check --no-compile --requirement "$2" && touch "$1/.installed"
}

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
