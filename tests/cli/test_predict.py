"""Prediction from an export: every way in, one JSON line an example out, in the order given."""

import gzip
import io
import json

import numpy as np
import pytest
from tiny_run import (
    TOPICS,
    accuracy,
    jaxprompt,
    make_config,
    read_lines,
    sentences,
    serve,
    succeed,
    write_rows,
)

STILL = dict(
    backbone__dropout=0, head__dropout=0, prompt__dropout=0, train__eval_steps=3, optim__lr=3e-2
)
TEXTS = ["the cat was near a dog", "old bread with salt", "a saw and the hammer", "猫 不 好, né?"]


@pytest.fixture(scope="session")
def prompt(trained):
    """The export of a prefix on the three topics."""
    return trained / "export"


@pytest.fixture
def predict(capsys, monkeypatch):
    """Predicts. -> the rows"""

    def call(prompt, *flags: str, stdin: str = "") -> list[dict]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        out, err = succeed(capsys, "predict", f"--prompt={prompt}", *flags)
        call.said = err.splitlines()
        return [json.loads(line) for line in out.splitlines() if line]

    return call


def close(actual: list[dict], expected: list[dict]) -> bool:
    pairs = zip(actual, expected, strict=True)
    return all(
        a["prediction"] == b["prediction"]
        and np.allclose(list(a["scores"].values()), list(b["scores"].values()), rtol=0, atol=1e-6)
        for a, b in pairs
    )


def test_texts_come_back_in_order_with_every_score(prompt, predict, tmp_path):
    texts = [f"--text={text}" for text in TEXTS]
    rows = predict(prompt, *texts)
    assert [row["text"] for row in rows] == TEXTS
    for row in rows:
        assert list(row) == ["text", "prediction", "score", "scores"]
        assert list(row["scores"]) == list(TOPICS)
        assert sum(row["scores"].values()) == pytest.approx(1.0, abs=1e-6)
        assert row["score"] == max(row["scores"].values()) == row["scores"][row["prediction"]]
    assert len({row["score"] for row in rows}) == len(TEXTS)
    assert predict(prompt, *texts, f"--output={tmp_path / 'out.jsonl'}") == []
    assert read_lines(tmp_path / "out.jsonl") == rows
    assert TEXTS[-1] in (tmp_path / "out.jsonl").read_text("utf-8")  # other scripts as they are


def test_the_size_of_a_batch_or_a_chunk_changes_nothing(prompt, predict, data, monkeypatch):
    """Neither the answers, nor the metric over all chunks."""
    flags = f"--input={data / 'dev.jsonl'}"
    whole = predict(prompt, flags)
    (measured,) = predict.said
    assert [row["text"] for row in whole] == [r["text"] for r in read_lines(data / "dev.jsonl")]
    monkeypatch.setattr("jaxprompt.serving.stream.CHUNK_BATCHES", 1)
    assert len(whole) > 14 and close(predict(prompt, flags, "--batch=7"), whole)
    assert predict.said == [measured]


