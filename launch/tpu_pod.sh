#!/usr/bin/env bash
# Runs a command on all workers of a Cloud TPU slice: makes it, installs, runs, watches, fetches logs.
set -euo pipefail
# shellcheck source=launch/shell.sh
. "$(dirname "${BASH_SOURCE[0]}")/shell.sh"

usage() {
  cat <<'TEXT'
usage: bash launch/tpu_pod.sh --name=NAME --zone=ZONE [options] COMMAND [flags of jaxprompt COMMAND]
       bash launch/tpu_pod.sh --name=NAME --zone=ZONE --delete
  --type=TYPE        accelerator type, if the slice must be created (default: v5litepod-16)
  --version=VERSION  runtime version of its hosts (default: v2-alpha-tpuv5-lite)
  --spot             create a slice that can be preempted
  --queued           request it as a queued resource of the same name
  --project=PROJECT  project (default: that of gcloud)
  --before=COMMAND   run this on every worker first, e.g. to mount the shared disk
  --logs=FOLDER      folder for downloaded logs (default: logs/NAME)
  --poll=60          seconds between two checks of the slice (default: 60)
  --retries=3        maximum number of restarts after a crash; a run resumes (default: 3)
  --delete           delete the slice after the command, or now if there is no command
  --dry-run          print the commands, run nothing
A preempted slice is created again, and the run resumes. After an error in its input (exit code 2),
the command is not restarted. The workdir must be on the shared disk. If you stop this script, the
run continues on the slice; the same command follows it again. LIBTPU_INIT_ARGS is passed on.
TEXT
}

slice='' zone='' type=v5litepod-16 version=v2-alpha-tpuv5-lite spot='' queued='' project=''
before='' logs='' poll=60 retries=3 delete=''
while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --name=*) slice="${1#*=}" ;;
    --zone=*) zone="${1#*=}" ;;
    --type=*) type="${1#*=}" ;;
    --version=*) version="${1#*=}" ;;
    --spot) spot=--spot ;;
    --queued) queued=1 ;;
    --project=*) project="${1#*=}" ;;
    --before=*) before="${1#*=}" ;;
    --logs=*) logs="${1#*=}" ;;
    --poll=*) poll="${1#*=}" ;;
    --retries=*) retries="${1#*=}" ;;
    --delete) delete=1 ;;
    --dry-run) dry=1 ;;
    -*) refuse "unknown option $1; see --help" ;;
    *) break ;;
  esac
  shift
