# shellcheck shell=bash
# Sourced: what the launchers share.
# shellcheck disable=SC2034  # variables are read by the scripts that source this

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
name="$(basename "$0")"
dry=
python="${PYTHON:-python3}"
[ -n "${PYTHON:-}" ] || [ ! -x "$root/.venv/bin/python" ] || python="$root/.venv/bin/python"

# Says why not, in one line.
refuse() {
  echo "$name: $*" >&2
  exit 2
}

# Prints words as a shell reads them.
quoted() {
  local word line=
  for word in "$@"; do
    [[ "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
    line+=" $word"
  done
  echo "${line# }"
}

# Runs a command, or prints it.
run() {
  if [ -n "$dry" ]; then quoted "$@"; else "$@"; fi
}

# Exports NAME VALUE, or prints that.
set_env() {
  run export "$1=$2"
}

# Refuses a value that is no whole number of at least LIMIT: at_least --nodes "$nodes" 1
at_least() {
  [[ "$2" =~ ^(0|[1-9][0-9]{0,8})$ ]] && [ "$2" -ge "$3" ] ||
    refuse "$1=$2 must be a whole number of at least $3"
}

# Waits for a child; a trapped signal ends the shell's own wait, not the child. Sets `code`.
signals=0
code=0
wait_for() {
  local before
  while true; do
    before=$signals code=0
    wait "$1" || code=$?
    [ "$before" -ne "$signals" ] || return 0
  done
}
