"""Numbers from a file to the answers of an exported prompt, on a tiny backbone."""

import json

import numpy as np
import pytest
from tiny_run import (
    FILLERS,
    TOPICS,
    jaxprompt,
    make_config,
    read_lines,
    train_and_export,
    write_rows,
)

OWN = {
    "head.name": "regression", "task.fields": "sentence", "task.number": "beasts",
    "task.limits": "0,4", "train.total_steps": 60, "train.eval_steps": 20, "optim.lr": 0.02,
}  # fmt: skip


def counted(seed, size):
    """Draws texts with up to four beasts among other words; their number is asked for."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(size):
        words = [*rng.choice(TOPICS["beast"], number % 5), *rng.choice(FILLERS, 6)]
        rows.append({"sentence": " ".join(map(str, rng.permutation(words))), "beasts": number % 5})
    return rows


def test_it_learns_and_the_export_answers_as_the_run(backbone, tmp_path, capsys):
    for seed, (name, size) in enumerate({"train": 60, "dev": 20, "test": 20}.items()):
        write_rows(tmp_path / f"{name}.jsonl", counted(seed, size))
    c = make_config(backbone, tmp_path, "prefix", **OWN)
    result, workdir, err = train_and_export(capsys, tmp_path, c)
    assert "beasts in train: 60 numbers, 0 to 4, mean 2" in err
    test = result["test"]
    assert list(test) == ["pearson", "spearman"] and test["pearson"] > 0.5, test
    given = tmp_path / "given.jsonl"
    rows = read_lines(tmp_path / "test.jsonl")
    write_rows(given, [{**row, "beasts": -1} if not i else row for i, row in enumerate(rows)])
    code, out, err = jaxprompt(capsys, "predict", f"--workdir={workdir}", f"--input={given}")
    assert code == 0 and "on 19 of 20 examples, those with a label" in err, err
    found = [json.loads(line)["prediction"] for line in out.splitlines()]
    assert all(0 <= number <= 4 for number in found)
    right = np.array([row["beasts"] for row in rows])
    # Numbers within the limits are what the run measured without them, save at both ends.
    assert np.corrcoef(found, right)[0, 1] == pytest.approx(test["pearson"], abs=0.1)
