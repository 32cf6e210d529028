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
    "head.name": "multi_spans", "task.fields": "question,context", "task.answers": "answers",
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A discriminator, and rows of its task."""
    folder = tmp_path_factory.mktemp("spans")
    make_backbone(folder / "electra", "discriminator")
    for seed, (name, size) in enumerate({"train": 48, "dev": 16, "test": 16}.items()):
        write_rows(folder / f"{name}.jsonl", asked(seed, size))
    return folder


def prepare(folder, **fields):
    given = FIELDS | {name.replace("__", "."): value for name, value in fields.items()}
    head = {name: given.pop(name) for name in list(given) if name.startswith("head.")}
    c = make_config(folder / "electra", folder, "full", **{"head.name": head.pop("head.name")})
    return with_overrides(c, list((given | head).items()))


@pytest.mark.long
@pytest.mark.parametrize("fields", [{"head__tune": True}, {"head__layer": "linear"}], ids=str)
def test_learns_exports_and_predicts(fields, folder, tmp_path, capsys):
    result, workdir, err = train_and_export(capsys, tmp_path, prepare(folder, **fields))
    assert "train: 24 of 48 questions with several answers, 0 without" in err
    assert result["test"]["f1"] > 0.6, result
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={folder / 'test.jsonl'}", f"--output={out}"]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    lines = read_lines(out)
    for line in lines:
        for span in line["spans"]:
            assert line["context"][span["start"] : span["end"]] == span["text"]
        assert [span["text"] for span in line["spans"]] == line["prediction"]
    again = score_span_sets(
        "f1", [[line["answers"]["text"]] for line in lines],
        [line["prediction"] or [""] for line in lines],
    )  # fmt: skip
    measured = json.loads(jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[1])
    for name, value in again.items():
        assert value == pytest.approx(measured[name]) == pytest.approx(result["test"][name])
    head = json.loads((workdir / "export" / "prompt.json").read_text())["head"]
    assert head["tune"] is False
    assert head["threshold"] == result["dev"].get("threshold", 0.6)
    code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}", "--split=test")
    assert code == 0 and (workdir / "inspect" / "inspect.html").exists(), err


@pytest.mark.long
def test_a_grid_takes_the_threshold_of_each_run(folder, tmp_path, capsys):
    c = prepare(folder, head__tune=True, train__total_steps=40, train__eval_steps=20)
    c = c.replace({"runs.seeds": (0, 1)})
    config, workdir = tmp_path / "config.json", tmp_path / "runs"
    config.write_text(c.to_json())
    code, out, err = jaxprompt(capsys, "train", f"--config={config}", f"--workdir={workdir}")
    assert code == 0, err
    for seed in (0, 1):
        result = json.loads((workdir / f"seed={seed}" / "result.json").read_text())
        own = f"--workdir={workdir / f'seed={seed}'}"
        measured = json.loads(jaxprompt(capsys, "evaluate", own, "--split=test")[1])
        assert measured["f1"] == pytest.approx(result["test"]["f1"])
        assert "threshold" in result["dev"] and "threshold" not in measured
    code, out, _ = jaxprompt(capsys, "sweep", f"--table={workdir}", "--best=1")
    assert code == 0 and ", best 1 on dev | 1 |" in out


@pytest.mark.long
def test_ten_percent_of_the_questions(folder, tmp_path, capsys):
    c = prepare(folder, data__protocol="fraction", data__protocol__ratio=0.25, train__total_steps=2)
    c = c.replace({"train.eval_steps": 1})
    _, _, err = train_and_export(capsys, tmp_path, c)
    assert "train 12, dev 16" in err


def test_answers_that_are_not_there_are_named_and_counted(folder, tmp_path, refused):
    rows = asked(0, 6)
    for number in (1, 4):
        rows[number]["answers"]["text"][0] += "s"
    spoilt = write_rows(tmp_path / "train.jsonl", rows)
    c = prepare(folder, data__files__train=spoilt)
    (tmp_path / "c.json").write_text(c.to_json())
    line = refused(
        "train", f"--config={tmp_path / 'c.json'}", f"--workdir={tmp_path / 'w'}", started=True
    )
    assert "train.jsonl:2: the answer" in line and "2 of 6 rows have an answer like this" in line
