"""Prediction from an export: every way in, one JSON line an example out, in the order given."""

import gzip
import io
import json
import os
import threading

import numpy as np
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

from jaxprompt.runs.train import train_prompt

STILL = dict(
    backbone__dropout=0, head__dropout=0, prompt__dropout=0, train__eval_steps=3, optim__lr=3e-2
)
TEXTS = ["the cat was near a dog", "old bread with salt", "a saw and the hammer", "猫 不 好, né?"]


@pytest.fixture(scope="module")
def prompt(backbone, data, tmp_path_factory):
    """The export of a prefix on the three topics."""
    from jaxprompt.__main__ import main

    workdir = tmp_path_factory.mktemp("prompt")
    train_prompt(make_config(backbone, data, "prefix", **STILL), str(workdir))
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
        call.said = err.splitlines()
        return [json.loads(line) for line in out.splitlines() if line]

    return call


@pytest.fixture
def expected(prompt, predict):
    """What --text gives for TEXTS."""
    return predict(prompt, *(f"--text={text}" for text in TEXTS))


def close(found: list[dict], expected: list[dict]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(
        a["prediction"] == b["prediction"]
        and np.allclose(list(a["scores"].values()), list(b["scores"].values()), rtol=0, atol=1e-6)
        for a, b in pairs
    )


def test_texts_come_back_in_order_with_every_score(expected):
    assert [row["text"] for row in expected] == TEXTS
    for row in expected:
        assert list(row) == ["text", "prediction", "score", "scores"]
        assert list(row["scores"]) == list(TOPICS)
        assert sum(row["scores"].values()) == pytest.approx(1.0, abs=1e-6)
        assert row["score"] == max(row["scores"].values()) == row["scores"][row["prediction"]]
    assert len({row["score"] for row in expected}) == len(TEXTS)


def test_the_output_goes_where_links_and_pipes_lead(prompt, predict, expected, tmp_path):
    target, link, pipe = (tmp_path / name for name in ("target.jsonl", "link", "pipe"))
    link.symlink_to(target.name)
    texts = [f"--text={text}" for text in TEXTS]
    assert predict(prompt, *texts, f"--output={link}") == []
    assert link.is_symlink() and read_lines(target) == expected
    assert TEXTS[-1] in target.read_text("utf-8")  # other scripts as they are
    os.mkfifo(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.extend(read_lines(pipe)))
    reader.start()
    assert predict(prompt, *texts, f"--output={pipe}") == []
    reader.join(60)
    assert pipe.is_fifo() and found == expected


def test_the_size_of_a_batch_changes_nothing(prompt, predict, data):
    flags = f"--input={data / 'dev.jsonl'}"
    whole = predict(prompt, flags)
    assert [row["text"] for row in whole] == [r["text"] for r in read_lines(data / "dev.jsonl")]
    assert close(predict(prompt, flags, "--batch=7"), whole)


def say(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_label_that_is_there_stays_and_is_compared(prompt, predict, data):
    rows = read_lines(data / "dev.jsonl")[:6]
    expected = predict(prompt, stdin=say({"text": row["text"]} for row in rows))
    assert predict.said == []  # without labels there is nothing to tell
    found = predict(prompt, stdin=say(rows))
    assert close(found, expected)
    assert [row["label"] for row in found] == [row["label"] for row in rows]
    right = [row["prediction"] == row["label"] for row in found]
    share = f"accuracy {np.mean(right):.4f} on 6 of 6 examples, those with a label"
    assert 0 < sum(right) and predict.said == [share]
    wrong = rows[:1] + [row | {"label": "beast"} for row in rows[1:]]
    found = predict(prompt, stdin=say(wrong))
    right = [row["prediction"] == row["label"] for row in found]
    assert predict.said == [f"accuracy {np.mean(right):.4f} on 6 of 6 examples, those with a label"]


def test_labels_that_are_absent_hidden_or_unknown_are_no_hindrance(prompt, predict, data):
    rows = read_lines(data / "dev.jsonl")[:6]
    expected = predict(prompt, stdin=say(rows))
    odd = [-1, None, "", "bird", ["beast"]]
    given = [row | {"label": label} for row, label in zip(rows, odd, strict=False)] + rows[5:]
    found = predict(prompt, stdin=say(given))
    assert close(found, expected)
    assert [row["label"] for row in found] == [*odd, rows[5]["label"]]
    unknown, told = predict.said
    assert unknown == (
        "labels unknown to task custom: 2 of 6 examples, the first 'bird' at stdin:4; they "
        "are treated as unlabelled"
    )
    assert told.startswith("accuracy ") and told.endswith(" on 1 of 6 examples, those with a label")


def test_a_column_of_the_input_is_never_lost(prompt, predict, capsys, monkeypatch):
    row = {"text": "a cat", "score": 7, "id": "x", "prediction": "tool", "error": "old"}
    for names in (("score",), ("score", "prediction")):
        given = {"text": "a cat"} | {name: row[name] for name in names}
        monkeypatch.setattr("sys.stdin", io.StringIO(say([{"text": "a dog"}, given])))
        code, out, err = jaxprompt(capsys, "predict", f"--prompt={prompt}")
        assert (code, out) == (2, "") and err.count("\n") == 1
        first = "prediction" if "prediction" in names else "score"
        assert f"stdin:2: the input already has a column '{first}'" in err and "--prefix=P" in err
    (found,) = predict(prompt, "--prefix=our_", stdin=say([row]))
    assert {name: found[name] for name in row} == row
    assert list(found)[len(row) :] == ["our_prediction", "our_score", "our_scores"]
    assert found["our_scores"][found["our_prediction"]] == found["our_score"]
    monkeypatch.setattr("sys.stdin", io.StringIO(say([{"text": "a", "error": 1}])))
    code, _, err = jaxprompt(capsys, "predict", f"--prompt={prompt}", "--on-error=skip")
    assert code == 2 and "stdin:1: the input already has a column 'error'" in err


BROKEN = [
    b'{"text": "a cat"}', b"", b'{"text": ', b"plain words", b"  ", b'{"txt": "a dog", "id": 4}',
    b'{"text": null}', b"caf\xe9", b'{"text": "a saw", "id": 5}',
]  # fmt: skip
WHY = {
    3: "broken JSON", 6: "no column 'text'", 7: "'text' is null",
    8: "not UTF-8 (byte 0xe9 at column 4)",
}  # fmt: skip


@pytest.mark.parametrize("way", ["stdin", "jsonl.gz"])
def test_each_line_of_the_input_has_one_in_its_place(way, prompt, tmp_path, capsys, monkeypatch):
    """Also blank ones; with --on-error=skip what is broken has an error there, else all stops."""
    lines = [line for line in BROKEN if way == "stdin" or line != b"plain words"]
    why = {number - (way != "stdin" and number > 4): text for number, text in WHY.items()}
    content, flags = b"\n".join(lines) + b"\n", []
    if way != "stdin":
        path = tmp_path / f"in.{way}"
        path.write_bytes(gzip.compress(content))
        flags = [f"--input={path}"]
    name = "stdin" if way == "stdin" else str(path)

    def call(*more):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "ascii"))
        return jaxprompt(capsys, "predict", f"--prompt={prompt}", *flags, *more)

    code, out, err = call()
    assert (code, out) == (2, "") and f"{name}:3: broken JSON" in err
    code, out, err = call("--on-error=skip")
    assert code == 0
    found = out.split("\n")
    assert found.pop() == "" and len(found) == len(lines)
    for number, (line, answer) in enumerate(zip(lines, found, strict=True), 1):
        if not line.strip():
            assert answer == ""
            continue
        row = json.loads(answer)
        if number in why:
            assert row["error"].startswith(f"{name}:{number}: ") and why[number] in row["error"]
            assert "prediction" not in row
        else:
            assert row["prediction"] in TOPICS and "error" not in row
            assert row["text"] in ("a cat", "plain words", "a saw")
    if way == "stdin":
        assert json.loads(found[5]) | {"error": ""} == {"txt": "a dog", "id": 4, "error": ""}
    said = f"4 of {len(lines)} lines cannot be read, the first is {name}:3: broken JSON"
    assert err.startswith(said) and err.count("\n") == 1


