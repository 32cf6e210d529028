"""Files and hub data sets in the forms in which they are published."""

import json

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks.readers.reading import has_label, read_example, with_labels
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.errors import InputError

TOPICS = ("World", "Sports", "Business", "Sci/Tech")


def read(task, path):
    return read_split(task, "train", files={"train": str(path)})


def write_parquet(path, columns, **features):
    kinds = {name: Value("string") for name in columns} | features
    Dataset.from_dict(columns, features=Features(kinds)).to_parquet(path)
    return path


def test_a_parquet_file_names_its_classes(tmp_path):
    """`datasets` writes them into the file's metadata, and so does the hub."""
    columns = {"text": ["a", "b"], "label": [1, 0]}
    path = write_parquet(tmp_path / "a.parquet", columns, label=ClassLabel(names=TOPICS[:2]))
    task = custom_task(fields=("text",))
    rows = read(task, path)
    assert [row["label"] for row in rows] == ["Sports", "World"] and rows.classes == TOPICS[:2]
    assert with_labels(task, rows, rows.origin, rows.classes).labels == TOPICS[:2]
    path = write_parquet(tmp_path / "b.parquet", columns, label=ClassLabel(names=TOPICS))
    rows = read(get_task("ag_news"), path)  # whose labels are called otherwise, in this order
    assert [read_example(get_task("ag_news"), row, "x").label for row in rows] == [1, 0]


def test_examples_without_a_label_are_left_out_where_a_file_names_its_classes(tmp_path):
    """The hub marks them by -1, as in SNLI; a split with nothing else is a hidden test."""
    task, names = custom_task(fields=("text",)), ("entail", "neutral", "contra")
    columns = {"text": list("abcde"), "label": [2, -1, 0, -1, 1]}
    path = write_parquet(tmp_path / "a.parquet", columns, label=ClassLabel(names=names))
    rows = read(task, path)
    assert [row["label"] for row in rows] == ["contra", "entail", "neutral"]
    assert rows.left_out == 2 and rows.origin(2) == f"{path}:5"
    assert with_labels(task, rows, rows.origin, rows.classes).labels == names
    columns = {"text": ["a", "b"], "label": [-1, -1]}
    rows = read(task, write_parquet(path, columns, label=ClassLabel(names=names)))
    assert len(rows) == 2 and rows.left_out == 0


def test_a_label_beyond_the_classes_of_a_data_set_is_refused():
    task, rows = custom_task(fields=("text",)), [{"label": "no"}, {"label": 2}, {"label": "yes"}]
    with pytest.raises(InputError, match="row 2: label 2 is not a label .*; labels: no, yes"):
        with_labels(task, rows, classes=("no", "yes"))


def test_hidden_tags_are_no_tags():
    """The hub hides them as it does labels; a row for training must have some."""
    task = custom_task(fields=("tokens",), tags="tags", labels=("X",), scheme="iob2")
    row = {"tokens": ["a", "b"], "tags": [-1, -1]}
    assert read_example(task, row, "x:1", need_label=False).tags == ()
    assert not has_label(task, row) and has_label(task, row | {"tags": ["O", "B-X"]})
    for tags in ([-1, -1], []):
        with pytest.raises(InputError, match="x:1: column 'tags' has no tags"):
            read_example(task, row | {"tags": tags}, "x:1")
    with pytest.raises(InputError, match="x:1: column 'tags' has the tag -1"):
        read_example(task, row | {"tags": ["O", -1]}, "x:1", need_label=False)


def test_tags_of_another_set_keep_their_names(tmp_path):
    tags = ["O", "B-LOC", "I-LOC", "B-DATE"]
    columns = {"tokens": [["Paris", "May"]], "ner_tags": [[1, 3]]}
    path = write_parquet(
        tmp_path / "a.parquet", columns, tokens=Sequence(Value("string")),
        ner_tags=Sequence(ClassLabel(names=tags)),
    )  # fmt: skip
    (row,) = read(get_task("conll2003"), path)
    assert row["ner_tags"] == ["B-LOC", "B-DATE"]


