"""A benchmark's own folder through the command line: train, evaluate, and a submission."""

import json

import pytest
from tiny_run import TOPICS, jaxprompt, make_config, read_lines, sentences, train_and_export

SUPERGLUE = {"dev": "val.jsonl", "test": "test.jsonl"}
GLUE = {"dev": "dev.tsv", "test": "test.tsv"}


def multirc(seed, size, hidden):
    """Writes a paragraph per line, as SuperGLUE does: what is it about?"""
    lines = []
    for number, row in enumerate(sentences(seed, size)):
        answers = [
            {"text": name, "idx": 3 * number + i} | ({} if hidden else
             {"label": int(name == row["label"])}) for i, name in enumerate(TOPICS)
        ]  # fmt: skip
        asked = [{"question": "it is about ?", "idx": number, "answers": answers}]
        passage = {"text": row["text"], "questions": asked}
        lines.append(json.dumps({"idx": number, "version": 1.1, "passage": passage}))
    return "\n".join(lines) + "\n"


def record(seed, size, hidden):
    """Writes two queries per passage: which of the animals in it is meant?"""
    lines = []
    for number, row in enumerate(sentences(seed, size)):
        words, entities, text = ("cat", "dog", "fish"), [], row["text"] + " a"
        for word in words:
            text += f" {word}"
            entities.append({"start": len(text) - len(word), "end": len(text) - 1})
        asked = [
            {"query": "it is about @placeholder .", "idx": 2 * number + i}
            | ({} if hidden else {"answers": [{"text": words[(number + i) % 3]}]})
            for i in range(2)
        ]
        passage = {"text": text, "entities": entities}
        lines.append(json.dumps({"idx": number, "passage": passage, "qas": asked}))
    return "\n".join(lines) + "\n"


def wsc(seed, size, hidden):
    """Writes a noun and a pronoun per line."""
    lines = []
    for number, row in enumerate(sentences(seed, size)):
        text = f"cat saw {row['text']} and it"
        last = len(text.split()) - 1
        target = {"span1_index": 0, "span1_text": "cat", "span2_index": last, "span2_text": "it"}
        label = {} if hidden else {"label": number % 2 == 0}
        lines.append(json.dumps({"idx": number, "text": text, "target": target} | label))
    return "\n".join(lines) + "\n"


def rte(seed, size, hidden):
    """Writes pairs, as GLUE does: does the second sentence say what the first is about?"""
    lines = ["index\tsentence1\tsentence2" + "\tlabel" * (not hidden)]
    for number, row in enumerate(sentences(seed, size)):
        named = list(TOPICS)[number % 2]
        label = "entailment" if named == row["label"] else "not_entailment"
        cells = [number, row["text"], f"it is about {named} ."] + [label] * (not hidden)
        lines.append("\t".join(map(str, cells)))
    return "\n".join(lines) + "\n"


METRICS = {"multirc": "f1a", "record": "answer_f1"}


@pytest.mark.long_cases("wsc-wsc")
@pytest.mark.parametrize(
    "name, make", [("multirc", multirc), ("record", record), ("wsc", wsc), ("rte", rte)]
)
def test_a_folder_as_it_is_downloaded(name, make, backbone, tmp_path, capsys):
    files, form = (GLUE, "glue") if name == "rte" else (SUPERGLUE, "superglue")
    suffix = files["test"].removeprefix("test")
    for seed, split in enumerate(("train", "dev", "test")):
        text = make(seed, 8, split == "test")
        (tmp_path / files.get(split, f"train{suffix}")).write_text(text, "utf-8")
    c = make_config(
        backbone, tmp_path, "soft", task__name=name, train__total_steps=2, train__eval_steps=2
    )
    result, workdir, told = train_and_export(capsys, tmp_path, c)
    assert "test" not in result
    hidden = tmp_path / files["test"]
    assert f"test is not scored: no row of {hidden} states a label" in told
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}")
    code, out, err = jaxprompt(capsys, "evaluate", *place, "--split=dev")
    assert code == 0, err
    metric = METRICS.get(name, "accuracy")
    assert json.loads(out)[metric] == result["dev"][metric]
    code, _, err = jaxprompt(capsys, "evaluate", *place, "--split=test")
    assert (code, len(err.splitlines())) == (2, 1) and "no label column 'label'" in err
    folder = tmp_path / "handed-in"
    to = (f"--input={hidden}", f"--format={form}", f"--output={folder}/")
    code, _, err = jaxprompt(capsys, "predict", f"--workdir={workdir}", *to)
    assert code == 0, err
    if name == "rte":
        lines = (folder / "RTE.tsv").read_text().splitlines()
        assert [line.split("\t")[0] for line in lines] == ["index", *map(str, range(8))]
        return
    if name == "record":
        found = read_lines(folder / "ReCoRD.jsonl")
        assert [line["idx"] for line in found] == list(range(16))
        assert {line["label"] for line in found} <= {"cat", "dog", "fish"}
        return
    if name == "wsc":
        found = read_lines(folder / "WSC.jsonl")
        assert [line["idx"] for line in found] == list(range(8))
        assert {line["label"] for line in found} <= {"True", "False"}
        return
    found = read_lines(folder / "MultiRC.jsonl")
    assert [line["idx"] for line in found] == list(range(8))
    questions = [line["passage"]["questions"] for line in found]
    numbers = [[answer["idx"] for answer in own["answers"]] for (own,) in questions]
    assert numbers == [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(8)]
