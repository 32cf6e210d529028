"""launch/accuracy: bad input and failed runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxprompt.errors import InputError
from launch.accuracy import __main__ as accuracy
from launch.accuracy.sums import write_sums

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "words, message",
    [
        (["run", "--jobs=0"], "--jobs=0 must be at least 1"),
        (["run", "--only=colaa-"], "--only=colaa- begins no run; nearest: cola-"),
        (["torch"], "torch needs --mlm, a folder with a BERT and its head"),
        (["torch", "--mlm=x", "--only=foo"], "--only='foo' is unknown; known: dart, dpt, lm_bff"),
        (["peft", "--set", "train.total_epochs=0.5"], "=0.5: peft takes whole epochs"),
        (["peft_text", "--only=full"], "--only='full' is unknown; known: prefix, soft"),
        (["peft_text", "--only=soft-txt"], "the method 'soft-txt' is unknown; nearest: soft-text"),
        (["zero_shot", "--task=cola"], "--task='cola' is unknown; known: mpqa, rte, sst2, trec"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, monkeypatch):
    if words[0] != "run":
        pytest.importorskip("peft")
    argv = ["accuracy", *words, "--data=none", f"--workdir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(InputError) as error:
        accuracy.main()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_sums_are_those_of_the_example_files(tmp_path):
    sizes = write_sums(tmp_path)
    lines = []
    for split, size in sizes.items():
        text = (tmp_path / f"{split}.csv").read_text()
        assert text == (ROOT / f"docs/examples/sums/{split}.csv").read_text()
        lines += text.splitlines()[1:]
        assert len(lines) == len(set(lines)) and size == len(text.splitlines()) - 1
    for line in lines:
        terms, _, result = line.partition(",")
        assert sum(map(int, terms.split(" + "))) == int(result)


@pytest.mark.long
def test_runs_that_fail_are_counted_and_end_with_an_exit_code(tmp_path):
    command = [sys.executable, ROOT / "launch" / "accuracy", "run", "--only=boolq-full"]
    done = subprocess.run(
        [*command, "--jobs=3", "--data=none", f"--workdir={tmp_path}"], capture_output=True,
        text=True, timeout=300, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "3 of 3 runs failed; the lines above say why" in done.stderr.splitlines()[-1]
