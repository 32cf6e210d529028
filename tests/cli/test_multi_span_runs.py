"""Answers of several spans from a file to the predictions of an export."""

import json

import numpy as np
import pytest
from tiny_run import (
    FILLERS,
    TOPICS,
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    train_and_export,
    write_rows,
)

from jaxprompt.config.load import with_overrides
from jaxprompt.scoring.span_sets import score_span_sets

FIELDS = {
    "head.tune": True, "task.fields": "question,context", "task.answers": "answers",
    "data.max_len": 24, "data.multiple": 24, "backbone.dropout": 0.0, "optim.lr": 3e-3,
    "train.total_steps": 80, "train.eval_steps": 40,
}  # fmt: skip


def asked(seed, size):
    """Draws texts with words of every topic, of which all beasts are asked for."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(size):
        text, found = "", []
        for topic in rng.permutation([*TOPICS, *(["beast"] * (number % 2))]):
            text += " ".join(rng.choice(FILLERS, rng.integers(1, 5))) + " "
            word = str(rng.choice(TOPICS[topic]))
            found += [(len(text), word)] * (topic == "beast")
            text += f"{word} "
        answers = {"text": [w for _, w in found], "answer_start": [at for at, _ in found]}
        rows.append({"question": "beast", "context": text.strip(), "answers": answers})
    return rows


def test_learns_exports_and_predicts(tmp_path, capsys):
    backbone = make_backbone(tmp_path / "electra", "discriminator")
    for seed, (name, size) in enumerate({"train": 48, "dev": 16, "test": 16}.items()):
        write_rows(tmp_path / f"{name}.jsonl", asked(seed, size))
    c = make_config(backbone, tmp_path, "full", **{"head.name": "multi_spans"})
    c = with_overrides(c, list(FIELDS.items()))
    result, workdir, err = train_and_export(capsys, tmp_path, c)
    assert "train: 24 of 48 questions with several answers, 0 without" in err
    assert result["test"]["f1"] > 0.6, result
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={tmp_path / 'test.jsonl'}", f"--output={out}"]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    lines = read_lines(out)
    for line in lines:
        for span in line["spans"]:
            assert line["context"][span["start"] : span["end"]] == span["text"]
        assert [span["text"] for span in line["spans"]] == line["prediction"]
    scores = score_span_sets(
        "f1", [[line["answers"]["text"]] for line in lines],
        [line["prediction"] or [""] for line in lines],
    )  # fmt: skip
    code, measured, err = jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")
    assert code == 0, err
    for name, value in scores.items():
        assert value == pytest.approx(json.loads(measured)[name])
        assert value == pytest.approx(result["test"][name])
    head = json.loads((workdir / "export" / "prompt.json").read_text())["head"]
    assert head["tune"] is False and head["threshold"] == result["dev"]["threshold"]
    code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}", "--split=test")
    assert code == 0 and (workdir / "inspect" / "inspect.html").exists(), err
