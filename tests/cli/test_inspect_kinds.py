"""`inspect` on runs of other forms: choices, texts, zero-shot, a mesh, data that is gone."""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_inspect import KEPT, look
from tiny_run import (
    jaxprompt,
    make_backbone,
    make_config,
    write_rows,
)

from jaxprompt.build.backbone import load_weights, open_backbone
from jaxprompt.build.scorer import build_scorer
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.prompt_metadata import ExampleLayout
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.data.tasks.task import Example
from jaxprompt.inspection.instances import Instance
from jaxprompt.inspection.learned_rows import find_rows
from jaxprompt.inspection.report import list_instances
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.runs.train import train_prompt

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow


def write_splits(folder, make):
    for seed, (name, size) in enumerate({"train": 24, "dev": 12, "test": 12}.items()):
        write_rows(folder / f"{name}.jsonl", make(seed, size))


NAMED = {
    "a word": (
        "bert", {"name": "dart", "length": 0, "each": "word"}, "label_rows", "{text} [mask]",
        ["beast (old cat)", "beast (dog)", "food (bread)"],
    ),
    "a class": (
        "bert", {"name": "dart", "length": 0}, "label_rows", "{text} [mask]", ["beast", "food"],
    ),
    "a subword": (
        "discriminator", {"name": "dpt"}, "discriminator", "{text} [classes]",
        ["beast (old)", "beast (cat)", "food (bread)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("each", NAMED)
def test_rows_of_a_class_are_told_apart(each, tmp_path):
    family, prompt, head, template, names = NAMED[each]
    opened = open_backbone(BackboneConfig(path=str(make_backbone(tmp_path / family, family))))
    words = (("old cat", "dog"), ("bread",))
    scorer = build_scorer(
        opened, custom_task(fields=("text",), labels=("beast", "food"), words=words),
        ExampleLayout(
            max_len=24, max_target=8, multiple=8, padding_side="right", choices=1, form="cloze",
            answer="", eos=True,
        ), prompt=OpenBlock.from_dict(prompt),
        head=OpenBlock(head, {"copies": True} if head == "discriminator" else {}),
        template=template, batch=8,
    )  # fmt: skip
    _, loaded = load_weights(opened, make_placement(1, 1, devices=jax.devices()[:1]))
    params = scorer.model.init(jax.random.key(0), loaded.params)
    split = scorer.encode([Example({"text": "the"}, label=0)])
    rows = find_rows(scorer, params, None, scorer.one_batch(split.rows), 1)
    assert [(row.kind, row.name) for row in rows] == [("label row", name) for name in names]


def test_words_near_a_prompt_are_red_on_a_terminal_and_in_brackets_elsewhere():
    shown = [
        Instance(("Who", "wrote", "\x1b[2J"), np.zeros(3), (1, 2), "HUM"),
        Instance(("When", "?"), np.zeros(2), (), ""),
    ]
    report = SimpleNamespace(instances=SimpleNamespace(shown=shown))
    assert list_instances(report, colours=False) == (
        "HUM: Who [wrote] [\\x1b[2J]\nunknown class: When ?\n"
    )
    assert list_instances(report, colours=True) == (
        "HUM: Who \x1b[31mwrote\x1b[0m \x1b[31m\\x1b[2J\x1b[0m\nunknown class: When ?\n"
    )
    assert list_instances(SimpleNamespace(instances=None), colours=True) == ""


@pytest.mark.long
def test_an_answer_among_several_right_classes_is_right(backbone, tmp_path):
    """As in DialogRE: the first relation of an example is learned, all of them count."""
    labels = get_task("dialog_re").labels
    row = {"dialog": ["cat : the old cat was near it"], "x": "cat", "y": "it"}
    several = [row | {"r": [first, labels[9]], "t": ["", ""]} for first in labels[:3]]
    write_rows(tmp_path / "train.jsonl", [row | {"r": [labels[9]], "t": [""]}] * 8)
    write_rows(tmp_path / "dev.jsonl", several)
    fields = {"task.name": "dialog_re", "head.name": "linear", "optim.lr": 0.3}
    train_prompt(make_config(backbone, tmp_path, "prefix", **KEPT | fields), str(tmp_path / "run"))
    _, report, page = look(tmp_path / "run", "--steps=4")
    counts = np.array(report["confusion"]["counts"])
    assert counts[9, 9] == counts.sum() == 3 and "3 of 3 predictions are right" in page


@pytest.mark.long
def test_the_start_needs_the_training_examples_where_it_was_drawn_from_them(
    backbone, data, tmp_path
):
    folder = shutil.copytree(data, tmp_path / "data")
    fields = KEPT | {"prompt.length": 4, "prompt.start": "task"}
    train_prompt(make_config(backbone, folder, "soft", **fields), str(tmp_path / "run"))
    _, report, _ = look(tmp_path / "run", "--steps=4")
    assert [entry["step"] for entry in report["separation"]] == [0, 2, 4]
    assert all(row["start"]["cosine"] == 1 for row in report["rows"])  # a word of the vocabulary
    (folder / "train.jsonl").unlink()
    _, report, page = look(tmp_path / "run", "--steps=4")
    assert [entry["step"] for entry in report["separation"]] == [2, 4]
    assert all(row["start"] is None for row in report["rows"])
    assert any("initial parameters are not known" in line for line in report["remarks"])
    assert "unknown" in page


def test_exports_are_compared(trained, tmp_path, capsys):
    for name in ("a", "b"):
        shutil.copytree(trained / "export", tmp_path / name)
    code, out, err = jaxprompt(capsys, "inspect", f"--exports={tmp_path}")
    assert code == 0 and out == " 1.0000  a  b\n", err
    report = json.loads((tmp_path / "similarity.json").read_text())
    assert report["exports"] == ["a", "b"] and report["cosines"][0] == pytest.approx([1, 1])
    assert (tmp_path / "similarity.png").read_bytes()[:4] == b"\x89PNG"