def say(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_labels_that_are_there_stay_and_are_compared(prompt, predict, data):
    """Those that are absent, hidden or unknown are no hindrance."""
    rows = read_lines(data / "dev.jsonl")[:6]
    expected = predict(prompt, stdin=say({"text": row["text"]} for row in rows))
    assert predict.said == []  # without labels there is nothing to tell
    answers = predict(prompt, stdin=say(rows))
    assert close(answers, expected)
    assert [row["label"] for row in answers] == [row["label"] for row in rows]
    share = f"accuracy {accuracy(answers):.4f} on 6 of 6 examples, those with a label"
    assert 0 < accuracy(answers) and predict.said == [share]
    odd = [-1, None, "", "bird", ["beast"]]
    changed = [row | {"label": label} for row, label in zip(rows, odd, strict=False)] + rows[5:]
    answers = predict(prompt, stdin=say(changed))
    assert close(answers, expected)
    assert [row["label"] for row in answers] == [*odd, rows[5]["label"]]
    unknown, share = predict.said
    assert unknown == (
        "labels unknown to task custom: 2 of 6 examples, the first 'bird' at stdin:4; they "
        "are treated as unlabelled"
    )
    assert share.startswith("accuracy ") and " on 1 of 6 examples" in share


def test_a_column_of_the_input_is_never_lost(prompt, predict, refused, monkeypatch):
    row = {"text": "a cat", "score": 7, "id": "x", "prediction": "tool", "error": "old"}
    skip = ("--on-error=skip",)
    for number, (name, words) in enumerate({"score": (), "prediction": (), "error": skip}.items()):
        fields = {"text": "a cat", name: row[name]}
        text = say([*[{"text": "a dog"}] * number, fields])
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        line = refused("predict", f"--prompt={prompt}", *words)
        assert f"stdin:{number + 1}: the input already has a column '{name}'" in line
        assert "--prefix=P" in line
    (answer,) = predict(prompt, "--prefix=our_", stdin=say([row]))
    assert {name: answer[name] for name in row} == row
    assert list(answer)[len(row) :] == ["our_prediction", "our_score", "our_scores"]
    assert answer["our_scores"][answer["our_prediction"]] == answer["our_score"]


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

    code, out, err = call()  # to stdout the answers before it
    assert code == 2 and err.startswith(f"jaxprompt predict: {name}:3: broken JSON")
    assert err.count("\n") == 1
    first, blank, end = out.split("\n")
    assert json.loads(first)["text"] == "a cat" and (blank, end) == ("", "")
    out_file = tmp_path / "out.jsonl"
    out_file.write_text("before\n")
    code, out, err = call(f"--output={out_file}")
    assert (code, out) == (2, "") and f"{name}:3: broken JSON" in err
    assert out_file.read_text() == "before\n" and not list(tmp_path.glob(".*"))
    code, out, err = call("--on-error=skip")
    assert code == 0
    actual = out.split("\n")
    assert actual.pop() == "" and len(actual) == len(lines)
    for number, (line, answer) in enumerate(zip(lines, actual, strict=True), 1):
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
        assert json.loads(actual[5]) | {"error": ""} == {"txt": "a dog", "id": 4, "error": ""}
    said = f"4 of {len(lines)} lines have no answer, the first is {name}:3: broken JSON"
    assert err.startswith(said) and err.count("\n") == 1


def test_texts_that_are_cut_are_told(prompt, predict):
    predict(prompt, "--text=the cat", "--text=" + "the cat " * 30)
    assert predict.said == ["texts cut to 24 tokens: 1 of 2"]


def test_evaluate_scores_an_export_on_rows(prompt, data, tmp_path, capsys, monkeypatch, refused):
    """By itself, with the metrics that its run has on them; what cannot be scored is refused."""
    place, flag = f"--workdir={prompt.parent}", f"--prompt={prompt}"
    whole = json.loads(jaxprompt(capsys, "evaluate", place, "--split=test")[1])
    out, _ = succeed(capsys, "evaluate", flag, f"--input={data / 'test.jsonl'}")
    assert {"split": "test"} | json.loads(out) == pytest.approx(whole, abs=1e-6)

    out = tmp_path / "out.jsonl"
    words = (place, "--split=test", f"--output={out}", "--prefix=p_")
    assert jaxprompt(capsys, "evaluate", *words)[0] == 0
    assert list(read_lines(out)[0]) == ["text", "label", "p_prediction", "p_score", "p_scores"]
    rows = read_lines(data / "test.jsonl")[:4]
    monkeypatch.setattr("sys.stdin", io.StringIO(say([*rows, rows[0] | {"label": "unicorn"}])))
    out, err = succeed(capsys, "evaluate", flag, "--input=-")
    assert json.loads(out)["examples"] == 4 and "unicorn" in err

    for row, why in (
        ({"text": "a cat"}, "no row has a known label of its prompt's task"),
        ({"label": rows[0]["label"]}, "in.jsonl:1: "),
    ):
        (tmp_path / "in.jsonl").write_text(say([row]))
        code, out, err = jaxprompt(capsys, "evaluate", flag, f"--input={tmp_path / 'in.jsonl'}")
        assert code == 2 and why in err and not out and "--on-error" not in err
    assert "--prompt and --input must be given together" in refused("evaluate", flag, started=True)


@pytest.mark.long
def test_choices(backbone, tmp_path, predict, capsys, monkeypatch):
    rng, rows = np.random.default_rng(0), []
    for row in sentences(6, 24):
        options = [str(rng.choice(words)) for words in TOPICS.values()]
        label = list(TOPICS).index(row["label"])
        rows.append({"text": row["text"], "options": options, "label": label})
    for split in ("train", "dev", "test"):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    fields = dict(task__choices="options", data__max_len=48, data__multiple=48)
    fields["task.template"] = "{text} [sep] {choice}"
    config = make_config(backbone, tmp_path, "prefix", **STILL, **fields)
    result, workdir, answers, _ = serve(capsys, tmp_path, config, tmp_path / "test.jsonl")
    export = workdir / "export"
    for row in answers:
        assert list(row["scores"]) == row["options"] and row["prediction"] in row["options"]
        assert sum(row["scores"].values()) == pytest.approx(1.0, abs=1e-5)
    right = [row["options"].index(row["prediction"]) == row["label"] for row in answers]
    assert np.mean(right) == pytest.approx(result["test"]["accuracy"])
    # Rows have fewer choices than any that was trained on; a row with more is left out.
    fewer = [{"text": row["text"], "options": row["options"][:2]} for row in rows[:2]]
    many = fewer[1] | {"options": [f"option {number}" for number in range(5)]}
    text = say([fewer[0], many, fewer[1]])
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code, out, err = jaxprompt(capsys, "predict", f"--prompt={export}")
    assert code == 2 and json.loads(out)["text"] == fewer[0]["text"]  # the row before it
    assert "stdin:2: " in err and "an example has 5 " in err
    around = predict(export, "--on-error=skip", stdin=text)
    assert close([around[0], around[2]], predict(export, stdin=say(fewer)))
    assert set(around[1]) == {*many, "error"} and around[1]["error"].startswith("stdin:2: ")
