"""launch/fetch_data.py writes what the papers' commands read."""

import sys

import datasets
import pytest

from configs.dart.few_shot import SEEDS
from jaxprompt.data.sampling.listed_rows import read_listed
from jaxprompt.data.sources import splits
from jaxprompt.data.sources.files import read_file
from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks.registry import get_task
from launch import fetch_data

FILMS = [{"idx": i, "sentence": f"film {i}", "label": i % 2} for i in range(70)]
TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]
SENTENCES = [{"tokens": ["Ada", "sings"], "ner_tags": [1, 0]}]
TAGGED = datasets.Features(
    tokens=datasets.Sequence(datasets.Value("string")),
    ner_tags=datasets.Sequence(datasets.ClassLabel(names=TAGS)),
)
HUB = {
    "sst2": dict.fromkeys(("train", "validation", "test"), datasets.Dataset.from_list(FILMS)),
    "conll2003": dict.fromkeys(
        ("train", "validation", "test"), datasets.Dataset.from_list(SENTENCES, features=TAGGED)
    ),
}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The folder of sst2 and conll2003."""
    monkeypatch.setattr(splits, "_load_hub", lambda task, *_: HUB[task.name])
    words = [f"--output={tmp_path / 'DATA'}", "--tasks=sst2,conll2003"]
    monkeypatch.setattr(sys, "argv", ["fetch_data.py", *words])
    assert fetch_data.main() == 0
    return tmp_path / "DATA"


def test_splits_are_those_with_public_labels(data):
    assert {path.name for path in (data / "sst2").iterdir()} == {
        "train.jsonl.gz", "test.jsonl.gz", "kshot_16.jsonl.gz",
    }  # fmt: skip
    assert list(read_split(get_task("sst2"), "train", source=str(data / "sst2"))) == FILMS


def test_tags_are_names(data):
    (row,) = read_split(get_task("conll2003"), "dev", source=str(data / "conll2003"))
    assert row == {"tokens": ["Ada", "sings"], "ner_tags": ["B-PER", "O"]}
    assert not (data / "conll2003/kshot_16.jsonl.gz").exists()


def test_samples_have_16_rows_per_class(data):
    path = data / "sst2/kshot_16.jsonl.gz"
    assert [row["seed"] for row in read_file(path)] == list(SEEDS)
    train, dev = read_listed(path, SEEDS[0], len(FILMS))
    assert len({*train, *dev}) == 64
    assert [sum(FILMS[i]["label"] for i in part) for part in (train, dev)] == [16, 16]


def test_a_task_that_is_not_on_the_hub_is_named(data, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fetch_data.py", f"--output={data}", "--tasks=conll04,sst2"])
    assert fetch_data.main() == 2
    assert "conll04" in capsys.readouterr().err