def test_input_without_a_line_that_can_be_read(prompt, predict, capsys):
    (row,) = predict(prompt, "--on-error=skip", stdin="{\n")
    assert list(row) == ["error"]
    code, _, err = jaxprompt(capsys, "predict", f"--prompt={prompt}", "--on-error=ignore")
    assert code == 2 and "--on-error='ignore' is unknown" in err


def test_tables_are_read_too(prompt, predict, expected, tmp_path):
    """A row's columns stay as they are read, the index of pandas among them."""
    path = tmp_path / "in.csv"
    cells = "".join(f'{i};"{text}";tool\n' for i, text in enumerate(TEXTS))
    path.write_text(";text;label\n" + cells, "utf-8")
    found = predict(prompt, f"--input={path}")
    assert close(found, expected)
    assert [row[""] for row in found] == ["0", "1", "2", "3"]
    assert [row["label"] for row in found] == ["tool"] * 4
    right = np.mean([row["prediction"] == "tool" for row in found])
    assert predict.said == [f"accuracy {right:.4f} on 4 of 4 examples, those with a label"]


def test_texts_that_are_cut_are_told(prompt, predict):
    predict(prompt, "--text=the cat", "--text=" + "the cat " * 30)
    assert predict.said == ["texts cut to 24 tokens: 1 of 2"]


