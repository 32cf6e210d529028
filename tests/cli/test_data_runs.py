"""The user's own files and the folders of benchmarks, through the command line."""

import argparse
import csv
import json
from collections import Counter

import pytest
from spoil import BASE
from tiny_run import (
    TOPICS,
    flags,
    jaxprompt,
    make_config,
    read_lines,
    sentences,
    succeed,
    tiny_fields,
    train_and_export,
    write_rows,
)

from jaxprompt.build.examples import read_examples
from jaxprompt.build.optimizer import config_milestones
from jaxprompt.cli.options import load_run
from jaxprompt.data.sources.files import read_file
from jaxprompt.errors import InputError
from jaxprompt.runs import train as tune


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


def test_a_file_without_dev_is_divided_by_train_and_by_evaluate(tmp_path, monkeypatch, capsys):
    """Five flags are enough; both commands have the same dev."""
    path = write_rows(tmp_path / "train.jsonl", [{"a": "cat", "b": i % 2} for i in range(20)])
    fields = {"task.fields": "a", "task.label": "b", "data.files.train": path}
    configs = []
    monkeypatch.setattr(tune, "train_prompt", lambda config, _: configs.append(config))
    words = ["--config=base", f"--workdir={tmp_path}", *flags(fields)]
    succeed(capsys, "train", *words)
    for split, size in (("dev", 4), ("train", 4), ("test", None)):
        args = argparse.Namespace(config="base", workdir=str(tmp_path), split=split)
        configs.append(load_run(args, [(name, str(x)) for name, x in fields.items()]))
        assert getattr(configs[-1].data.protocol, "size", None) == size
    assert configs[0] == configs[1] == configs[2]


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
    config = make_config("", "", **{"data.batch": 20, "train.total_steps": 0} | total)
    assert config_milestones(config, 3, 48).total == steps
    config = make_config("", "", **{"train.total_steps": 0, "train.total_epochs": 0.55})
    assert config_milestones(config, 100, 1600).total == 55


# -- the majority baseline ------------------------------------------------------------------------


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


def test_refused(skewed, refused):
    words = ["evaluate", "--majority", "--config=base:zero_shot", *flags_of(skewed)]
    assert "remove --output=x.jsonl" in refused(*words, "--output=x.jsonl")
    assert "invalid choice: 'tests'" in refused(*words, "--split=tests")
    texts = [f"--config.task.{field}" for field in ("target=label", "label=", "labels=")]
    text_task = ["evaluate", "--majority", "--config=base:soft", *flags_of(skewed), *texts]
    assert "--majority needs a task with classes" in refused(*text_task, "--config.head.name=text")


# -- a benchmark's own folder ---------------------------------------------------------------------

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
    config = make_config(
        backbone, tmp_path, "soft", task__name=name, train__total_steps=2, train__eval_steps=2
    )
    result, workdir, err = train_and_export(capsys, tmp_path, config)
    hidden = tmp_path / files["test"]
    assert "test" not in result
    assert f"test is not scored: no row of {hidden} states a label" in err
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}")
    out, _ = succeed(capsys, "evaluate", *place, "--split=dev")
    assert json.loads(out)[metric] == result["dev"][metric]
    code, _, err = jaxprompt(capsys, "evaluate", *place, "--split=test")
    assert (code, len(err.splitlines())) == (2, 1) and "no column 'label'" in err
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
