#!/usr/bin/env bash
# Runs a command on the GPUs of this host; one process drives them all.
set -euo pipefail
# shellcheck source=launch/shell.sh
. "$(dirname "${BASH_SOURCE[0]}")/shell.sh"

usage() {
  cat <<'TEXT'
usage: bash launch/gpu_host.sh [options] COMMAND [flags of python -m jaxprompt COMMAND]
  --gpus=0,1,...  use these GPUs (default: all)
  --memory=0.9    share of each GPU's memory that JAX allocates (default: 0.9)
  --retries=3     maximum number of restarts after a crash; a run resumes (default: 3)
  --device=cpu    run on the CPU, to try a command out
  --dry-run       print the commands, run nothing
After an error in its input (exit code 2), the command is not restarted. SIGTERM saves the run and
stops. PYTHON=... selects the interpreter; XLA_FLAGS and NCCL's variables are passed on.
TEXT
}

gpus='' memory=0.9 retries=3 device=gpu
while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --gpus=*) gpus="${1#*=}" ;;
    --memory=*) memory="${1#*=}" ;;
    --retries=*) retries="${1#*=}" ;;
    --device=cpu | --device=gpu) device="${1#*=}" ;;
    --dry-run) dry=1 ;;
    -*) refuse "unknown option $1; see --help" ;;
    *) break ;;
  esac
  shift
done
[ $# -gt 0 ] || refuse "no command given; see --help"
[[ "$gpus" =~ ^([0-9]+(,[0-9]+)*)?$ ]] || refuse "--gpus=$gpus must list numbers, as in 0,1"
[[ "$memory" =~ ^(0?\.[0-9]*[1-9][0-9]*|1(\.0*)?)$ ]] ||
  refuse "--memory=$memory must be a share, as in 0.9"
at_least --retries "$retries" 0

set_env PYTHONPATH "$root${PYTHONPATH:+:$PYTHONPATH}"
if [ "$device" = cpu ]; then
  set_env JAX_PLATFORMS cpu
else
  [ -z "$gpus" ] || set_env CUDA_VISIBLE_DEVICES "$gpus"
  set_env XLA_PYTHON_CLIENT_MEM_FRACTION "$memory"
  set_env XLA_FLAGS "--xla_gpu_enable_latency_hiding_scheduler=true${XLA_FLAGS:+ $XLA_FLAGS}"
  look='import jax; found = jax.devices("gpu"); print(len(found), "x", found[0].device_kind)'
  run "$python" -c "$look" >&"$((dry ? 1 : 2))" ||
    refuse 'JAX sees no GPU; pip install "jax[cuda13]" or "jax[cuda12]", and look at nvidia-smi'
fi
if [ -n "$dry" ]; then
  quoted "$python" -m jaxprompt "$@"
  exit
fi

trap 'signals=$((signals + 1)); kill -TERM "$child" 2>/dev/null || true' TERM INT
while true; do
  "$python" -m jaxprompt "$@" &
  child=$!
  wait_for "$child"
  if [ "$code" -eq 0 ] || [ "$code" -eq 2 ] || [ "$signals" -gt 0 ] || [ "$retries" -eq 0 ]; then
    exit "$code"
  fi
  echo "$name: exit code $code, starting again ($retries left)" >&2
  retries=$((retries - 1))
  sleep 5 &
  wait_for $!
  [ "$signals" -eq 0 ] || exit "$code"
done
