"""The user's own file in every format, from config fields alone."""

import csv
import gzip
import json

import pytest
from tiny_run import (
    ROOT,
    flags,
    jaxprompt,
    make_config,
    read_lines,
    timeless,
    tiny_fields,
    write_rows,
)

from jaxprompt.build.examples import read_examples
from jaxprompt.build.optimizer import plan_of
from jaxprompt.errors import InputError
from jaxprompt.runs.train import train_prompt

BASE = ROOT / "configs/base.py"
TASK = {
    "task.fields": "text", "task.label": "kind", "data.source": "", "head.name": "verbalizer",
    "task.words": "cat|dog,bread,saw|hammer", "task.template": "{text} about [mask].",
    "backbone.dropout": 0, "prompt.dropout": 0, "train.eval_steps": 3, "optim.lr": 3e-2,
}  # fmt: skip


def write_csv(path, rows, **style):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], **style)
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_packed(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))


WRITERS = {
    "csv": write_csv,
    "tsv": lambda path, rows: write_csv(path, rows, delimiter="\t", quoting=csv.QUOTE_NONE),
    "parquet": write_parquet,
    "jsonl.gz": write_packed,
}


def renamed(file):
    """Reads the rows with the label in the column `kind`."""
    return [{"text": row["text"], "kind": row["label"]} for row in read_lines(file)]


@pytest.fixture(scope="module")
def expected(backbone, data, tmp_path_factory):
    """The result on plain JSON lines."""
    folder = tmp_path_factory.mktemp("plain")
    for split in ("train", "dev", "test"):
        write_rows(folder / f"{split}.jsonl", renamed(data / f"{split}.jsonl"))
    fields = TASK | {"data.source": folder}
    return train_prompt(
        make_config(backbone, folder, "prefix", **fields), str(folder / "run")
    ).to_json()


@pytest.mark.long
@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_run(kind, expected, backbone, data, tmp_path, capsys):
    files = {}
    for split in ("train", "dev", "test"):
        files[f"data.files.{split}"] = path = tmp_path / f"my {split}.{kind}"
        WRITERS[kind](path, renamed(data / f"{split}.jsonl"))
    fields = tiny_fields(backbone, data) | TASK | files
    words = [f"--config={BASE}", f"--workdir={tmp_path / 'run'}", *flags(fields)]
    code, out, err = jaxprompt(capsys, "train", *words)
    assert code == 0, err
    assert timeless(json.loads(out)) == timeless(expected)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["data"]["files"] == {k.split(".")[-1]: str(v) for k, v in files.items()}
    place = (f"--config={tmp_path / 'run/config.json'}", f"--workdir={tmp_path / 'run'}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    card = json.loads((tmp_path / "run/export/prompt.json").read_text())
    # Sorted, as they were found in the rows; the words are in that order.
    assert card["task"]["labels"] == ["beast", "food", "tool"]
    assert card["label_words"] == [["cat", "dog"], ["bread"], ["saw", "hammer"]]


@pytest.mark.long
def test_dev_is_drawn_from_train_where_there_is_none(backbone, data, tmp_path, capsys):
    """By class; the run says which label is which, and what may be a mistake in them."""
    odd = [{"text": "a saw " * 20, "label": "Tool"}]
    rows = write_rows(tmp_path / "odd.jsonl", read_lines(data / "train.jsonl") + odd)
    fields = tiny_fields(backbone, data) | {
        "data.source": "", "data.files.train": rows, "data.protocol": "holdout",
        "data.protocol.size": 12, "backbone.dropout": 0, "prompt.dropout": 0, "train.eval_steps": 3,
    }  # fmt: skip
    words = [f"--config={BASE}", f"--workdir={tmp_path}", *flags(fields)]
    code, out, err = jaxprompt(capsys, "train", *words)
    assert code == 0 and "train 37, dev 12" in err
    assert "test" not in json.loads(out)
    said = [line.strip() for line in err.splitlines()]
    assert "labels in train: 0 = Tool (1), 1 = beast (12), 2 = food (12), 3 = tool (12)" in said
    assert "class Tool has no examples in dev (1 in train)" in said
    assert any(
        line.startswith("warning: labels 'Tool' (1) and 'tool' (12) differ") for line in said
    )
    assert "texts cut to 24 tokens: train 1 of 37, dev 0 of 12" in said


def test_holdout_without_classes(backbone, data, tmp_path):
    """Neither a free text nor the place of the right choice is a class to draw by."""
    rows = [{"a": "cat", "b": "dog", "c": ["x", "y"], "label": i % 9 == 0} for i in range(27)]
    fields = {
        "data.source": "", "data.files.train": write_rows(tmp_path / "train.jsonl", rows),
        "data.protocol": "holdout", "data.protocol.size": 26, "task.fields": "a",
    }  # fmt: skip
    for own in ({"task.target": "b"}, {"task.choices": "c"}):
        rows = [row | {"label": int(row["label"])} for row in rows]
        write_rows(tmp_path / "train.jsonl", rows)
        splits = read_examples(make_config(backbone, data, **fields, **own)).splits
        assert {name: len(part) for name, part in splits.items()} == {"train": 1, "dev": 26}
    with pytest.raises(InputError, match="27 examples of 2 classes; use 25 or less"):
        read_examples(make_config(backbone, data, **fields))


def test_a_protocol_that_leaves_no_dev_is_named(backbone, tmp_path):
    """A dev file that is there is not read: no other cure would help."""
    rows = [{"text": f"a cat {n}", "label": "ab"[n % 2]} for n in range(8)]
    for name in ("train", "dev"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    fields = {
        "data.protocol": "kshot",
        "data.protocol.k": 4,
        "data.protocol.on_shortage": "use_fewer",
    }
    told = (
        "all 8 examples for train and leaves none for dev; .*data.protocol.k, data.protocol.dev_k"
    )
    with pytest.raises(InputError, match=told):
        read_examples(make_config(backbone, tmp_path, **fields))


@pytest.mark.parametrize(
    "total, steps",
    [
        ({"train.total_examples": 96}, 6), ({"train.total_examples": 97}, 7),
        ({"train.total_epochs": 2.0}, 6), ({"train.total_epochs": 0.07}, 1),
        ({"train.total_epochs": 1e-8}, 1),
    ],
)  # fmt: skip
def test_a_total_of_examples_counts_short_batches(total, steps):
    """48 examples in batches of 20 are three steps an epoch."""
    c = make_config("", "", **{"data.batch": 20, "train.total_steps": 0} | total)
    assert plan_of(c, 3, 48).total == steps
    c = make_config("", "", **{"train.total_steps": 0, "train.total_epochs": 0.55})
    assert plan_of(c, 100, 1600).total == 55


@pytest.mark.long
def test_labels_may_be_numbers(backbone, data, tmp_path, capsys):
    order = {"beast": 10, "food": 2, "tool": 0}
    for split in ("train", "dev"):
        rows = [row | {"label": order[row["label"]]} for row in read_lines(data / f"{split}.jsonl")]
        write_csv(tmp_path / f"{split}.csv", rows)
    c = make_config(
        backbone, tmp_path, "prefix", backbone__dropout=0, prompt__dropout=0, train__eval_steps=3
    )
    train_prompt(c, str(tmp_path / "run"))
    place = (f"--config={tmp_path / 'run/config.json'}", f"--workdir={tmp_path / 'run'}")
    assert jaxprompt(capsys, "export", *place)[0] == 0
    card = json.loads((tmp_path / "run/export/prompt.json").read_text())
    assert card["task"]["labels"] == ["0", "2", "10"]
