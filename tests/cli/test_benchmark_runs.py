"""A benchmark's own folder through the command line: train, evaluate, and a submission."""

import json

import pytest
from tiny_run import (
    TOPICS,
    jaxprompt,
    make_config,
    read_lines,
    sentences,
    succeed,
    train_and_export,
)

SUPERGLUE = {"train": "train.jsonl", "dev": "val.jsonl", "test": "test.jsonl"}
GLUE = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}


def multirc(seed, size, hidden):
    """Writes a paragraph per line, as SuperGLUE does: what is it about?"""
    lines = []
    for number, row in enumerate(sentences(seed, size)):
        answers = [
            {"text": name, "idx": 3 * number + i} | ({} if hidden else
             {"label": int(name == row["label"])}) for i, name in enumerate(TOPICS)
        ]  # fmt: skip
        questions = [{"question": "it is about ?", "idx": number, "answers": answers}]
        passage = {"text": row["text"], "questions": questions}
        lines.append(json.dumps({"idx": number, "version": 1.1, "passage": passage}))
    return "\n".join(lines) + "\n"


def rte(seed, size, hidden):
    """Writes pairs, as GLUE does: does the second sentence say what the first is about?"""
    lines = ["index\tsentence1\tsentence2" + ("" if hidden else "\tlabel")]
    for number, row in enumerate(sentences(seed, size)):
        topic = list(TOPICS)[number % 2]
        label = "entailment" if topic == row["label"] else "not_entailment"
        cells = [number, row["text"], f"it is about {topic} .", *([] if hidden else [label])]
        lines.append("\t".join(map(str, cells)))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", ["multirc", "rte"])
def test_a_folder_as_it_is_downloaded(name, backbone, tmp_path, capsys):
    write, files, metric = (rte, GLUE, "accuracy") if name == "rte" else (multirc, SUPERGLUE, "f1a")
    for seed, (split, file) in enumerate(files.items()):
        (tmp_path / file).write_text(write(seed, 8, split == "test"), "utf-8")
    c = make_config(
        backbone, tmp_path, "soft", task__name=name, train__total_steps=2, train__eval_steps=2
    )
    result, workdir, err = train_and_export(capsys, tmp_path, c)
    hidden = tmp_path / files["test"]
    assert "test" not in result
    assert f"test is not scored: no row of {hidden} states a label" in err
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}")
    out, _ = succeed(capsys, "evaluate", *place, "--split=dev")
    assert json.loads(out)[metric] == result["dev"][metric]
    code, _, err = jaxprompt(capsys, "evaluate", *place, "--split=test")
    assert (code, len(err.splitlines())) == (2, 1) and "no label column 'label'" in err
    folder, form = tmp_path / "submission", "glue" if name == "rte" else "superglue"
    words = (f"--input={hidden}", f"--format={form}", f"--output={folder}/")
    succeed(capsys, "predict", f"--workdir={workdir}", *words)
    if name == "rte":
        lines = (folder / "RTE.tsv").read_text().splitlines()
        assert [line.split("\t")[0] for line in lines] == ["index", *map(str, range(8))]
    else:
        lines = read_lines(folder / "MultiRC.jsonl")
        assert [line["idx"] for line in lines] == list(range(8))
        questions = [line["passage"]["questions"] for line in lines]
        ids = [[answer["idx"] for answer in question["answers"]] for (question,) in questions]
        assert ids == [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(8)]
