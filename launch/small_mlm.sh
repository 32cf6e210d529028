#!/usr/bin/env bash
# Makes a masked LM from the body of a sentence encoder, from a folder of text.
# usage: bash launch/small_mlm.sh --corpus TEXT --workdir DIR [--minutes 60] [more: launch/small.py]
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
(cd "$here" && . launch/environment.sh && environment requirements.txt launch/backbone.txt)
exec "$here/.venv/bin/python" "$here/launch/small.py" mlm "$@"
