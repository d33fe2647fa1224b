#!/usr/bin/env bash
# bash bin/quickstart.sh [PROMPT]   Installs into .venv, precompiles the embedded pair, generates text, prints statistics.
# A second run reuses what the first one built.
set -euo pipefail
called_from="$PWD"
cd "$(dirname "$0")/.."
source bin/environment.sh

# The embedded pair was trained on the Python standard library only.
default=$'def main():\n    import argparse\n    parser = argparse.ArgumentParser()\n'
prompt="${1:-$default}"

make_environment
if ! is_installed run; then
    say "installing dflash-aot into .venv (a few minutes, most of it downloads)"
    install --editable .
    note_installed run
fi

say "precompiling the embedded pair into build/bundle"
"$VENV"/bin/dflash-precompile --bundle build/bundle --buckets "batch=1 length=256 k=0,7 prefill=64"

say "generating"
printf '%s' "$prompt"
"$VENV"/bin/dflash-run --bundle build/bundle --prompt "$prompt" --max_tokens 128 --stats

# The commands as they work in the shell that called this script: its kind, and its directory.
root=""
[[ $called_from == "$PWD" ]] || root="$(printf %q "$PWD")/"
case "${SHELL##*/}" in
    fish) activate=activate.fish ;;
    csh | tcsh) activate=activate.csh ;;
    *) activate=activate ;;
esac
say "go on: put the commands on the PATH, serve this bundle, or build one of your own pair"
cat >&2 <<END
  source $root$VENV/bin/$activate
  dflash-serve --bundle ${root}build/bundle
  dflash-precompile --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 --bundle ${root}build/qwen3-4b
(the last one after: hf download Qwen/Qwen3-4B && hf download z-lab/Qwen3-4B-DFlash-b16)
END
