"""The splits of a config: which rows are drawn, by which seed, and which files are read."""

import json

import numpy as np
import pytest

from jaxprompt.build.examples import hold_out_dev, read_examples, read_split_rows, read_task
from jaxprompt.config.load import load_config
from jaxprompt.config.run import TaskConfig
from jaxprompt.errors import InputError

ROWS = [{"t": f"t{i}", "label": "xy"[i % 2]} for i in range(12)]
OTHER = [{"t": f"o{i}", "label": "xy"[i % 2]} for i in range(4)]
HIDDEN = [{"t": f"h{i}"} for i in range(3)]


def make_config(
    folder, *, train=ROWS, dev=None, test=None, task=None, seed=0, protocol="", **options
):
    changes = {"task.name": "custom", "task.fields": ("t",)}
    for name, rows in (("train", train), ("dev", dev), ("test", test)):
        if rows is not None:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
            changes[f"data.files.{name}"] = str(folder / f"{name}.jsonl")
    changes |= {f"task.{name}": value for name, value in (task or {}).items()}
    changes |= {"data.seed": seed, "data.protocol": {"name": protocol, **options}}
    return load_config("base").replace(changes)


def texts(config, wanted=("train", "dev"), field="t"):
    splits = read_examples(config, wanted).splits
    return {name: [example.fields[field] for example in part] for name, part in splits.items()}


def listed(folder, **rows):
    """Writes which rows are sampled. -> arguments of `config`"""
    (folder / "rows.jsonl").write_text(json.dumps({"seed": 0} | rows) + "\n")
    return {"protocol": "listed", "rows": str(folder / "rows.jsonl")}


def shuffled(seed, label):
    """The rows of a class in the order in which few-shot protocols take them."""
    rows = list(range(12))
    np.random.RandomState(seed).shuffle(rows)
    return [f"t{row}" for row in rows if row % 2 == label]


@pytest.mark.parametrize("dev_k, counted", [(0, 2), (1, 1), (3, 3)])
@pytest.mark.parametrize("seed", [0, 5])
def test_rows_are_drawn_by_the_seed_of_the_data(tmp_path, seed, dev_k, counted):
    """Whatever the seed of the run; a dev_k of 0 is as many as train has."""
    config = make_config(tmp_path, protocol="kshot", k=2, dev_k=dev_k, seed=seed)
    config = config.replace({"seed": 9})
    actual = texts(config)
    classes = [shuffled(seed, label) for label in (0, 1)]
    assert sorted(actual["train"]) == sorted(t for texts in classes for t in texts[:2])
    assert sorted(actual["dev"]) == sorted(t for texts in classes for t in texts[2 : 2 + counted])


@pytest.mark.parametrize("split", ["train", "dev"])
def test_rows_of_a_sampled_split_are_in_the_order_of_its_examples(tmp_path, split):
    config = make_config(tmp_path, protocol="kshot", k=2, dev_k=3)
    rows = read_split_rows(config, read_examples(config).task, split)
    assert [row["t"] for _, row, _ in rows] == texts(config)[split]
    assert all(example.fields["t"] == row["t"] for _, row, example in rows)


def test_a_share_without_a_holdout_leaves_dev_to_its_file(tmp_path):
    """With one it makes dev, and the file would not be read."""
    fields = dict(dev=OTHER, protocol="fraction", ratio=0.5)
    actual = texts(make_config(tmp_path, **fields))
    assert actual["dev"] == ["o0", "o1", "o2", "o3"] and len(actual["train"]) == 6
    config = make_config(tmp_path, **fields, holdout=0.2)
    with pytest.raises(InputError, match="protocol=fraction splits dev off the training examples"):
        read_examples(config)
    assert len(texts(config, ("train",))["train"]) == 6  # nobody asks for dev here
    config = config.replace({"data.files.dev": ""})
    assert [len(part) for part in texts(config).values()] == [6, 2]


def test_dev_is_needed_where_it_is_wanted(tmp_path):
    config = make_config(tmp_path)
    with pytest.raises(InputError, match="has no dev split here"):
        read_examples(config, ("train", "dev"))
    assert texts(config, ("train",)).keys() == {"train"}
    config = make_config(tmp_path, **listed(tmp_path, train=[0, 1], dev=[]))
    with pytest.raises(InputError, match="all 2 examples for train .*: data.protocol.rows$"):
        read_examples(config)
    assert texts(config, ("train",)) == {"train": ["t0", "t1"]}


