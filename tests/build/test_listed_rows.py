"""The rows that a file lists are those of the training file, whatever is left out or spread."""

import json

import pytest

from jaxprompt.build.examples import read_examples
from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(folder, rows, listed, **task):
    path = write(folder / "rows.jsonl", [{"seed": 0} | listed])
    data = {
        "data.files.train": write(folder / "train.jsonl", rows),
        "data.protocol": {"name": "listed", "rows": path},
    }
    changes = {f"task.{name}": value for name, value in task.items()}
    return load_config("base").replace(data | {"task.name": "custom"} | changes)


def texts(c, split, field):
    return [example.fields[field] for example in read_examples(c, ("train", "dev")).splits[split]]


ODD = [{"t": f"t{i}", "src": "ab"[i % 2], "label": "xy"[i // 2 % 2]} for i in range(12)]


def test_rows_of_another_column_still_count(tmp_path):
    c = config(tmp_path, ODD, {"train": [5, 1], "dev": [11]}, fields=("t",))
    c = c.replace({"data.only": "src=b"})
    assert texts(c, "train", "t") == ["t5", "t1"] and texts(c, "dev", "t") == ["t11"]
    path = write(tmp_path / "rows.jsonl", [{"seed": 0, "train": [1, 2], "dev": [3]}])
    c = c.replace({"data.protocol.rows": path})
    with pytest.raises(InputError, match="rows.jsonl:1: row 2 is not in train"):
        read_examples(c, ("train", "dev"))


def test_rows_without_an_agreed_label_still_count(tmp_path):
    labels = (0, -1, 1, 2, 0)
    rows = [{"premise": f"p{i}", "hypothesis": "h", "label": x} for i, x in enumerate(labels)]
    c = config(tmp_path, rows, {"train": [0, 2], "dev": [3]})
    c = c.replace({"task.name": "snli"})
    assert texts(c, "train", "premise") == ["p0", "p2"] and texts(c, "dev", "premise") == ["p3"]


def test_a_row_of_candidates_is_all_of_them(tmp_path):
    rows = [{"s": f"{i} ___", "options": ["x", "y"], "right": ["x"]} for i in range(3)]
    task = {"fields": ("s", "word"), "question": ("s",), "candidate": "word", "placeholder": "___"}
    task |= {"candidates": ("options", "right"), "metric": "answer_f1"}
    c = config(tmp_path, rows, {"train": [2], "dev": [0]}, **task)
    assert texts(c, "train", "s") == ["2 x", "2 y"] and texts(c, "dev", "s") == ["0 x", "0 y"]
    write(tmp_path / "train.jsonl", [*rows[:1], rows[1] | {"right": []}, *rows[2:]])
    with pytest.raises(InputError, match="train.jsonl:2: column 'right' lists no correct"):
        read_examples(c, ("train", "dev"))
