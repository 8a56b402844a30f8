#!/bin/sh
# Finds a Python that is new enough and hands over to setup.py, which does the work.
# Usage: scripts/setup.sh [--no-llama] [--sdk]      PYTHON=/path/to/python picks the interpreter.
set -eu
cd "$(dirname "$0")/.."

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The usual case, nothing to do, should not even look around.
if [ -x .venv/bin/python ] && new_enough .venv/bin/python; then
    exec .venv/bin/python scripts/setup.py "$@"
fi

for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.14 python; do
    if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
        exec "$candidate" scripts/setup.py "$@"
    fi
done

if command -v uv >/dev/null 2>&1; then
    echo "No Python 3.11 or newer here; uv fetches one."
    uv venv --quiet --seed --python '>=3.11' .venv
    exec .venv/bin/python scripts/setup.py "$@"
fi

cat >&2 <<'TEXT'
uma-trio needs Python 3.11 or newer, and none was found.
  Debian 12, Ubuntu 24.04:  sudo apt install python3 python3-venv
  macOS:                    brew install python@3.12
  anywhere, without root:   install uv (https://docs.astral.sh/uv/) and run this again
A Python elsewhere: PYTHON=/path/to/python3.11 make setup
TEXT
exit 1
