#!/usr/bin/env bash
# Makes the environment, checks the style and runs the tests.
# usage: bash launch/test.sh [pytest arguments]
#        bash launch/test.sh --fast [pytest arguments]
#        bash launch/test.sh --all [pytest arguments]
#        bash launch/test.sh --accelerators [pytest arguments]
#        CONSTRAINTS=tests/constraints-oldest.txt bash launch/test.sh [arguments]
# --fast runs the unit tests, the data tests and the contract on two backbones: what runs by default
# and is not marked slow, by hand or for its folder (tests/conftest.py). --all adds what takes long
# while a shorter case goes the same way (marked long), the documentation site, and a real language
# model (93 MB), whose tests are skipped where it is absent. --accelerators compiles what ships for
# TPUs and GPUs, by their makers' compilers and without either: in about an hour on two cores, in an
# environment of its own (.venv-accelerators, 3 GB). CONSTRAINTS names versions to install, into
# another environment (.venv-constrained): tests/constraints-oldest.txt has the lower bounds.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
unset PYTHONDONTWRITEBYTECODE # else each of the many processes compiles all that it imports

if [ "${1:-}" = --accelerators ]; then
  export JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TPU_SKIP_MDS_QUERY=1
  VENV=.venv-accelerators
  environment requirements.txt tests/requirements-accelerators.txt launch/backbone.txt \
    launch/language_model.txt
  # libtpu compiles for one generation in a process; for another it crashes.
  failed=0
  for devices in v5e v5p v6e "a100-80 h100"; do
    echo "compiling for $devices"
    DEVICES=$devices "$VENV/bin/python" -m pytest -n "${WORKERS:-2}" tests/accelerators "${@:2}" ||
      failed=1
  done
  exit "$failed"
fi
[ -z "${CONSTRAINTS:-}" ] || VENV=.venv-constrained
environment requirements.txt tests/requirements.txt launch/backbone.txt
selected=(-m "not long")
case "${1:-}" in
  --fast) selected=(-m "not slow and not long") && shift ;;
  --all) environment docs/requirements.txt launch/language_model.txt && selected=() && shift ;;
esac
# Not on other versions: the types that a library declares change with them.
if [ -z "${CONSTRAINTS:-}" ]; then
  "$VENV/bin/ruff" check .
  "$VENV/bin/ruff" format --check .
  "$VENV/bin/mypy"
fi
# The tests write many thousands of small files: in memory, where there is room for them.
room=$(df --output=avail --block-size=G /dev/shm 2>/dev/null) || room=0
room=${room//[!0-9]/}
if [ -z "${TMPDIR:-}" ] && [ "${room:-0}" -ge 4 ]; then
  TMPDIR=$(mktemp -d -p /dev/shm)
  export TMPDIR
  trap 'rm -rf "$TMPDIR"' EXIT
fi
# What the tests of a file share is made once. tests/conftest.py puts the files in order.
"$VENV/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder \
  ${selected[@]+"${selected[@]}"} "$@"