done
[ -n "$slice" ] || refuse "--name is missing; see --help"
[ -n "$zone" ] || refuse "--zone is missing; see --help"
[ $# -gt 0 ] || [ -n "$delete" ] || refuse "no command given; see --help"
at_least --poll "$poll" 0
at_least --retries "$retries" 0
[ -n "$dry" ] || command -v gcloud >/dev/null || refuse "no gcloud here; install the Google Cloud CLI"
logs="${logs:-logs/$slice}"
where=("--zone=$zone" ${project:+"--project=$project"})
tpu=(gcloud compute tpus tpu-vm)
request=(gcloud compute tpus queued-resources)

create() {
  local kind=("--accelerator-type=$type")
  if [ -n "$queued" ]; then
    run "${request[@]}" create "$slice" "--node-id=$slice" "${where[@]}" "${kind[@]}" \
      "--runtime-version=$version" ${spot:+"$spot"}
  else
    run "${tpu[@]}" create "$slice" "${where[@]}" "${kind[@]}" "--version=$version" ${spot:+"$spot"}
  fi
}

delete_slice() {
  if [ -n "$queued" ]; then
    run "${request[@]}" delete "$slice" "${where[@]}" --force --quiet
  else
    run "${tpu[@]}" delete "$slice" "${where[@]}" --quiet
  fi
}

# Prints READY, PREEMPTED and the like, ABSENT where there is no slice, UNKNOWN without an answer.
state() {
  local said errors
  errors="$(mktemp)" # apart: gcloud warns there of what is no state
  if said="$("${tpu[@]}" describe "$slice" "${where[@]}" "--format=value(state)" 2>"$errors")"; then
    echo "$said"
  elif grep -qE "NOT_FOUND|not found" "$errors"; then
    echo ABSENT
  else
    echo "$name: $(cat "$errors")" >&2
    echo UNKNOWN
  fi
  rm -f "$errors"
}

on_workers() {
  run "${tpu[@]}" ssh "$slice" "${where[@]}" "--worker=$1" "--command=$2"
}

# Copies the repository to all workers and installs it beside a Python that is new enough.
install() ( # a subshell: its trap is its own
  folder=FOLDER
  if [ -z "$dry" ]; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
  fi
  packed="$folder/jaxprompt.tgz"
  run tar -czf "$packed" --exclude=.git --exclude='.venv*' --exclude=.quickstart --exclude=logs --exclude=runs -C "$root" . &&
    run "${tpu[@]}" scp "$packed" "$slice:jaxprompt.tgz" "${where[@]}" --worker=all &&
    on_workers all "mkdir -p jaxprompt && tar -xzf jaxprompt.tgz -C jaxprompt && cd jaxprompt &&\
 python3 -m pip install -q --user uv && python3 -m uv venv -q --clear --python 3.12 .venv &&\
 python3 -m uv pip install -q -r requirements.txt 'jax[tpu]'" || return 1
  [ -z "$before" ] || on_workers all "$before"
)

# Starts the command on all workers; it goes on without this script. A worker waits for its last run.
start() {
  local command
  command="$(quoted env ${LIBTPU_INIT_ARGS:+"LIBTPU_INIT_ARGS=$LIBTPU_INIT_ARGS"} \
    .venv/bin/python -m jaxprompt "$@" --cluster)"
  on_workers all "cd jaxprompt && rm -f run.exit &&\
 (setsid flock run.lock bash -c $(quoted "$command >>run.log 2>&1; echo \$? >run.exit") \
</dev/null >/dev/null 2>&1 &)"
}

# Prints "running", the exit code, or nothing where nothing has run.
look() {
  on_workers 0 "cd jaxprompt 2>/dev/null || exit 0; if flock -n run.lock true; then\
 cat run.exit 2>/dev/null || true; else echo running; fi"
}

fetch() {
  run "${tpu[@]}" scp "$slice:jaxprompt/run.log" "$logs/worker-$1.log" "${where[@]}" "--worker=$1"
}

fetch_all() {
  local workers i
  workers="$("${tpu[@]}" describe "$slice" "${where[@]}" \
    "--format=value(networkEndpoints[].ipAddress)" | tr ';' '\n' | grep -c . || true)"
  for ((i = 0; i < workers; i++)); do fetch "$i" || true; done
}

finish() {
  [ -z "$delete" ] || delete_slice
  exit "$1"
}

[ $# -gt 0 ] || finish 0
if [ -n "$dry" ]; then
  create
  install
  start "$@"
  quoted "${tpu[@]}" describe "$slice" "${where[@]}" "--format=value(state)"
  look
  fetch 0
  finish 0
fi

mkdir -p "$logs"
asked='' started='' made='' known=''
while true; do
  state="$(state)"
  [ "$state" != UNKNOWN ] || [ -n "$known" ] || refuse "gcloud cannot look at $slice; see above"
  known=1
  case "$state" in
    READY)
      status="$(look)" || status=unknown
      case "$status" in
        unknown) ;;
        running)
          started=1
          fetch 0 || true
          ;;
        *)
          if [ -z "$started" ]; then
            ! install || ! start "$@" || started=1
          elif [ "$status" = 0 ] || [ "$status" = 2 ] || [ "$retries" -eq 0 ]; then
            fetch_all
            echo "$name: exit code ${status:-unknown}, logs in $logs"
            finish "${status:-1}"
          else
            echo "$name: exit code ${status:-unknown}, starting again ($retries left)" >&2
            retries=$((retries - 1))
            start "$@" || true
          fi
          ;;
      esac
      ;;
    PREEMPTED | TERMINATED | STOPPED | SUSPENDED)
      echo "$name: $slice was preempted, making it again" >&2
      delete_slice || true
      asked='' started=''
      ;;
    ABSENT)
      # After a preemption there may be none to be had for a while.
      if [ -z "$asked" ]; then
        if create; then
          asked=1
        elif [ -z "$made" ]; then
          refuse "$slice cannot be made; see above"
        fi
        made=1 started=''
      elif [ -z "$queued" ]; then
        asked=''
      fi
      ;;
  esac
  sleep "$poll"
done
