"""The majority baseline: the most frequent class of all training examples, on a split."""

import json
from collections import Counter

import pytest
from tiny_run import flags, jaxprompt, read_lines, succeed, tiny_fields, write_rows

from jaxprompt.data.sources.files import read_file


@pytest.fixture
def skewed(data, tmp_path):
    """Half of the training rows are of tools, but few of the test rows."""
    for split in ("train", "dev", "test"):
        rows = read_lines(data / f"{split}.jsonl")
        selected = [row for row in rows if row["label"] != "tool"][: 8 if split == "train" else 99]
        selected += [row for row in rows if row["label"] == "tool"][: 5 if split == "test" else 99]
        write_rows(tmp_path / f"{split}.jsonl", selected)
    return tmp_path


def flags_of(skewed, **changes):
    fields = tiny_fields("nowhere", skewed) | {"task.labels": "beast,food,tool"} | changes
    return flags({n: v for n, v in fields.items() if n != "prompt.length"})


def test_is_of_all_training_examples(skewed, capsys):
    """Whatever the protocol draws; dev is that of the protocol."""
    gold = [row["label"] for row in read_lines(skewed / "test.jsonl")]
    expected = Counter(gold)["tool"] / len(gold)
    few = {"data.protocol": "kshot", "data.protocol.k": 2, "data.protocol.dev_k": 2}
    for protocol in ({}, few):
        words = ["--majority", "--config=base:zero_shot", *flags_of(skewed, **protocol)]
        out, _ = succeed(capsys, "evaluate", *words, "--split=test")
        assert json.loads(out) == {
            "split": "test", "examples": len(gold), "majority": "tool",
            "accuracy": pytest.approx(expected),
        }  # fmt: skip
    assert expected < 1 / 3
    dev = json.loads(jaxprompt(capsys, "evaluate", *words)[1])
    assert dev["examples"] == 6 and dev["accuracy"] == pytest.approx(1 / 3)


def test_of_relations_is_measured_by_their_metric(skewed, capsys):
    gold = [row["label"] for row in read_lines(skewed / "test.jsonl")]
    changes = {"task.metric": "micro_f1", "task.negative": "food"}
    words = ["--majority", "--split=test", "--config=base:zero_shot", *flags_of(skewed, **changes)]
    out, _ = succeed(capsys, "evaluate", *words)
    metrics = json.loads(out)
    assert metrics["precision"] == pytest.approx(gold.count("tool") / len(gold))
    others = len(gold) - gold.count("food")
    assert metrics["recall"] == pytest.approx(gold.count("tool") / others)


def test_real_sst2(shared, capsys):
    """50.9 in table 3 of LM-BFF, whose test split is the dev split of GLUE."""
    folder = shared / "data/sst2"
    words = ["--majority", "--config=dart/lm_bff:sst2", f"--config.data.source={folder}"]
    metrics = json.loads(jaxprompt(capsys, "evaluate", "--split=test", *words)[1])
    gold = [row["label"] for row in read_file(folder / "test.jsonl.gz")]
    assert metrics["examples"] == len(gold) and metrics["majority"] == "positive"
    assert metrics["accuracy"] == pytest.approx(sum(gold) / len(gold))
    words += ["--split=dev", "--config.data.protocol="]
    metrics = json.loads(jaxprompt(capsys, "evaluate", *words)[1])
    assert metrics["examples"] == 872 and round(100 * metrics["accuracy"], 1) == 50.9


def test_refused(skewed, refused, tmp_path):
    words = ["evaluate", "--majority", "--config=base:zero_shot", *flags_of(skewed)]
    assert "remove --output=x.jsonl" in refused(*words, "--output=x.jsonl")
    assert "'tests' is unknown" in refused(*words, "--split=tests")
    texts = [f"--config.task.{field}" for field in ("target=label", "label=", "labels=")]
    text_task = ["evaluate", "--majority", "--config=base:soft", *flags_of(skewed), *texts]
    assert "--majority needs a task with classes" in refused(*text_task, "--config.head.name=text")
