"""The method and the head that docs/extending.md writes out are taken up as it says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import TOPICS, make_backbone, sentences, write_rows

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"to be saved as\s+`(jaxprompt/[\w/]+\.py)`:\n\n```python\n(.*?)```", re.S)


def test_what_the_page_writes_trains_and_predicts(tmp_path):
    skip = shutil.ignore_patterns("__pycache__")
    for package in ("jaxprompt", "configs"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=skip)
    written = FILE.findall((ROOT / "docs/extending.md").read_text("utf-8"))
    assert [name for name, _ in written] == [
        "jaxprompt/prompts/residual.py",
        "jaxprompt/heads/mlp.py",
    ]
    for name, text in written:
        (tmp_path / name).write_text(text)

    def call(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "jaxprompt", *arguments], cwd=tmp_path, text=True, check=True,
            capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        ).stdout  # fmt: skip

    make_backbone(tmp_path / "backbone")
    train, dev = (write_rows(tmp_path / f"{n}.jsonl", sentences(n, 24)) for n in (0, 1))
    call(
        "train", "--config=base:soft", "--workdir=run", "--config.prompt.name=residual",
        "--config.prompt.length=3", "--config.head.name=mlp", "--config.head.width=8",
        "--config.backbone.path=backbone", "--config.task.name=custom", "--config.task.fields=text",
        f"--config.data.files.train={train}", f"--config.data.files.dev={dev}",
        "--config.data.max_len=24", "--config.train.total_steps=2", "--config.train.total_epochs=0",
        "--config.train.eval_steps=2", "--config.train.tracker=none", "--config.train.test=False",
    )  # fmt: skip
    call("export", "--workdir=run")
    found = json.loads(call("predict", "--prompt=run/export", "--text=the cat"))
    assert found["prediction"] in TOPICS
