"""Files and hub data sets in the forms in which they are published."""

import json

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from jaxprompt.data.sources import read_split
from jaxprompt.data.tasks import custom_task, get_task, has_label, read_example, with_labels
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
    found = read(task, path)
    assert [read_example(task, row, "x").label for row in found] == labels


def test_a_json_of_one_object_is_no_row(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{\n"text": "a"}')
    with pytest.raises(InputError, match="must hold a list of objects"):
        read(custom_task(fields=("text",)), path)
    path.write_text('{"text": "a"}\n{"text"')
    with pytest.raises(InputError, match="a.json:2: broken JSON"):
        read(custom_task(fields=("text",)), path)


def test_what_clue_writes_into_its_hidden_test_is_no_answer():
    task = get_task("cmrc2018")
    told = lambda *texts: has_label(task, {"answers": {"text": [*texts], "answer_start": [-1]}})
    assert told("Paris") and told("Paris", "FAKE_ANSWER_1")
    assert not told("FAKE_ANSWER_1", "FAKE_ANSWER_2")


@pytest.mark.parametrize("name", ["conll2003", "quoref"])
def test_a_data_set_with_a_script_is_taken_as_the_hub_converted_it(name, monkeypatch):
    asked, task = [], get_task(name)

    def load_dataset(hub, name=None, *, revision=None, cache_dir=None):
        asked.append(revision)
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found a.py")
        row = {column: ["a"] for column in task.fields}
        return {"train": Dataset.from_dict(row)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read_split(task, "train", source="hub")) == 1
    assert asked == [None, "refs/convert/parquet"]
