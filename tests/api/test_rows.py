"""Rows as users hold them: what a cell or a number means does not depend on who holds it."""

import datasets
import numpy as np
import pandas
import pytest
from tiny_run import TOPICS, write_rows

import jaxprompt as jp
from jaxprompt.api.rows import infer_task, make_records, make_rows
from jaxprompt.build.examples import read_examples
from jaxprompt.config.load import load_config
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task

NAMES = ["tool", "food", "beast"]  # another order than that of their names
TASK = custom_task(fields=("text",))


@pytest.fixture(scope="module")
def numbered(rows):
    """Data sets whose labels are numbers with names: train, dev."""
    kind = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=NAMES))
    return [datasets.Dataset.from_list(part, features=kind) for part in rows]


@pytest.mark.long
@pytest.mark.long
def test_the_numbers_of_a_data_set_are_its_own_classes(backbone, numbered, small):
    assert set(NAMES) == set(TOPICS)
    steps = {**small, "steps": 60, "multiple": 24}
    trained = jp.train(backbone, *numbered, method=jp.prefix(4, lr=3e-2), **steps)
    assert trained.prompt.card["task"]["labels"] == NAMES
    model = jp.attach(backbone, trained.prompt)
    right = jp.evaluate(model, numbered[1])
    assert right["accuracy"] > 0.6
    assert jp.evaluate(model, list(numbered[1])) == right
    assert jp.evaluate(model, numbered[1].to_pandas()) == right
    again = jp.train(backbone, numbered[0], list(numbered[1]), method=jp.prefix(4), **small)
    assert again.prompt.card["task"]["labels"] == NAMES


def test_classes_that_the_rows_lack_keep_their_numbers(backbone, numbered, small):
    part = numbered[0].filter(lambda row: NAMES[row["label"]] != "tool")
    trained = jp.train(backbone, part, numbered[1], method=jp.prefix(4), **small)
    assert trained.prompt.card["task"]["labels"] == NAMES


def test_examples_of_a_data_set_without_a_label_are_left_out_and_counted(rows):
    """Its label is then -1: no class of its own, and the others keep the data set's order."""
    kind = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=NAMES))
    more = [*rows[0], {"text": "a text", "label": -1}]
    parts = {"train": datasets.Dataset.from_list(more, features=kind), "dev": rows[1]}
    config = load_config("base", [("task.name", "custom"), ("task.fields", ("text",))])
    split_rows = {name: make_rows(part, name, TASK) for name, part in parts.items()}
    examples = read_examples(config, in_memory=split_rows)
    assert examples.task.labels == tuple(NAMES) and len(examples.splits["train"]) == len(rows[0])
    (note,) = (line for line in examples.notes if "left out" in line)
    assert note.endswith(f"train 1 of {len(more)}")
    # In rows without names -1 is a class like any other, and it is said that it may be none.
    signs = [{"text": "a", "label": value} for value in (0, -1, 1, -1)]
    examples = read_examples(
        config, in_memory={name: make_rows(signs, name, TASK) for name in parts}
    )
    assert examples.task.labels == ("-1", "0", "1")
    assert any("-1 is read as a class (2 of 4 training" in line for line in examples.notes)


@pytest.mark.parametrize(
    ("labels", "is_odd"), [((1, 2, -1), True), (("a", "b", -1), True), ((-1, 1, 1), False)]
)
def test_a_class_of_minus_one_is_noted_but_for_two_signs(labels, is_odd):
    config = load_config("base", [("task.name", "custom"), ("task.fields", ("text",))])
    signs = [{"text": f"text {i}", "label": value} for i, value in enumerate(labels)]
    examples = read_examples(
        config, in_memory={name: make_rows(signs, name, TASK) for name in ("train", "dev")}
    )
    assert any("-1 is read as a class" in line for line in examples.notes) is is_odd


def test_a_file_is_evaluated_by_its_path(backbone, trained, rows, tmp_path):
    model = jp.attach(backbone, trained.prompt)
    path = write_rows(tmp_path / "dev.jsonl", rows[1])
    assert jp.evaluate(model, str(path)) == jp.evaluate(model, rows[1]) == jp.evaluate(model, path)
    with pytest.raises(jp.InputError, match="no such file"):
        jp.evaluate(model, str(tmp_path / "de.jsonl"))


def test_a_streaming_data_set_is_read(numbered):
    stream = numbered[0].to_iterable_dataset()
    actual, whole = (make_rows(source, "train", TASK) for source in (stream, numbered[0]))
    assert list(actual) == list(whole) and actual.classes == whole.classes == tuple(NAMES)


