"""Questions with several answers: one example per candidate, from a file to predictions."""

import pytest
from tiny_run import (
    TOPICS,
    jaxprompt,
    make_config,
    read_lines,
    sentences,
    train_and_export,
    write_rows,
)

OWN = {
    "task.fields": "sentence,word", "task.question": "sentence", "task.metric": "answer_f1",
    "task.candidate": "word", "task.candidates": "options,answers", "task.placeholder": "___",
    "train.total_steps": 40, "train.eval_steps": 20, "optim.lr": 0.05,
}  # fmt: skip


def gaps(seed, size):
    """Asks what a sentence is about, of the three topics."""
    return [
        {"sentence": f"{row['text']} is ___", "options": list(TOPICS), "answers": [row["label"]]}
        for row in sentences(seed, size)
    ]


def test_a_line_per_candidate_and_a_score_per_question(backbone, tmp_path, capsys):
    for seed, (name, size) in enumerate({"train": 16, "dev": 10, "test": 8}.items()):
        write_rows(tmp_path / f"{name}.jsonl", gaps(seed, size))
    c = make_config(backbone, tmp_path, "prefix", **OWN)
    result, workdir, err = train_and_export(capsys, tmp_path, c)
    test = result["test"]
    assert list(test) == ["answer_f1", "exact_match", "accuracy"]
    assert "train 48, dev 30, test 24" in err
    found = tmp_path / "found.jsonl"
    code, _, err = jaxprompt(
        capsys,
        "predict",
        f"--workdir={workdir}",
        f"--input={tmp_path / 'test.jsonl'}",
        f"--output={found}",
    )
    assert code == 0, err
    lines = read_lines(found)
    assert len(lines) == 24 and not any("___" in line["sentence"] for line in lines)
    right = 0
    for number, row in enumerate(read_lines(tmp_path / "test.jsonl")):
        own = lines[3 * number :][:3]
        assert [line["word"] for line in own] == row["options"]
        best = max(own, key=lambda line: line["scores"]["1"])
        right += best["word"] in row["answers"]
    assert right / 8 == pytest.approx(test["exact_match"]) == pytest.approx(test["answer_f1"])
