#!/usr/bin/env bash
#SBATCH --job-name=jaxprompt
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
# Runs a command on the nodes of a Slurm job; outside of a job it submits itself.
set -euo pipefail
# In a job this is Slurm's copy of the script, so the repository is named.
# shellcheck source=launch/shell.sh
. "${JAXPROMPT_ROOT:-$(dirname "${BASH_SOURCE[0]}")/..}/launch/shell.sh"
name=slurm.sh

usage() {
  cat <<'TEXT'
usage: bash launch/slurm.sh [options] COMMAND [flags of python -m jaxprompt COMMAND]
  --nodes=1          number of nodes (default: 1)
  --gpus-per-node=8  GPUs per node (default: 8)
  --per-gpu          one process per GPU (default: one process per node for all of its GPUs)
  --sbatch=OPTION    an option for sbatch, e.g. --sbatch=--partition=gpu; can be repeated
  --dry-run          print the commands, run nothing
Two minutes before its time limit, or if Slurm preempts it by requeueing, the job saves the run and
queues itself again. The workdir must be on a disk that all nodes share. PYTHON=... selects the
interpreter.
TEXT
}

nodes=1 gpus=8 per_gpu='' options=() given=()
while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --nodes=*) nodes="${1#*=}" ;;
    --gpus-per-node=*) gpus="${1#*=}" ;;
    --per-gpu) per_gpu=1 ;;
    --sbatch=-*) options+=("${1#*=}") ;;
    --dry-run) dry=1 ;;
    -*) refuse "unknown option $1; see --help" ;;
    *) break ;;
  esac
  [ "$1" = --dry-run ] || given+=("$1")
  shift
done
[ $# -gt 0 ] || refuse "no command given; see --help"
at_least --nodes "$nodes" 1
at_least --gpus-per-node "$gpus" 1
tasks=1
[ -z "$per_gpu" ] || tasks="$gpus"
sizes=("--nodes=$nodes" "--ntasks-per-node=$tasks")
step=(srun "${sizes[@]}" --kill-on-bad-exit=1 "$python" -m jaxprompt "$@" --cluster)

if [ -z "${SLURM_JOB_ID:-}" ]; then
  command -v sbatch >/dev/null || [ -n "$dry" ] || refuse "no sbatch here; call it where Slurm is"
  set_env JAXPROMPT_ROOT "$root"
  run sbatch "${sizes[@]}" "--gpus-per-node=$gpus" "${options[@]}" \
    "$root/launch/slurm.sh" "${given[@]}" "$@"
  [ -n "$dry" ] || exit 0
fi

set_env PYTHONPATH "$root${PYTHONPATH:+:$PYTHONPATH}"
# Without it JAX gives each task of Slurm one GPU.
[ -n "$per_gpu" ] || set_env JAX_LOCAL_DEVICE_IDS "$(seq -s, 0 $((gpus - 1)))"
set_env XLA_FLAGS "--xla_gpu_enable_latency_hiding_scheduler=true${XLA_FLAGS:+ $XLA_FLAGS}"
if [ -n "$dry" ]; then
  quoted "${step[@]}"
  exit
fi

# SIGUSR1: the time is nearly over. All tasks get SIGTERM, save the same step and end with 0.
trap 'signals=$((signals + 1)); scancel --signal=TERM "$SLURM_JOB_ID"' USR1
# SIGTERM: cancelled or preempted. Slurm tells the tasks itself.
trap 'signals=$((signals + 1)); requeue=' TERM
requeue=1
"${step[@]}" &
wait_for $!
if [ "$signals" -gt 0 ] && [ -n "$requeue" ] && [ "$code" -ne 2 ]; then
  echo "$name: saved before the time is over, queued again"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
