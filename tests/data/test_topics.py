"""The topic sentences inside the package: counts, balance, variety, no near-duplicates."""

import json
import re
from collections import Counter
from itertools import combinations, groupby
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "jaxprompt" / "data" / "topics"
LABELS = ("business", "food", "music", "science", "sports", "travel")
PER_CLASS = {"train": 16, "dev": 16, "test": 40}
WORD = re.compile(r"[^\W_]+(?:['.,:-][^\W_]+)*")  # "half-time", "don't", "1.78" are one word


def read(split):
    """Reads one split as a list of {"text", "label"}."""
    lines = (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def words(text):
    """Splits a sentence into lower-case words."""
    return WORD.findall(text.lower())


@pytest.fixture(scope="module")
def splits():
    """The three splits by name."""
    return {split: read(split) for split in PER_CLASS}


@pytest.fixture(scope="module")
def texts(splits):
    """The sentences of all splits."""
    return [row["text"] for rows in splits.values() for row in rows]


def test_counts_per_class(splits):
    """Each split holds its number of sentences of each of the six labels, and nothing else."""
    for split, count in PER_CLASS.items():
        assert Counter(row["label"] for row in splits[split]) == dict.fromkeys(LABELS, count)


def test_rows_are_plain(splits):
    """A row is a text and a label, without stray white space."""
    for row in (row for rows in splits.values() for row in rows):
        assert list(row) == ["text", "label"]
        assert row["text"] == " ".join(row["text"].split())


def test_classes_are_mixed(splits):
    """No file is sorted by class: no label stands more than six times in a row."""
    for rows in splits.values():
        runs = [len(list(run)) for _, run in groupby(row["label"] for row in rows)]
        assert max(runs) <= 6


def test_no_duplicates(texts):
    """No sentence appears twice, within or across splits."""
    assert len({text.casefold() for text in texts}) == len(texts) == 432


def test_lengths(texts):
    """Sentences are neither fragments nor paragraphs, and their lengths differ."""
    lengths = [len(words(text)) for text in texts]
    assert 5 <= min(lengths) and max(lengths) <= 45
    assert len(set(lengths)) >= 20


def test_openings_differ(texts):
    """No three opening words are used by more than three sentences."""
    openings = Counter(tuple(words(text)[:3]) for text in texts)
    assert max(openings.values()) <= 3


def test_vocabulary_is_varied(texts):
    """The sentences use many words: a template grammar could not."""
    assert len({word for text in texts for word in words(text)}) >= 2400


def test_no_near_duplicates(texts):
    """Every pair of sentences has a Jaccard similarity of its word sets below 0.6."""
    bags = [set(words(text)) for text in texts]
    assert max(len(a & b) / len(a | b) for a, b in combinations(bags, 2)) < 0.6


def test_label_words_are_rare(splits):
    """A class name stands in at most three of its own sentences of a split."""
    for rows in splits.values():
        hits = Counter(row["label"] for row in rows if row["label"] in words(row["text"]))
        assert all(count <= 3 for count in hits.values())