def test_evaluate_writes_the_predictions_of_a_split(prompt, predict, data, tmp_path, capsys):
    """Those of `predict` on the same rows, and as it writes them."""
    workdir, out = prompt.parent, tmp_path / "out.jsonl"
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}", "--split=test")
    code, measured, err = jaxprompt(capsys, "evaluate", *place, f"--output={out}")
    assert code == 0, err
    found = read_lines(out)
    expected = predict(prompt, f"--input={data / 'test.jsonl'}")
    assert close(found, expected) and [list(row) for row in found] == [list(r) for r in expected]
    assert [row["text"] for row in found] == [row["text"] for row in expected]
    right = [row["prediction"] == row["label"] for row in found]
    assert json.loads(measured)["accuracy"] == np.mean(right)
    assert jaxprompt(capsys, "evaluate", *place, f"--output={out}", "--prefix=p_")[0] == 0
    assert list(read_lines(out)[0]) == ["text", "label", "p_prediction", "p_score", "p_scores"]


def test_evaluate_scores_an_export_on_rows(prompt, predict, data, tmp_path, capsys, monkeypatch):
    """By itself, with the metrics that its run has on them; what cannot be scored is refused."""
    place, flag = f"--workdir={prompt.parent}", f"--prompt={prompt}"
    whole = json.loads(jaxprompt(capsys, "evaluate", place, "--split=test")[1])
    code, out, err = jaxprompt(capsys, "evaluate", flag, f"--input={data / 'test.jsonl'}")
    assert code == 0, err
    assert {"split": "test"} | json.loads(out) == pytest.approx(whole, abs=1e-6)

    rows = read_lines(data / "test.jsonl")[:4]
    monkeypatch.setattr("sys.stdin", io.StringIO(say([*rows, rows[0] | {"label": "unicorn"}])))
    code, out, err = jaxprompt(capsys, "evaluate", flag, "--input=-")
    assert code == 0 and json.loads(out)["examples"] == 4 and "unicorn" in err

    for row, why in (
        ({"text": "a cat"}, "no row has a known label of its prompt's task"),
        ({"label": rows[0]["label"]}, "in.jsonl:1: "),
    ):
        (tmp_path / "in.jsonl").write_text(say([row]))
        code, out, err = jaxprompt(capsys, "evaluate", flag, f"--input={tmp_path / 'in.jsonl'}")
        assert code == 2 and why in err and not out and "--on-error" not in err
    code, _, err = jaxprompt(capsys, "evaluate", flag)
    assert code == 2 and "--prompt and --input must be given together" in err


def test_values_that_json_has_no_form_for(prompt, predict, tmp_path):
    import datetime

    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "in.parquet"
    rows = [{"text": "a cat", "day": datetime.date(2026, 1, 2), "raw": b"x"}]
    rows[0]["list"] = [1.5, float("nan")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (row,) = predict(prompt, f"--input={path}")
    assert (row["day"], row["raw"], row["list"]) == ("2026-01-02", "b'x'", [1.5, None])


@pytest.mark.long
def test_choices(backbone, tmp_path, predict, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    rows = []
    for row in sentences(6, 24):
        options = [str(rng.choice(words)) for words in TOPICS.values()]
        label = list(TOPICS).index(row["label"])
        rows.append({"text": row["text"], "options": options, "label": label})
    for split in ("train", "dev"):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    fields = dict(task__choices="options", data__max_len=48, data__multiple=48)
    fields["task.template"] = "{text} [sep] {choice}"
    c = make_config(backbone, tmp_path, "prefix", **STILL, **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    export = workdir / "export"
    # The last rows have fewer choices than any that was trained on, and no label.
    fewer = [{"text": row["text"], "options": row["options"][:2]} for row in rows[:3]]
    found = predict(export, stdin=say(rows + fewer))
    assert [row["options"] for row in found] == [row["options"] for row in rows + fewer]
    for row in found:
        assert list(row["scores"]) == row["options"] and row["prediction"] in row["options"]
        assert sum(row["scores"].values()) == pytest.approx(1.0, abs=1e-5)
    right = [
        list(row["scores"]).index(row["prediction"]) == gold["label"]
        for row, gold in zip(found[:24], rows, strict=True)
    ]
    assert np.mean(right) == pytest.approx(result["dev"]["accuracy"])
    accuracy = f"accuracy {np.mean(right):.4f} on 24 of 27 examples, those with a label"
    assert predict.said[-1] == accuracy
    # A row with more choices than the run had stops all, by its name, or is left out.
    many = fewer[1] | {"options": [f"option {number}" for number in range(5)]}
    monkeypatch.setattr("sys.stdin", io.StringIO(say([fewer[0], many, fewer[2]])))
    code, out, err = jaxprompt(capsys, "predict", f"--prompt={export}")
    assert code == 2 and not out and "stdin:2: " in err and "an example has 5 " in err, err
    around = predict(export, "--on-error=skip", stdin=say([fewer[0], many, fewer[2]]))
    assert close([around[0], around[2]], [found[24], found[26]])
    assert set(around[1]) == {*many, "error"} and around[1]["error"].startswith("stdin:2: ")
    assert "1 of 3 lines cannot be read, the first is stdin:2: " in "\n".join(predict.said)
