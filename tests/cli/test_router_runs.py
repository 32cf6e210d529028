"""A router of the training examples of runs."""

import json
import shutil

import pytest
from tiny_run import jaxprompt, read_lines, write_rows


@pytest.fixture
def two(run, tmp_path):
    """The export of a run, and a copy of it elsewhere."""
    copy = shutil.copytree(run / "export", tmp_path / "second")
    return [f"--prompt=first={run / 'export'}", f"--prompt={copy}"]


def test_the_training_examples_of_a_run_are_read(run, two, data, tmp_path, capsys, refused):
    rows = [{"text": "a b c d e " + row["text"]} for row in read_lines(data / "dev.jsonl")]
    files = f"--examples=second={write_rows(tmp_path / 'second.jsonl', rows)}"
    code, out, err = jaxprompt(capsys, "router", *two, files, "--max-len=24", "--accuracy=0.6")
    assert code == 0, err
    assert json.loads(out)["router"] == str(run / "router")
    counts = json.loads((run / "router" / "prompt.json").read_text())["router"]["held_out"]
    train = read_lines(data / "train.jsonl")
    assert sum(counts["first"].values()) == len(train)
    assert "prompt second: " in refused("router", *two)
    # Of a run whose data have changed since.
    config = json.loads((run / "config.json").read_text())
    config["data"]["files"]["train"] = str(write_rows(tmp_path / "train.jsonl", train[1:]))
    (run / "config.json").write_text(json.dumps(config))
    line = refused("router", *two, files)
    assert f"prompt first: the training examples of {run} have changed since" in line
    assert "--examples=first=FILE" in line