@pytest.mark.parametrize(
    "count, set_fields, size, batch",
    [
        (12, (), 2, 8),
        (160, (), 32, 16),  # 128 remain, 8 batches of 16
        (158, (), 32, 8),
        (1000, (), 200, 32),
        (12, {"data.batch"}, 2, 32),
    ],
)
def test_without_dev_a_fifth_of_train_is_held_out(tmp_path, count, set_fields, size, batch):
    rows = [{"t": f"t{i}", "label": "xy"[i % 2]} for i in range(count)]
    config = hold_out_dev(make_config(tmp_path, train=rows), set_fields)
    assert config == make_config(tmp_path, train=rows, protocol="holdout", size=size).replace(
        {"data.batch": batch}
    )
    (line,) = read_examples(config).notes
    assert line.startswith(f"{size} of {count} ") and line.endswith(f"data.batch is {batch}")
    assert hold_out_dev(config) == config


@pytest.mark.parametrize(
    "options, set_fields",
    [({"dev": OTHER}, ()), ({"protocol": "kshot"}, ()), ({}, {"data.protocol"})],
)
def test_nothing_is_held_out_where_dev_is_configured(tmp_path, options, set_fields):
    config = make_config(tmp_path, **options)
    assert hold_out_dev(config, set_fields) == config


def test_empty_and_repeated_examples_are_counted_with_the_place_of_the_first(tmp_path):
    """Of a label that differs, too; the empty ones do not count as repeated."""
    rows = [{"t": t, "label": "xy"[i % 2]} for i, t in enumerate(("a", "b", " ", "a", "", "a"))]
    config = make_config(tmp_path, train=rows, dev=[OTHER[0], {"t": "b", "label": "x"}])
    assert read_examples(config).notes == (
        f"examples with empty texts: train 2 of 6 (the first at {tmp_path}/train.jsonl:3)",
        f"repeated examples: train 2 of 6 (the first at {tmp_path}/train.jsonl:4), "
        f"dev 1 of 2 also in train (the first at {tmp_path}/dev.jsonl:2)",
    )
    config = make_config(tmp_path, train=ROWS * 2, **listed(tmp_path, train=[3, 2], dev=[14, 4]))
    assert read_examples(config).notes == (
        f"repeated examples: dev 1 of 2 also in train (the first at {tmp_path}/train.jsonl:15)",
    )


@pytest.mark.parametrize("labels, count", [((0, 1), 1), (("food", 1), 0)])
def test_numbers_that_the_default_task_reads_as_its_labels_are_noted(tmp_path, labels, count):
    rows = [{"text": f"t{i}", "label": label} for i, label in enumerate(labels)]
    config = make_config(tmp_path, train=rows).replace({"task.name": "topics", "task.fields": ()})
    notes = read_examples(config, ("train",)).notes
    assert sum("0 = business" in note and "task.name=custom" in note for note in notes) == count


def test_a_test_split_without_labels_is_not_scored_in_a_run(tmp_path):
    """predict reads it for itself; one label is enough to score it."""
    config = make_config(tmp_path, dev=OTHER, test=HIDDEN)
    examples = read_examples(config)
    assert examples.splits.keys() == {"train", "dev"}
    assert any("test is not scored" in note for note in examples.notes)
    config = make_config(tmp_path, dev=OTHER, test=OTHER)
    assert texts(config, ("train", "dev", "test"))["test"] == ["o0", "o1", "o2", "o3"]
    config = make_config(tmp_path, dev=OTHER, test=[{"x": "no text"}])  # wrong, not hidden
    with pytest.raises(InputError, match="test.jsonl:1"):
        read_examples(config)


CHOICES = [{"t": f"t{i}", "options": ["a", "b"], "label": i % 2} for i in range(10)]
QUESTIONS = [{"t": f"t{i}", "q": f"q{i // 2}", "label": "xy"[i % 2]} for i in range(12)]


def test_the_place_of_a_right_choice_is_no_class(tmp_path):
    """A holdout of 3 of 10 is the first of the shuffle; by class it would be 2 and 1 in turn."""
    task = {"choices": ("options",), "label": "label"}
    config = make_config(tmp_path, train=CHOICES, task=task, protocol="holdout", size=3, seed=4)
    rows = list(range(10))
    np.random.RandomState(4).shuffle(rows)
    assert texts(config)["dev"] == [f"t{row}" for row in sorted(rows[:3])]


def test_numbers_have_no_classes_to_draw_by(tmp_path):
    rows = [{"t": f"t{i}", "x": i / 2} for i in range(10)]
    config = make_config(tmp_path, train=rows, task={"number": "x"}, protocol="kshot", k=2)
    with pytest.raises(InputError, match="kshot samples by class, but task custom has numbers"):
        read_examples(config)
    config = config.replace({"data.protocol": {"name": "holdout", "size": 3}})
    assert [len(part) for part in texts(config).values()] == [7, 3]


