"""Fact retrieval over a list of words: what is ranked, what is left out, and what is refused."""

import json

import numpy as np
import pytest
from tiny_run import ROOT, TOPICS, WORDS, flags, jaxprompt, read_lines, succeed, write_rows

from jaxprompt.cli.sweep import list_runs
from jaxprompt.config.load import load_config
from jaxprompt.runs.grid.expand import select_best_runs
from jaxprompt.training.run_result import RunResult

CONFIG = ROOT / "configs/p_tuning/lama.py"
OUT = {"sub_label": "cat", "obj_label": "Paris", "predicate_id": "P31"}  # no word of the list


def facts(start, count):
    """Takes words of every topic; what they are is the topic's name."""
    return [
        {"sub_label": word, "obj_label": topic, "predicate_id": "P31"}
        for topic, words in TOPICS.items()
        for word in words[start : start + count]
    ]


@pytest.fixture(scope="session")
def relation(tmp_path_factory):
    """A folder of the facts of a relation and a list of words."""
    folder = tmp_path_factory.mktemp("relation")
    write_rows(folder / "train.jsonl", [*facts(0, 6), OUT])
    write_rows(folder / "dev.jsonl", facts(6, 2))
    write_rows(folder / "test.jsonl", [OUT, *facts(8, 4)])
    (folder / "words.txt").write_text("\n".join([*WORDS, "Beast", "nowhere", "☃"]) + "\n")
    return folder


@pytest.fixture
def fields_of_run(backbone, relation):
    return {
        "backbone.path": backbone, "data.source": relation, "mesh.data": 1, "prompt.hidden": 16,
        "task.vocabulary": relation / "words.txt", "data.max_len": 24, "data.multiple": 24,
        "train.tracker": "none", "train.plot": False,
    }  # fmt: skip


@pytest.mark.long
def test_a_relation_is_learned(fields_of_run, relation, tmp_path, capsys):
    """Predictions are ranked over the list; a row whose object is no word of it is left out."""
    fields = fields_of_run | {
        "prompt.encoder": "none", "prompt.scale": 0.1, "optim.lr": 3e-2,
        "optim.schedule.gamma": 1.0,
        "train.total_epochs": 0, "train.total_steps": 60, "train.eval_steps": 60,
        "train.eval_epochs": 0,
    }  # fmt: skip
    run = f"--workdir={tmp_path / 'run'}"
    out, err = succeed(capsys, "train", f"--config={CONFIG}", run, *flags(fields))
    listed = len({*WORDS, "Beast", "nowhere", "☃"})
    assert f"{listed - 3} classes of {listed} words; 2 are not one token and left out, 1 are" in err
    assert "examples left out, whose obj_label is no class: train 1 of 19, dev 0 of 6" in err
    test = json.loads(out)["test"]
    assert [*test] == ["hit_at_1", "hit_at_10", "mrr", "other_words"]
    assert test["hit_at_1"] <= test["mrr"]
    assert test["hit_at_10"] > 0.8  # by chance 10 of some 60 words
    output = tmp_path / "output.jsonl"
    at = f"--config={tmp_path / 'run/config.json'}", run, "--split=test"
    out, _ = succeed(capsys, "evaluate", *at, f"--output={output}")
    lines = read_lines(output)
    right = [line["prediction"] == line["obj_label"] for line in lines]
    assert len(lines) == 12 and np.mean(right) == test["hit_at_1"]
    assert json.loads(out)["mrr"] == pytest.approx(test["mrr"])
    out, _ = succeed(capsys, "evaluate", *at, "--majority")
    assert json.loads(out)["hit_at_1"] == pytest.approx(1 / 3)
    assert json.loads(out)["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


def test_each_relation_of_one_file_has_a_run_and_a_row_their_mean(
    fields_of_run, relation, tmp_path, capsys
):
    """Of files with two relations the rows of one are read; what they share in a table is a row."""
    other = "P36"
    for split in ("train", "dev", "test"):
        rows = read_lines(relation / f"{split}.jsonl")
        turned = [row | {"obj_label": "tool", "predicate_id": other} for row in rows[:5]]
        mixed = [row for pair in zip(rows, turned, strict=False) for row in pair] + rows[5:]
        write_rows(tmp_path / f"{split}.jsonl", mixed)
    fields = fields_of_run | {
        "data.source": tmp_path, "prompt.encoder": "none", "optim.lr": 3e-2,
        "train.total_epochs": 0, "train.total_steps": 4, "train.eval_steps": 2,
        "train.eval_epochs": 0,
    }  # fmt: skip
    scores = []
    for name, size in (("P31", 18), (other, 5)):
        run = tmp_path / "runs" / name
        config = f"--config={CONFIG}:masked,predicate_id={name}"
        out, err = succeed(capsys, "train", config, f"--workdir={run}", *flags(fields))
        assert f"train {size}, dev " in err
        scores.append(json.loads(out)["test"]["hit_at_1"])
        output = tmp_path / f"{name}.jsonl"
        at = (f"--config={run / 'config.json'}", f"--workdir={run}", "--split=test")
        assert jaxprompt(capsys, "evaluate", *at, f"--output={output}")[0] == 0
        assert {line["predicate_id"] for line in read_lines(output)} == {name}
    out, _ = succeed(capsys, "sweep", f"--table={tmp_path / 'runs'}")
    _, _, row = out.splitlines()
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:3] == ["p_tuning", "2", "34"]
    assert cells[7] == f"{np.mean(scores):.3f} ± {np.std(scores):.3f}"


def test_columns_may_have_other_names():
    c = load_config(f"{CONFIG}:causal,subject,object")
    assert (c.task.fields, c.task.label) == (("subject",), "object")


def test_the_sweep_has_a_row_per_model(tmp_path):
    runs = list_runs(str(CONFIG), str(tmp_path))
    assert len(runs) == 2 * 41 and {run.row for run in runs} == {"masked", "causal"}
    assert len({run.workdir for run in runs}) == len(runs)


def test_each_relation_is_chosen_for_by_itself():
    """Of one seed the learning rate that is best on dev, for each relation."""
    dev = {("a", 1): 0.9, ("a", 2): 0.2, ("b", 1): 0.1, ("b", 2): 0.3}
    runs = [
        (
            {"seed": 34, "optim.lr": lr, "data.only": f"r={name}"},
            RunResult(best_step=1, dev={"hit_at_1": x}),
        )
        for (name, lr), x in dev.items()
    ]
    chosen = [runs[i] for i in select_best_runs(runs)]
    scores = [(changes["data.only"], result.dev["hit_at_1"]) for changes, result in chosen]
    assert scores == [("r=a", 0.9), ("r=b", 0.3)]


@pytest.mark.parametrize(
    "config, fields, message",
    [
        ("masked", {"task.labels": "a,b"}, "task.labels=('a', 'b') defines others"),
        ("masked", {"task.name": "topics"}, "task.name='topics' defines others"),
        ("masked,predicate_id=P3", {}, "data.only=predicate_id=P3; nearest: P31"),
        ("masked,relation=P31", {}, "column 'relation', which data.only names; columns: "),
        ("masked", {"data.only": "P31"}, "data.only='P31' must be COLUMN=VALUE"),
        ("masked,subject", {}, "must be MODEL or MODEL,SUBJECT,OBJECT"),
        ("both", {}, "the model 'both' is unknown; known: causal, masked"),
    ],
)
def test_configs_that_are_refused(config, fields, message, fields_of_run, refused):
    words = [f"--config={CONFIG}:{config}", *flags(fields_of_run | fields)]
    assert message in refused("validate", *words)
