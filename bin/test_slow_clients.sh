#!/usr/bin/env bash
# Installs the clients that bring PyTorch into build/slow_clients (some GB), and runs them against the server.
set -euo pipefail
cd "$(dirname "$0")/.."
bash bin/develop.sh
source bin/environment.sh

install_clients build/slow_clients tests/server/slow_clients.txt
"$VENV"/bin/pytest tests/server/test_clients.py -m slow "$@"
