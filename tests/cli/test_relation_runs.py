"""Relations between marked entities, from files to predictions."""

import json
import re

import numpy as np
import pytest
from tiny_run import (
    TOPICS,
    jaxprompt,
    make_config,
    read_lines,
    train_and_export,
    write_rows,
)

from configs.dart import relations as dart_relations
from jaxprompt.config.load import load_config
from jaxprompt.data.text.words import template_ids
from jaxprompt.errors import InputError

FIELDS = {
    "task.fields": "text", "task.entities": "<e1>|</e1>,<e2>|</e2>", "task.negative": "none",
    "task.metric": "micro_f1", "task.words": "beast,food,tool,it", "data.max_len": 40,
    "task.labels": "is_beast,is_food,is_tool,none",
    "data.multiple": 40, "train.total_steps": 40, "train.eval_steps": 20,
}  # fmt: skip


def relations(seed, size):
    """Draws rows whose class is the topic of the first entity; of a fourth there is none."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(size):
        kinds = [*TOPICS, None]
        kind = kinds[i % 4]
        first = rng.choice(TOPICS[kind]) if kind else rng.choice(["very", "quite", "near"])
        others = rng.choice("the a an this that was is".split(), 4)
        words = [*others[:1], f"<e1>{first}</e1>", *others[1:3], "<e2>it</e2>", others[3]]
        label = f"is_{kind}" if kind else "none"
        rows.append({"text": " ".join(words), "label": label})
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("relations")
    for seed, (name, size) in enumerate({"train": 96, "dev": 40, "test": 40}.items()):
        write_rows(folder / f"{name}.jsonl", relations(seed, size))
    return folder


def predict(capsys, workdir, *words):
    code, out, err = jaxprompt(capsys, "predict", f"--workdir={workdir}", *words)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()], err


METHODS = {
    "dart": {
        "task.template": "{text|soft} {entity1} [soft*2] [mask] [soft*1] {entity2}",
        "prompt.length": 7, "prompt.text": "a a an an is the near", "prompt.fluency": 0.2,
        "optim.lr": 1e-3,
    },
    "prefix": {"task.template": "{text|marked}", "task.markers": "a,an,this,that"},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_methods_learn_and_predict(method, backbone, files, tmp_path, capsys):
    c = make_config(backbone, files, method, **FIELDS | METHODS[method])
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert {"micro_f1", "precision", "recall", "accuracy"} <= result["test"].keys()
    given = [row["text"] for row in read_lines(files / "test.jsonl")]
    lines, err = predict(capsys, workdir, f"--input={files / 'test.jsonl'}")
    assert [line["text"] for line in lines] == given
    assert f"micro_f1 {result['test']['micro_f1']:.4f}" in err
    right = np.mean([line["prediction"] == line["label"] for line in lines])
    assert right == pytest.approx(result["test"]["accuracy"])
    if method == "dart":
        assert result["test"]["micro_f1"] > 0.6
    (line,), _ = predict(capsys, workdir, "--text=the <e1>cat</e1> was <e2>it</e2>")
    assert line["prediction"] in ("is_beast", "is_food", "is_tool", "none")


# -- SemEval's own sentences ----------------------------------------------------------------------


FIGURE_2_B = "dart/relations:sem_eval_2010_task_8,8,gpt2"


def test_gpt2_of_figure_2_b_says_the_relation_last(gpt2):
    """DART without a mask and without fluency."""
    c = load_config(FIGURE_2_B)
    assert len(template_ids(gpt2, c.prompt.get("text"))) == c.prompt.get("length") == 9
    assert c.prompt.get("fluency") == 0 and c.task.template == (
        "{sentence|soft} [soft*3] {entity1} [soft*1] {entity2} [soft*1] [mask]"
    )
    for task in dart_relations.TASKS:
        other = load_config(f"dart/relations:{task},8,gpt2").task.template
        assert re.sub(r"\{\w+\|soft\}", "{sentence|soft}", other) == c.task.template


def test_fine_tuning_of_figure_2_b_reads_the_same_words():
    c = load_config(f"{FIGURE_2_B}_fine_tuning")
    assert (c.prompt.name, c.head.name) == ("none", "linear")
    assert c.backbone.path == load_config(FIGURE_2_B).backbone.path


def test_four_examples_per_class_are_of_events_alone():
    assert load_config("dart/relations:event_arguments,4").data.protocol.k == 4
    with pytest.raises(InputError, match="number of examples per class '4' is unknown"):
        load_config("dart/relations:wiki80,4")


@pytest.mark.long
def test_dialogues_turn_by_turn(backbone, tmp_path, capsys):
    """Dev and test are read up to every turn, train as a whole."""
    turns = ["cat: it was a dog", "dog: the rice is good", "cat: an old saw"]
    pairs = [
        {"x": "cat", "y": "dog", "r": ["per:friends"], "t": ["rice"]},
        {"x": "dog", "y": "saw", "r": ["unanswerable"], "t": [""]},
    ]
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.json").write_text(json.dumps([[turns, pairs]] * 3))
    fields = {
        "task.name": "dialog_re", "task.metric": "f1c", "data.max_len": 64,
        "data.multiple": 64, "train.total_steps": 2, "train.eval_steps": 1,
    }  # fmt: skip
    c = make_config(backbone, tmp_path, "full", **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert {"f1c", "precision_c", "recall_c", "accuracy"} == result["test"].keys()
    record = json.loads((workdir / "record.json").read_text())
    sizes = {name: split["examples"] for name, split in record["splits"].items()}
    assert sizes == {"train": 6, "dev": 12, "test": 12}  # turns 1 to 3 of one pair, 3 of the other
    # Written is a line per pair, with the answer to the whole of its dialogue, as `predict` has it.
    out = tmp_path / "out.jsonl"
    place = (f"--workdir={workdir}", "--split=test", f"--output={out}")
    code, _, err = jaxprompt(capsys, "evaluate", *place)
    assert code == 0, err
    written = [json.loads(line) for line in out.read_text().splitlines()]
    given = write_rows(tmp_path / "pairs.jsonl", [{"dialog": turns, **pair} for pair in pairs])
    expected, _ = predict(capsys, workdir, f"--input={given}")
    assert [x["score"] for x in written] == pytest.approx([x["score"] for x in expected] * 3)
    assert [x["prediction"] for x in written] == [x["prediction"] for x in expected] * 3
    # Train has no turns, and a line per pair as well.
    place = (f"--workdir={workdir}", "--split=train", f"--output={out}")
    assert jaxprompt(capsys, "evaluate", *place)[0] == 0
    trained = [json.loads(line)["prediction"] for line in out.read_text().splitlines()]
    assert trained == [x["prediction"] for x in expected] * 3
    row = {"dialog": turns, **pairs[0]}
    given = write_rows(tmp_path / "new.jsonl", [row, row | {"x": "goat"}])
    lines, err = predict(capsys, workdir, f"--input={given}")
    assert len(lines) == 2 and "micro_f1" in err
    assert "entities not found as whole words in the text, and not marked: the input 1 of 2" in err
