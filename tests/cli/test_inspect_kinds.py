"""`inspect` on runs of other forms: choices, texts, zero-shot, a mesh, data that is gone."""

import html
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from spoil import write_card
from test_inspect import KEPT, VERBALIZER, look, pictures
from test_reading_runs import questions
from tiny_run import (
    flags,
    jaxprompt,
    make_backbone,
    make_config,
    sentences,
    tiny_fields,
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


@pytest.mark.long
def test_a_row_for_each_choice_is_right_or_not(backbone, tmp_path):
    write_splits(tmp_path, questions)
    fields = KEPT | {
        "task.fields": "article,question", "task.label": "answer", "task.choices": "options",
        "task.template": "{article} [sep] {choice}", "data.eval_batch": 8,
    }  # fmt: skip
    train_prompt(make_config(backbone, tmp_path, "prefix", **fields), str(tmp_path / "run"))
    _, found, page = look(tmp_path / "run", "--steps=4")
    rows = (tmp_path / "dev.jsonl").read_text().splitlines()
    assert len(found["separation"]) == 3 and found["notes"]["confusion"] in html.unescape(page)
    assert "pca-4.png" in pictures(tmp_path / "run")
    shares = np.array(found["attention"]["encoder"]["tokens"])
    assert len({len(json.loads(row)["options"]) for row in rows}) > 1  # some choices are absent
    assert (shares > 0).all() and (shares < 1).all()


@pytest.mark.long
def test_texts_have_no_classes(tmp_path):
    t5 = make_backbone(tmp_path / "t5", "t5")
    make = lambda *at: [{"text": row["text"], "answer": row["label"]} for row in sentences(*at)]
    write_splits(tmp_path, make)
    fields = KEPT | {
        "head.name": "text", "task.target": "answer", "data.max_target": 6,
        "generate.max_new_tokens": 3, "prompt.length": 4,
    }  # fmt: skip
    train_prompt(make_config(t5, tmp_path, "soft", **fields), str(tmp_path / "run"))
    _, found, _ = look(tmp_path / "run")
    assert {"states", "confusion", "labels"} == set(found["notes"])
    assert len(found["rows"]) == 4 and set(found["attention"]) == {"encoder", "cross"}


@pytest.mark.long
def test_equal_states_are_one_point(backbone, tmp_path):
    """The same text in every example: a state without distances ends no process."""
    for name in ("train", "dev", "test"):
        rows = [{"text": "the cat was near it", "label": own} for own in ("beast", "food")]
        write_rows(tmp_path / f"{name}.jsonl", rows * 4)
    fields = KEPT | {"prompt.length": 2, "task.labels": "beast,food", "train.total_steps": 2}
    train_prompt(make_config(backbone, tmp_path, "soft", **fields), str(tmp_path / "run"))
    told, found, _ = look(tmp_path / "run", "--steps=2")
    assert found["separation"][-1]["inter"] == 0 and "R_D at step 2: nan" in told
    assert {"pca-2.png", "tsne-2.png"} <= {*pictures(tmp_path / "run")}


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
    found = SimpleNamespace(instances=SimpleNamespace(shown=shown))
    assert list_instances(found, colours=False) == (
        "HUM: Who [wrote] [\\x1b[2J]\nunknown class: When ?\n"
    )
    assert list_instances(found, colours=True) == (
        "HUM: Who \x1b[31mwrote\x1b[0m \x1b[31m\\x1b[2J\x1b[0m\nunknown class: When ?\n"
    )
    assert list_instances(SimpleNamespace(instances=None), colours=True) == ""


@pytest.mark.long
def test_zero_shot_has_one_step(backbone, data, tmp_path):
    fields = tiny_fields(backbone, data) | VERBALIZER
    words = flags({name: value for name, value in fields.items() if name != "prompt.length"})
    _, found, page = look(tmp_path / "out", "--config=base:zero_shot", *words)
    assert [own["step"] for own in found["separation"]] == [0]
    assert {"rows", "labels", "attention"} == set(found["notes"])
    assert "no metrics" in page and np.array(found["confusion"]["counts"]).sum() == 30


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
    _, found, page = look(tmp_path / "run", "--steps=4")
    counts = np.array(found["confusion"]["counts"])
    assert counts[9, 9] == counts.sum() == 3 and "3 of 3 predictions are right" in page


@pytest.mark.long
def test_a_text_of_few_words_has_no_more_soft_tokens(backbone, data, tmp_path):
    fields = KEPT | {"prompt.length": 24, "data.max_len": 40, "data.multiple": 40}
    train_prompt(make_config(backbone, data, "ipt", **fields), str(tmp_path / "run"))
    _, found, _ = look(tmp_path / "run", "--steps=4")
    words = json.loads((data / "dev.jsonl").read_text().splitlines()[0])["text"].split()
    assert len(found["rows"]) == len(words) < 24


@pytest.mark.long
def test_the_start_needs_the_training_examples_where_it_was_drawn_from_them(
    backbone, data, tmp_path
):
    folder = shutil.copytree(data, tmp_path / "data")
    fields = KEPT | {"prompt.length": 4, "prompt.start": "task"}
    train_prompt(make_config(backbone, folder, "soft", **fields), str(tmp_path / "run"))
    _, found, _ = look(tmp_path / "run", "--steps=4")
    assert [own["step"] for own in found["separation"]] == [0, 2, 4]
    assert all(row["start"]["cosine"] == 1 for row in found["rows"])  # a word of the vocabulary
    (folder / "train.jsonl").unlink()
    _, found, page = look(tmp_path / "run", "--steps=4")
    assert [own["step"] for own in found["separation"]] == [2, 4]
    assert all(row["start"] is None for row in found["rows"])
    assert any("initial parameters are not known" in line for line in found["remarks"])
    assert "unknown" in page


@pytest.mark.long
def test_a_mesh_changes_nothing(backbone, data, tmp_path):
    c = make_config(backbone, data, "prefix", arguments={"layers": "1-1"}, **KEPT)
    train_prompt(c, str(tmp_path / "run"))
    _, alone, _ = look(tmp_path / "run", "--steps=4")
    words = flags({"mesh.data": 2, "mesh.fsdp": True})
    _, divided, _ = look(tmp_path / "run", "--steps=4", *words)
    for name in ("tokens", "read"):
        one, other = (found["attention"]["encoder"][name] for found in (alone, divided))
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.array(alone["attention"]["encoder"]["tokens"])[1].max() == 0  # the other layer
    for one, other in zip(alone["separation"], divided["separation"], strict=True):
        assert one["ratio"] == pytest.approx(other["ratio"], rel=1e-4)


@pytest.mark.long
def test_exports_are_compared_by_their_mean_tokens(backbone, data, tmp_path, capsys, refused):
    folder = tmp_path / "prompts"
    means = {}
    for name, fields in {"a": {"seed": 0}, "b/c": {"seed": 1, "prompt.length": 2}}.items():
        train_prompt(make_config(backbone, data, "soft", **KEPT | fields), str(tmp_path / name[-1]))
        words = [f"--workdir={tmp_path / name[-1]}", f"--output={folder / name}"]
        assert jaxprompt(capsys, "export", *words)[0] == 0
        means[name] = load_file(folder / name / "prompt.safetensors")["prompt/slots"].mean(0)
    code, out, err = jaxprompt(capsys, "inspect", f"--exports={folder}")
    assert code == 0, err
    a, b = (x / np.linalg.norm(x) for x in means.values())
    assert out == f"{a @ b:7.4f}  a  b/c\n"
    found = json.loads((folder / "similarity.json").read_text())
    assert found["exports"] == ["a", "b/c"]
    np.testing.assert_allclose(found["cosines"], [[1, a @ b], [a @ b, 1]], atol=1e-6)
    assert (folder / "similarity.png").read_bytes()[:4] == b"\x89PNG"
    assert "contains 1 exports" in refused("inspect", f"--exports={folder / 'a'}", started=True)
    train_prompt(make_config(backbone, data, "prefix", **KEPT), str(tmp_path / "d"))
    words = [f"--workdir={tmp_path / 'd'}", f"--output={folder / 'd'}"]
    assert jaxprompt(capsys, "export", *words)[0] == 0
    line = refused("inspect", f"--exports={folder}", started=True)
    assert f"{folder / 'd'} has method prefix, {folder / 'a'} has soft; give prompts of one" in line


@pytest.mark.parametrize(
    "change, told",
    [
        ({"prompt": {"first": 1, "last": 2}}, "has layers 2-2, {first} has 1-1; give prompts of"),
        ({"method": "constant"}, "has method constant, {first} has prefix; give prompts of one"),
        ({"backbone": {"fingerprint": "1" * 64}}, "has backbone 111111111111, {first} has "),
    ],
)
def test_prompts_of_other_kinds_are_not_compared(
    change, told, backbone, data, tmp_path, tmp_path_factory, capsys, refused
):
    """Of equal widths each: the numbers do not tell."""
    made = tmp_path_factory.getbasetemp() / "first-layer"
    if not made.exists():
        c = make_config(backbone, data, "prefix", **KEPT, prompt__layers="1-1")
        train_prompt(c, str(tmp_path / "run"))
        words = [f"--workdir={tmp_path / 'run'}", f"--output={made}"]
        assert jaxprompt(capsys, "export", *words)[0] == 0
    first, other = (shutil.copytree(made, tmp_path / "prompts" / name) for name in "ab")
    capsys.readouterr()
    assert jaxprompt(capsys, "inspect", f"--exports={tmp_path / 'prompts'}")[0] == 0
    card = json.loads((other / "prompt.json").read_text())
    for block, own in change.items():
        card[block] = card[block] | own if isinstance(own, dict) else own
    write_card(other / "prompt.json", card)
    line = refused("inspect", f"--exports={tmp_path / 'prompts'}", started=True)
    assert f"{other} {told.format(first=first)}" in line
