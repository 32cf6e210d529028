"""The user's own file, from config fields alone."""

import csv

import pytest
from spoil import BASE
from tiny_run import flags, make_config, read_lines, succeed, tiny_fields, write_rows

from jaxprompt.build.examples import read_examples
from jaxprompt.build.optimizer import config_milestones
from jaxprompt.errors import InputError


def test_a_file_of_ones_own_is_divided_and_summarised(backbone, data, tmp_path, capsys):
    """Dev is drawn from train by class; labels that may be mistakes are named."""
    rows = [*read_lines(data / "train.jsonl"), {"text": "a saw " * 20, "label": "Tool"}]
    with open(tmp_path / "my rows.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    fields = tiny_fields(backbone, data) | {
        "data.source": "", "data.files.train": file.name, "data.protocol": "holdout",
        "data.protocol.size": 12,
    }  # fmt: skip
    out, _ = succeed(capsys, "validate", f"--config={BASE}", *flags(fields))
    assert "train 37, dev 12" in out
    for line in (
        "labels in train: 0 = Tool (1), 1 = beast (12), 2 = food (12), 3 = tool (12)",
        "class Tool has no examples in dev (1 in train)",
        "warning: labels 'Tool' (1) and 'tool' (12) differ",
        "texts cut to 24 tokens: train 1 of 37, dev 0 of 12",
    ):
        assert line in out


def test_a_holdout_of_free_texts_is_not_drawn_by_class(backbone, data, tmp_path):
    rows = [{"a": "cat", "b": "dog", "label": i % 9 == 0} for i in range(27)]
    path = write_rows(tmp_path / "train.jsonl", rows)
    fields = {
        "data.source": "", "data.files.train": path, "data.protocol": "holdout",
        "data.protocol.size": 26, "task.fields": "a", "task.target": "b",
    }  # fmt: skip
    splits = read_examples(make_config(backbone, data, **fields)).splits
    assert {name: len(part) for name, part in splits.items()} == {"train": 1, "dev": 26}


def test_a_protocol_that_leaves_no_dev_is_named(backbone, tmp_path):
    """A dev file that exists is not read."""
    rows = [{"text": f"a cat {n}", "label": "ab"[n % 2]} for n in range(8)]
    for name in ("train", "dev"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    fewer = {"data.protocol.k": 4, "data.protocol.on_shortage": "use_fewer"}
    with pytest.raises(InputError, match="all 8 examples for train and leaves none for dev"):
        read_examples(make_config(backbone, tmp_path, **{"data.protocol": "kshot"} | fewer))


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
    assert config_milestones(c, 3, 48).total == steps
    c = make_config("", "", **{"train.total_steps": 0, "train.total_epochs": 0.55})
    assert config_milestones(c, 100, 1600).total == 55
