"""The topic sentences inside the package: balanced, plain and distinct."""

import json
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "jaxprompt" / "data" / "topics"
LABELS = ("business", "food", "music", "science", "sports", "travel")


def test_every_split_has_as_many_distinct_sentences_of_each_label():
    texts = []
    for split, count in {"train": 16, "dev": 16, "test": 40}.items():
        lines = (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert all(list(row) == ["text", "label"] for row in rows)
        assert Counter(row["label"] for row in rows) == dict.fromkeys(LABELS, count)
        texts += [row["text"] for row in rows]
    assert all(text == " ".join(text.split()) for text in texts)
    assert len({text.casefold() for text in texts}) == len(texts) == 432