def test_arrays_in_cells_are_lists(tmp_path):
    """A DataFrame that was read from Parquet has an array where a row has a list."""
    row = {
        "tokens": ["Ada", "lives"], "tags": ["B-X", "O"], "texts": ["u", "v"],
        "answers": {"text": ["Ada"], "answer_start": [0]},
    }  # fmt: skip
    pandas.DataFrame([row]).to_parquet(tmp_path / "rows.parquet")
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    assert isinstance(frame["tokens"][0], np.ndarray)
    for source in (frame, [dict(frame.iloc[0])]):
        assert list(make_rows(source, "train", TASK)) == [row]
    task = custom_task(fields=("tokens",), tags="tags", labels=("X",))
    (record,) = make_records(frame, task)
    assert record.example.words == ("Ada", "lives")
    text_task = custom_task(fields=("tokens",), target="texts")
    (actual,) = make_rows(frame.assign(tokens="a text"), "train", text_task)
    assert read_example(text_task, actual, "x:1").references == ("u", "v")


def test_tags_that_are_numbers_with_names():
    kind = datasets.Features(
        tokens=datasets.List(datasets.Value("string")),
        pos=datasets.List(datasets.ClassLabel(names=["NN", "VB"])),
    )
    data = datasets.Dataset.from_list([{"tokens": ["dogs", "run"], "pos": [0, 1]}], features=kind)
    task = custom_task(fields=("tokens",), tags="pos", scheme="none")
    assert list(make_rows(data, "train", task)) == [
        {"tokens": ["dogs", "run"], "pos": ["NN", "VB"]}
    ]


def test_a_column_without_a_name_is_refused():
    frame = pandas.DataFrame([["a text", "b"]])
    with pytest.raises(jp.InputError, match="train: the columns .0, 1. of the DataFrame must"):
        make_rows(frame, "train", TASK)


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", "arrow"])
def test_the_format_of_a_data_set_changes_nothing(form, numbered):
    """Its class names went with the format "torch", whose labels are tensors."""
    plain, formatted = (
        make_rows(source, "train", TASK) for source in (numbered[0], numbered[0].with_format(form))
    )
    assert list(formatted) == list(plain) and formatted.classes == plain.classes
    streaming = numbered[0].to_iterable_dataset().with_format("numpy")
    assert list(make_rows(streaming, "train", TASK)) == list(plain)


def test_a_text_that_is_none_is_named_by_its_number():
    with pytest.raises(jp.InputError, match=r"^text 2: None is not a string"):
        make_records(["a good text", None], TASK)
    with pytest.raises(jp.InputError, match=r"^text 1: nan is not a string"):
        make_records(iter([float("nan"), "a"]), TASK)
    actual = make_records((text for text in "ab"), TASK)
    assert [record.row for record in actual] == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    "row, overrides, text, label",
    [
        ({"text": "a", "label": 1}, {}, "text", "label"),
        ({"id": "7", "text": "a", "label": "x", "note": "b"}, {}, "text", "label"),
        ({"message": "a", "team": "x"}, {}, "message", "team"),
        ({"labels": 1, "ticket": "a"}, {}, "ticket", "labels"),
        ({"n": 1, "ticket": "a"}, {}, "ticket", "n"),
        ({"ticket": "a", "team": "x"}, {"label": "team"}, "ticket", None),
        ({"ticket": "a", "reply": "x", "n": 2}, {"task__target": "reply"}, "ticket", None),
        ({"a": "b"}, {"fields": "a", "label": "b"}, "text", None),
    ],
)
def test_a_task_that_is_not_given_follows_from_the_columns(row, overrides, text, label):
    rows, task = infer_task([row], overrides)
    assert list(rows) == [row] and list(task["fields"]) == [text] and task.get("label") == label


def test_a_column_of_messages_is_one_of_conversations():
    row = {"messages": [{"role": "user", "content": "a"}], "id": 3}
    expected = {"name": "custom", "fields": (), "messages": ("messages",)}
    assert infer_task([row], {})[1] == expected
    assert infer_task([{"chats": []}], {"messages": ["chats"]})[1] == expected  # which it replaces
    assert infer_task([{"messages": "a", "label": 1}], {})[1]["fields"] == ["messages"]
    assert jp.task(messages=["chats"])["fields"] == ()


@pytest.mark.parametrize(
    "row",
    [
        {"ticket": "a", "team": "x"},  # both are strings
        {"text": "a"},
        {"text": "a", "team": "x", "kind": "y"},
        {"n": 1, "label": 2},
    ],
)
def test_columns_that_leave_the_task_open_are_refused(row):
    with pytest.raises(jp.InputError, match=f"{list(row)[0]}.*task=jp.task"):
        infer_task([row], {})
