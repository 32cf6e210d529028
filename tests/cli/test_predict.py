"""Prediction from an export: every way in, one JSON line an example out, in the order given."""

import gzip
import io
import json

import numpy as np
import pytest
from tiny_run import TOPICS, jaxprompt, make_config, read_lines, sentences, write_rows

from jaxprompt.cli.train import run

STILL = dict(
    backbone__dropout=0, head__dropout=0, prompt__dropout=0, train__eval_steps=3, optim__lr=3e-2
)
TEXTS = ["the cat was near a dog", "old bread with salt", "a saw and the hammer", "猫 不 好, né?"]
LETTERED = "{text} {choices} : [mask]"


def export(c, workdir, capsys):
    """Trains and exports. -> the folder of the export"""
    run(c, str(workdir))
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    return workdir / "export"


@pytest.fixture(scope="module")
def prompt(backbone, data, tmp_path_factory):
    """The export of a prefix on the three topics."""
    from jaxprompt.__main__ import main

    workdir = tmp_path_factory.mktemp("prompt")
    run(make_config(backbone, data, "prefix", **STILL), str(workdir))
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}")
    assert main(["export", *place]) == 0
    return workdir / "export"


@pytest.fixture
def predict(capsys, monkeypatch):
    """Predicts. -> the rows"""

    def call(prompt, *flags: str, stdin: str = "") -> list[dict]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code, out, err = jaxprompt(capsys, "predict", f"--prompt={prompt}", *flags)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return call


@pytest.fixture
def expected(prompt, predict):
    """What --text gives for TEXTS."""
    return predict(prompt, *(f"--text={text}" for text in TEXTS))


def close(found: list[dict], expected: list[dict]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(
        a["label"] == b["label"]
        and np.allclose(list(a["scores"].values()), list(b["scores"].values()), rtol=0, atol=1e-6)
        for a, b in pairs
    )


def test_texts_come_back_in_order_with_every_score(expected):
    assert [row["text"] for row in expected] == TEXTS
    for row in expected:
        assert list(row) == ["text", "label", "score", "scores"]
        assert list(row["scores"]) == list(TOPICS)
        assert sum(row["scores"].values()) == pytest.approx(1.0, abs=1e-6)
        assert row["score"] == max(row["scores"].values()) == row["scores"][row["label"]]
    assert len({row["score"] for row in expected}) == len(TEXTS)


def test_one_text(prompt, predict, expected):
    assert close(predict(prompt, f"--text={TEXTS[2]}"), expected[2:3])


def test_files_and_stdin_give_the_same(prompt, predict, expected, tmp_path):
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    plain = write_rows(tmp_path / "rows.jsonl", rows)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for file in (plain, packed):
        found = predict(prompt, f"--input={file}")
        assert close(found, expected) and [row["id"] for row in found] == [0, 1, 2, 3]
        assert [row["text"] for row in found] == TEXTS
    lines = "\n".join(TEXTS)
    assert close(predict(prompt, stdin=lines), expected)
    assert close(predict(prompt, "--input=-", stdin=f"\n{lines}\n\n"), expected)
    found = predict(prompt, stdin=plain.read_text("utf-8"))
    assert close(found, expected) and [row["id"] for row in found] == [0, 1, 2, 3]
    mixed = f"{TEXTS[0]}\n" + "".join(json.dumps(row) + "\n" for row in rows[1:])
    assert close(predict(prompt, stdin=mixed), expected)


def test_the_output_file_holds_other_scripts_as_they_are(prompt, predict, expected, tmp_path):
    file = tmp_path / "out.jsonl"
    assert predict(prompt, *(f"--text={t}" for t in TEXTS), f"--output={file}") == []
    assert read_lines(file) == expected
    assert TEXTS[-1] in file.read_text("utf-8")


def test_the_size_of_a_batch_changes_nothing(prompt, predict, data):
    flags = f"--input={data / 'dev.jsonl'}"
    whole = predict(prompt, flags)
    assert [row["text"] for row in whole] == [r["text"] for r in read_lines(data / "dev.jsonl")]
    for size in (1, 7):
        assert close(predict(prompt, flags, f"--batch={size}"), whole)


def test_a_label_that_is_there_is_replaced_and_not_needed(prompt, predict, data):
    rows = read_lines(data / "dev.jsonl")[:5]
    bare = [{"text": row["text"]} for row in rows]
    hidden = [row | {"label": -1} for row in rows]
    say = lambda some: "".join(json.dumps(row) + "\n" for row in some)
    expected = predict(prompt, stdin=say(rows))
    assert close(predict(prompt, stdin=say(bare)), expected)
    assert close(predict(prompt, stdin=say(hidden)), expected)


def test_two_fields(backbone, tmp_path, predict, capsys):
    rows = [{"a": r["text"], "b": "it was new", "label": r["label"]} for r in sentences(5, 12)]
    for split in ("train", "dev"):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    c = make_config(
        backbone, tmp_path, "prefix", **STILL, task__fields="a,b", task__template="{a} [sep] {b}"
    )
    folder = export(c, tmp_path / "run", capsys)
    found = predict(folder, stdin="".join(json.dumps(row) + "\n" for row in rows))
    assert [(r["a"], r["b"]) for r in found] == [(r["a"], r["b"]) for r in rows]
    assert list(found[0]["scores"]) == list(TOPICS)
    turned = [{"a": row["b"], "b": row["a"]} for row in rows]
    other = predict(folder, stdin="".join(json.dumps(row) + "\n" for row in turned))
    assert not close(other, found)
    code, _, err = jaxprompt(capsys, "predict", f"--prompt={folder}", "--text=one")
    assert code == 2 and "the task has 2 fields, a, b" in err


@pytest.mark.parametrize("head", ["linear", "verbalizer"])
def test_choices(head, backbone, tmp_path, predict, capsys):
    rng = np.random.default_rng(0)
    rows = []
    for row in sentences(6, 24):
        options = [str(rng.choice(words)) for words in TOPICS.values()]
        label = list(TOPICS).index(row["label"])
        rows.append({"text": row["text"], "options": options, "label": label})
    for split in ("train", "dev"):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    fields = dict(task__choices="options", data__max_len=48, data__multiple=48)
    fields["head.name"] = head
    fields["task.template"] = "{text} [sep] {choice}" if head == "linear" else LETTERED
    c = make_config(backbone, tmp_path, "prefix", **STILL, **fields)
    folder = export(c, tmp_path / "run", capsys)
    bare = [{"text": row["text"], "options": row["options"]} for row in rows]
    # The last rows have fewer choices than any that was trained on.
    fewer = [row | {"options": row["options"][:2]} for row in bare[:3]]
    found = predict(folder, stdin="".join(json.dumps(row) + "\n" for row in bare + fewer))
    assert [row["options"] for row in found] == [row["options"] for row in bare + fewer]
    for row in found:
        names = row["options"] if head == "linear" else ["A", "B", "C"][: len(row["options"])]
        assert list(row["scores"]) == names and row["label"] in names
        assert sum(row["scores"].values()) == pytest.approx(1.0, abs=1e-5)
    result = json.loads((tmp_path / "run/result.json").read_text())
    index = lambda row: list(row["scores"]).index(row["label"])
    right = [index(row) == gold["label"] for row, gold in zip(found[:24], rows, strict=True)]
    assert np.mean(right) == pytest.approx(result["dev"]["accuracy"])
