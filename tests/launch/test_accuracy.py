"""launch/accuracy.py: what is mistyped, or fails, is told."""

import os
import subprocess
import sys

import pytest
from tiny_run import ROOT


@pytest.mark.parametrize(
    "words, told",
    [
        (["run", "--jobs=0"], "--jobs=0 must be at least 1"),
        (["run", "--only=colaa-"], "--only=colaa- begins no run; nearest: cola-"),
        (["torch"], "torch needs --mlm, a folder with a BERT and its head"),
        (["torch", "--mlm=x", "--only=foo"], "--only='foo' is unknown; known: dart, dpt, lm_bff"),
        (["peft", "--set", "train.total_epochs=0.5"], "=0.5: peft takes whole epochs"),
        (["zero_shot", "--task=cola"], "--task='cola' is unknown; known: mpqa, rte, sst2, trec"),
        (["run", "--only=boolq-full", "--jobs=3"], "3 of 3 runs failed; the lines above say why"),
    ],
)
def test_bad_input_is_a_line_and_an_exit_code(words, told, tmp_path):
    if words[0] != "run":
        pytest.importorskip("peft")
    command = [sys.executable, ROOT / "launch" / "accuracy.py", *words, "--data=none"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path}"], capture_output=True, text=True, timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert told in done.stderr.splitlines()[-1]
