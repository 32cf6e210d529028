#!/usr/bin/env bash
# Measures steps at published sizes on the devices of this host, and PEFT's, in ten minutes.
set -euo pipefail
# shellcheck source=launch/shell.sh
. "$(dirname "${BASH_SOURCE[0]}")/../shell.sh"

usage() {
  cat <<'TEXT'
usage: bash launch/bench/device_session.sh [options] [CASE ...]
  --output=device.jsonl  a JSON object per case; .md is its table, .log what was printed to stderr
  --limit=600            seconds of all cases; those that are left at the end are skipped
  --case-limit=120       seconds of one case, compilation included
  --set=FIELD=VALUE      sets a config field in every case; can be repeated
  --install=cuda12       first installs what JAX needs for these devices (or cuda13, tpu), in the
                         version of the JAX that is installed
  --tiny                 runs all cases on the CPU at tiny shapes, which takes minutes
  --dry-run              prints the commands, runs nothing
`python launch/bench device --help` lists the cases, the most important first. Each case that fails
loses only itself. PEFT's cases are skipped without PEFT and a torch that sees a GPU, and meshes of
two devices without these. PYTHON=... selects the interpreter; XLA_FLAGS are passed on.
TEXT
}

output=device.jsonl limit=600 install='' tiny='' options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --output=?*) output="${1#*=}" ;;
    --limit=*) limit="${1#*=}" ;;
    --case-limit=* | --set=*) options+=("$1") ;;
    --install=cuda12 | --install=cuda13 | --install=tpu) install="${1#*=}" ;;
    --tiny) tiny=1 options+=("$1") ;;
    --dry-run) dry=1 ;;
    -*) refuse "unknown option $1; see --help" ;;
    *) break ;;
  esac
  shift
done
at_least --limit "$limit" 1

set_env PYTHONPATH "$root${PYTHONPATH:+:$PYTHONPATH}"
# JAX that is installed meets the requirement, so that its version stays.
[ -z "$install" ] || run "$python" -m pip install --quiet "jax[$install]"
if [ -z "$tiny" ]; then # as launch/gpu_host.sh
  set_env XLA_FLAGS "--xla_gpu_enable_latency_hiding_scheduler=true${XLA_FLAGS:+ $XLA_FLAGS}"
fi
run "$python" "$root/launch/bench" device "--output=$output" "--limit=$limit" \
  ${options[@]+"${options[@]}"} "$@"
