#!/usr/bin/env bash
# Makes a T5 of 14 M parameters from nothing, from a folder of text.
# usage: bash launch/small_t5.sh --corpus TEXT --workdir DIR [--minutes 60] [more: launch/small.py]
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
(cd "$here" && . launch/environment.sh && environment requirements.txt)
exec "$here/.venv/bin/python" "$here/launch/small.py" t5 "$@"
