"""`launch/accuracy examples`: a task of pre-training as texts with labels."""

import json

from tiny_pretrain import corpus_texts, make_kind
from tiny_run import ROOT, write_rows

from jaxprompt.config.files import load_module

module = load_module(str(ROOT / "launch" / "accuracy" / "examples.py"))


def test_examples_are_those_of_the_task(tmp_path, monkeypatch):
    texts = corpus_texts()
    corpus = write_rows(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    backbone = make_kind(tmp_path / "gpt2", "gpt2")
    monkeypatch.setattr(module, "SPLITS", {"train": (0, 60), "dev": (1, 20), "test": (1, 20)})
    settings = {"corpus.path": str(corpus), "backbone.path": str(backbone), "data.max_len": "48"}
    settings |= {"backbone.dtype": "float32", "prompt.length": "2", "ppt.matched": "False"}
    found = module.write_examples("nsp", list(settings.items()), str(tmp_path / "out"))
    assert found == {"train": 60, "dev": 20, "test": 20}
    lines = {split: (tmp_path / "out/nsp" / f"{split}.jsonl").read_text() for split in found}
    rows = {split: list(map(json.loads, text.splitlines())) for split, text in lines.items()}

    document = {unit: i for i, text in enumerate(texts) for unit in text.split("\n")}
    units = [text.split("\n") for text in texts]
    beside = {frozenset(pair) for text in units for pair in zip(text[:-1], text[1:], strict=True)}
    learned, held = set(), set()
    for split, count in found.items():
        assert len(rows[split]) == count and {row["label"] for row in rows[split]} == {0, 1, 2}
        for row in rows[split]:
            first, second = row["text"].split("? ")
            (learned if split == "train" else held).update((document[first], document[second]))
            assert (frozenset((first, second)) in beside) == (row["label"] == 2)
            assert (document[first] == document[second]) == (row["label"] > 0)
    assert not learned & held
    assert lines["dev"] != lines["test"]