def test_questions_are_not_divided_between_train_and_dev(tmp_path):
    """Of 6 questions with 2 candidates each; single candidates would be no question's score."""
    task = {"question": ("q",), "metric": "f1a", "labels": ("x", "y")}
    config = make_config(tmp_path, train=QUESTIONS, task=task, protocol="kfold", folds=3, k=0)
    actual = texts(config)
    questions = {n: {int(t[1:]) // 2 for t in part} for n, part in actual.items()}
    assert len(actual["dev"]) == 4 and not questions["train"] & questions["dev"]
    config = config.replace({"data.protocol.k": 4})
    with pytest.raises(InputError, match="data.protocol.k=4 samples single candidates, but f1a"):
        read_examples(config)
    config = config.replace({"task.metric": "accuracy"})
    assert [len(part) for part in texts(config).values()] == [5, 3]


# -- rows that a file lists are those of the training file, whatever is left out or spread ---------


def test_rows_of_another_column_still_count(tmp_path):
    rows = [{"t": f"t{i}", "src": "ab"[i % 2], "label": "xy"[i // 2 % 2]} for i in range(12)]
    config = make_config(tmp_path, train=rows, **listed(tmp_path, train=[5, 1], dev=[11]))
    config = config.replace({"data.only": "src=b"})
    assert texts(config) == {"train": ["t5", "t1"], "dev": ["t11"]}
    listed(tmp_path, train=[1, 2], dev=[3])
    with pytest.raises(InputError, match="rows.jsonl:1: row 2 is not in train"):
        read_examples(config, ("train", "dev"))


def test_rows_without_an_agreed_label_still_count(tmp_path):
    labels = (0, -1, 1, 2, 0)
    rows = [{"premise": f"p{i}", "hypothesis": "h", "label": x} for i, x in enumerate(labels)]
    config = make_config(tmp_path, train=rows, **listed(tmp_path, train=[0, 2], dev=[3]))
    config = config.replace({"task.name": "snli", "task.fields": ()})
    assert texts(config, field="premise") == {"train": ["p0", "p2"], "dev": ["p3"]}


def test_a_row_of_candidates_is_all_of_them(tmp_path):
    rows = [{"s": f"{i} ___", "options": ["x", "y"], "right": ["x"]} for i in range(3)]
    task = {"fields": ("s", "word"), "question": ("s",), "candidate": "word", "placeholder": "___"}
    task |= {"candidates": ("options", "right"), "metric": "answer_f1"}
    named = listed(tmp_path, train=[2], dev=[0])
    config = make_config(tmp_path, train=rows, task=task, **named)
    assert texts(config, field="s") == {"train": ["2 x", "2 y"], "dev": ["0 x", "0 y"]}
    rows[1]["right"] = []
    make_config(tmp_path, train=rows, task=task, **named)
    with pytest.raises(InputError, match="train.jsonl:2: column 'right' lists no correct"):
        read_examples(config, ("train", "dev"))


# -- the task of a config --------------------------------------------------------------------------


def test_words_of_a_config_take_the_place_of_the_tasks():
    """For every kind of backbone; a text-to-text model says the first of each class."""
    plain = read_task(TaskConfig(name="cb"))
    assert plain.causal_words and plain.words != plain.causal_words
    task = read_task(TaskConfig(name="cb", words=("yes| right", "no", "maybe")))
    assert task.words == (("yes", "right"), ("no",), ("maybe",)) and task.causal_words == ()
    assert task.targets == ("yes", "no", "maybe") and task.labels == plain.labels
    with pytest.raises(InputError, match="task.words has 3 entries for 2 classes of sst2"):
        read_task(TaskConfig(name="sst2", words=("a", "b", "c")))


@pytest.mark.parametrize("text, spaced", [("", True), ("true", True), ("false", False)])
def test_label_words_stand_behind_a_space_unless_the_config_says_otherwise(text, spaced):
    assert read_task(TaskConfig(name="sst2", spaced=text)).spaced is spaced


@pytest.mark.parametrize("fields, message", [
    ({"name": "sst2"}, "task.name='sst2' defines others"),
    ({"name": "custom", "labels": ("x", "y"), "fields": ("t",)}, "task.labels=.* defines others"),
])  # fmt: skip
def test_classes_are_named_in_one_way(fields, message):
    with pytest.raises(InputError, match=message):
        read_task(TaskConfig(vocabulary="words.txt", **fields))


def test_a_field_of_a_custom_task_is_refused_where_nothing_reads_it():
    with pytest.raises(InputError, match="task.label='right' is only valid with task.name=custom"):
        read_task(TaskConfig(name="sst2", label="right"))
    assert read_task(TaskConfig(name="sst2")).label == "label"
    assert read_task(TaskConfig(name="sst2", label="label")).label == "label"  # the task's own
