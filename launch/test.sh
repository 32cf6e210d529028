#!/usr/bin/env bash
# Makes the environment, checks the style and runs the tests.
# usage: bash launch/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh

environment requirements.txt tests/requirements.txt launch/backbone.txt
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# What the tests of a file share is made once.
.venv/bin/python -m pytest -n "${WORKERS:-2}" --dist loadfile "$@"
