#!/usr/bin/env bash
# Builds the documentation site, with its search, to be read without a network. A warning, such as
# a link that leads nowhere, is an error.
# usage: bash launch/docs.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh

[ $# = 0 ] || { echo "usage: bash launch/docs.sh" >&2; exit 2; }
environment requirements.txt docs/requirements.txt
"$VENV/bin/python" -m sphinx -q -E -W --keep-going -d build/doctrees docs build/site
echo "build/site/index.html"