def test_conll2003_as_published(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n")
    assert list(read(get_task("conll2003"), path)) == [
        {"tokens": ["EU", "rejects"], "ner_tags": ["B-ORG", "O"]}
    ]


@pytest.mark.parametrize(
    ("name", "rows", "labels"),
    [
        ("eprstmt", [{"sentence": "a", "label": "Negative"},
                     {"sentence": "b", "label": "Positive"}],
         [0, 1]),
        ("snli", [{"gold_label": "neutral", "sentence1": "a", "sentence2": "b"},
                  {"gold_label": "-", "sentence1": "a", "sentence2": "b"}], [1]),
        ("mnli", [{"gold_label": "-", "sentence1": "a", "sentence2": "b"},
                  {"gold_label": "entailment", "sentence1": "a", "sentence2": "b"}], [0]),
        ("lcqmc", [{"text_a": "a", "text_b": "b", "label": "1"}] * 2, [1, 1]),
        ("chnsenticorp", [{"text_a": "a", "label": "0"}] * 2, [0, 0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_benchmarks_as_published(tmp_path, name, rows, labels, ending):
    """CLUE calls files of an object a line .json."""
    path = tmp_path / f"a.{ending}"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = get_task(name)
    actual = read(task, path)
    assert [read_example(task, row, "x").label for row in actual] == labels


def test_what_clue_writes_into_its_hidden_test_is_no_answer():
    task = get_task("cmrc2018")
    labelled = lambda *texts: has_label(task, {"answers": {"text": [*texts], "answer_start": [-1]}})
    assert labelled("Paris") and labelled("Paris", "FAKE_ANSWER_1")
    assert not labelled("FAKE_ANSWER_1", "FAKE_ANSWER_2")


@pytest.mark.parametrize("name", ["conll2003", "quoref"])
def test_a_data_set_with_a_script_is_taken_as_the_hub_converted_it(name, monkeypatch):
    requests, task = [], get_task(name)

    def load_dataset(hub, name=None, *, revision=None, cache_dir=None):
        requests.append(revision)
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found a.py")
        row = {column: ["a"] for column in task.fields}
        return {"train": Dataset.from_dict(row)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read_split(task, "train", source="hub")) == 1
    assert requests == [None, "refs/convert/parquet"]


@pytest.mark.parametrize(
    ("name", "labels"),
    [("trec", [2, 1, 0, 3, 4, 5]), ("sst5", [0, 1, 2, 3, 4]), ("mr", [0, 1]), ("subj", [0, 1]),
     ("cr", [0, 1]), ("mpqa", [0, 1])],
)  # fmt: skip
def test_folders_of_lm_bff(tmp_path, name, labels):
    """They have no header, and other numbers of TREC's classes than the hub."""
    lines = [f'{number},"a ""b"", c {number}"' for number in range(len(labels))]
    path = tmp_path / "train.csv"
    path.write_text("\n".join(lines) + "\n")
    task = get_task(name)
    rows = read(task, path)
    actual = [read_example(task, row, "x") for row in rows]
    assert [example.label for example in actual] == labels
    assert actual[1].fields["text"] == 'a "b", c 1' and rows.origin(1).endswith(":2")
    path.write_text('9,"a"\n')
    with pytest.raises(InputError, match=r"label '9' is not a label"):
        read_example(task, read(task, path)[0], "x")
    path.write_text('text,coarse_label,label\n"a",1,1\n')
    assert read_example(task, read(task, path)[0], "x").label == 1


def test_a_header_of_other_columns_is_no_row(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("sentence,polarity\na,1\n")
    (row,) = read(get_task("mr"), path)
    assert row == {"sentence": "a", "polarity": "1"}


@pytest.mark.parametrize(("name", "field"), [("dream", "dialogue"), ("c3", "context")])
def test_questions_of_a_list(tmp_path, name, field):
    """DREAM's and C3's own rows are lists without names."""
    questions = [{"question": f"Which, {i}?", "choice": ["a", "b", "c"], "answer": "abc"[i]}
             for i in range(2)]  # fmt: skip
    path = tmp_path / "train.json"
    path.write_text(
        json.dumps([[["M: a", "W: b"], questions, "1-1"], [["M: c"], questions[:1], "1-2"]])
    )
    task = get_task(name)
    rows = read(task, path)
    actual = [read_example(task, row, "x") for row in rows]
    assert [example.label for example in actual] == [0, 1, 0] and rows[1]["id"] == "1-1"
    assert actual[1].fields["question"] == "Which, 1?" and "W: b" in actual[1].fields[field]
