"""Questions with several answers: one example per candidate, from a file to predictions."""

import json

import pytest
from tiny_run import TOPICS, jaxprompt, make_config, read_lines, sentences, write_rows

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gaps")
    for seed, (name, size) in enumerate({"train": 16, "dev": 10, "test": 8}.items()):
        write_rows(folder / f"{name}.jsonl", gaps(seed, size))
    return folder


def test_a_line_per_candidate_and_a_score_per_question(backbone, folder, tmp_path, capsys):
    config, workdir = tmp_path / "c.json", f"--workdir={tmp_path / 'run'}"
    config.write_text(make_config(backbone, folder, "prefix", **OWN).to_json())
    code, out, err = jaxprompt(capsys, "train", f"--config={config}", workdir)
    assert code == 0, err
    test = json.loads(out)["test"]
    assert list(test) == ["answer_f1", "exact_match", "accuracy"]
    assert "train 48, dev 30, test 24" in err
    assert jaxprompt(capsys, "export", workdir)[0] == 0
    found = tmp_path / "found.jsonl"
    code, _, err = jaxprompt(
        capsys, "predict", workdir, f"--input={folder / 'test.jsonl'}", f"--output={found}"
    )
    assert code == 0, err
    lines = read_lines(found)
    assert len(lines) == 24 and not any("___" in line["sentence"] for line in lines)
    right = 0
    for number, row in enumerate(read_lines(folder / "test.jsonl")):
        own = lines[3 * number :][:3]
        assert [line["word"] for line in own] == row["options"]
        best = max(own, key=lambda line: line["scores"]["1"])
        right += best["word"] in row["answers"]
    assert right / 8 == pytest.approx(test["exact_match"]) == pytest.approx(test["answer_f1"])
