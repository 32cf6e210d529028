"""Questions with several answers: one example per candidate, from a file to predictions."""

import json

import pytest
from tiny_run import TOPICS, jaxprompt, make_config, read_lines, sentences, write_rows

from jaxprompt.data.tasks.readers.candidates import example_rows
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.errors import InputError

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


def test_a_field_named_question_keeps_its_text():
    names = {"fields": ("question", "word"), "question": ("question",), "candidate": "word"}
    task = custom_task(**names, candidates=("options", "answers"), placeholder="___")
    row = {"question": "a ___ ?", "options": ["cat", "dog"], "answers": ["dog"]}
    found = [read_example(task, own, "x:1", False) for own in example_rows(task, row, "x:1")]
    assert [own.fields["question"] for own in found] == ["a cat ?", "a dog ?"]
    assert found[0].question == found[1].question != ""


def test_a_column_of_the_question_that_is_missing_is_named():
    """Of rows with answers: others are not scored, and need not tell their questions apart."""
    names = {"fields": ("text", "word"), "question": ("text", "aks"), "metric": "f1a"}
    task, row = custom_task(**names, labels=("0", "1")), {"text": "a", "ask": "b", "word": "c"}
    told = "x:1: column 'aks' of task.question is missing; columns: text, ask, word, label"
    for needed in (True, False):
        with pytest.raises(InputError, match=told):
            read_example(task, row | {"label": 1}, "x:1", needed)
    assert read_example(task, row, "x:1", False).label == -1
    names |= {"candidate": "word", "candidates": ("options", "answers")}
    task, row = custom_task(**names), {"text": "a", "ask": "b", "options": ["c", "d"]}
    with pytest.raises(InputError, match="x:1: column 'aks' of task.question is missing"):
        example_rows(task, row | {"answers": ["c"]}, "x:1")
    assert len(example_rows(task, row | {"answers": []}, "x:1")) == 2


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"task.question": ""}, "set task.question"),
        ({"task.candidate": "", "task.candidates": ""}, "set task.candidate"),
        ({"task.candidates": "options"}, "task.candidates=options must be two columns"),
        ({"task.candidate": "answer"}, "task.candidate='answer' is not in task.fields="),
        ({"task.metric": "f1"}, ""),
    ],
)
def test_what_does_not_fit_is_named(fields, told, backbone, folder, tmp_path, capsys):
    (tmp_path / "c.json").write_text(
        make_config(backbone, folder, "prefix", **OWN | fields).to_json()
    )
    code, _, err = jaxprompt(capsys, "validate", f"--config={tmp_path / 'c.json'}")
    assert code == (2 if told else 0) and told in err


@pytest.mark.parametrize(
    "row, told",
    [
        ({"options": "beast"}, "column 'options' must be a list of 1 or more texts"),
        ({"options": []}, "column 'options' must be a list of 1 or more texts"),
        ({"options": ["beast", None]}, "column 'options' is null, not text"),
        ({"answers": None}, "column 'answers' lists no correct candidate"),
    ],
)
def test_rows_that_are_wrong_are_named(row, told, backbone, folder, tmp_path, refused):
    rows = gaps(0, 4)
    rows[2] |= row
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "dev.jsonl", gaps(1, 2))
    (tmp_path / "c.json").write_text(make_config(backbone, tmp_path, "prefix", **OWN).to_json())
    line = refused("validate", f"--config={tmp_path / 'c.json'}", started=True)
    assert "train.jsonl:3: " in line and told in line
