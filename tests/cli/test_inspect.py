"""What `inspect` finds and writes, for every method and kind of answer, on tiny runs."""

import contextlib
import functools
import html
import io
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import (
    TOPICS,
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    succeed,
    write_rows,
)

from jaxprompt import tree
from jaxprompt.__main__ import main
from jaxprompt.build.backbone import load_weights, open_backbone
from jaxprompt.build.scorer import build_scorer
from jaxprompt.build.task import eval_batches
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.prompt_metadata import ExampleLayout
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.data.tasks.task import Example
from jaxprompt.inspection.learned_rows import find_rows
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.runs.restore import restore_run
from jaxprompt.runs.train import train_prompt
from jaxprompt.scoring.separation import class_separation
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.evaluation import predict_scores, scoring_step

pytest.importorskip("matplotlib")

KEPT = {"train.total_steps": 4, "train.eval_steps": 2, "train.keep": 9, "backbone.dropout": 0}
DART = {
    "head.name": "label_rows", "task.template": "{text} it was about [soft*2] [mask]",
    "task.words": "beast,food,tool", "optim.lr": 0.1, "prompt.length": 2,
}  # fmt: skip
VERBALIZER = {
    "head.name": "verbalizer", "task.template": "{text} it was [mask]",
    "task.words": "beast,food,tool",
}  # fmt: skip
RUNS = {
    "bert prefix": ("bert", "prefix", {"optim.lr": 0.1}, {"layers": "2-2"}),
    "bert verbalizer": ("bert", "soft", VERBALIZER | {"optim.lr": 0.3}, {}),
    "dart": ("bert", "dart", DART, {"length": 2, "text": "it was", "lr": 0.1}),
    "t5 prefix": ("t5", "prefix", VERBALIZER, {"decoder": 2, "cross": 3}),
    "gpt2 soft": ("gpt2", "soft", VERBALIZER | {"optim.lr": 0.3}, {}),
    "head alone": ("bert", "head_only", {}, {}),
}


@pytest.fixture(scope="module")
def runs(backbone, data, tmp_path_factory):
    """Trains a run of RUNS, once. Returns its workdir and its config."""

    @functools.cache
    def make(name):
        family, method, fields, arguments = RUNS[name]
        folder = tmp_path_factory.mktemp("run")
        model = backbone if family == "bert" else make_backbone(folder / family, family)
        config = make_config(model, data, method, arguments=arguments, **KEPT, **fields)
        assert train_prompt(config, str(folder / "run")) is not None
        return folder / "run", config

    return make


def look(workdir, *words):
    """-> stdout, the JSON, the page"""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["inspect", f"--workdir={workdir}", *words]) == 0
    folder = workdir / "inspect"
    page = (folder / "inspect.html").read_text("utf-8")
    return out.getvalue(), json.loads((folder / "inspect.json").read_text("utf-8")), page


@pytest.fixture(scope="module")
def inspected(runs):
    """Inspects a run of RUNS at its last step, once."""
    return functools.cache(lambda name: look(runs(name)[0], "--top=4", "--steps=4"))


def pictures(workdir):
    return sorted(path.name for path in (workdir / "inspect").glob("*.png"))


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_its_page(name, runs, inspected, capsys):
    workdir, _ = runs(name)
    out, report, page = inspected(name)
    assert [entry["step"] for entry in report["separation"]] == [0, 2, 4]
    assert np.isfinite([entry["ratio"] for entry in report["separation"]]).all()
    code, measured, _ = jaxprompt(capsys, "evaluate", f"--workdir={workdir}")
    counts = np.array(report["confusion"]["counts"])
    assert code == 0 and counts.sum() == 30
    assert np.trace(counts) / 30 == pytest.approx(json.loads(measured)["accuracy"])
    expected_pictures = {"pca-4.png", "tsne-4.png", "ratio.png", "confusion.png", "curves.png"}
    assert expected_pictures <= set(pictures(workdir))
    kinds = [row["kind"] for row in report["rows"]]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    rows = {} if "prefix" in name or name == "head alone" else {"soft token": 4}
    assert counts == ({"soft token": 2, "label row": 3} if name == "dart" else rows)
    assert all(len(row["nearest"]) == 4 for row in report["rows"])
    assert ("rows" in report["notes"]) == (not kinds)
    assert ("labels" in report["notes"]) == (name != "dart")
    streams = {"t5 prefix": {"encoder", "decoder", "cross"}, "head alone": set()}
    assert set(report["attention"]) == streams.get(name, {"encoder"})
    assert ("attention" in report["notes"]) == (name == "head alone")
    for text in report["notes"].values():
        assert text in html.unescape(page) and "\n" not in text
    assert page.count("<img ") == len(pictures(workdir)) == len(re.findall("data:image/png", page))
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page
    assert all(row["name"] in out for row in report["rows"])


@pytest.mark.long
def test_what_is_found_is_that_of_plain_numpy(runs, inspected):
    """Nearest words, the words near the soft tokens, and the separation of the states."""
    (workdir, config), (out, report, page) = runs("dart"), inspected("dart")
    trained = restore_run(config, str(workdir), ["dev"])
    params = tree.merge(trained.weights.trainable, trained.weights.frozen)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    words = unit(np.asarray(params["backbone"]["embed"]["word"]["table"], np.float64))
    soft = unit(np.asarray(params["prompt"]["table"], np.float64))
    label_rows = unit(np.asarray(params["prompt"]["rows"], np.float64))
    tokenizer = trained.scorer.tokenizer

    # Over the whole vocabulary; the start is that of the config's words.
    starts = tokenizer.convert_tokens_to_ids(["it", "was", *TOPICS])
    assert [row["name"] for row in report["rows"]] == ["1", "2", *TOPICS]
    for row, entry, start in zip([*soft, *label_rows], report["rows"], starts, strict=True):
        cosines = words @ row
        best = np.argsort(-cosines, kind="stable")[:4].tolist()
        assert [word["id"] for word in entry["nearest"]] == best
        tokens = [word["token"] for word in entry["nearest"]]
        assert tokens == tokenizer.convert_ids_to_tokens(best)
        nearest = [word["cosine"] for word in entry["nearest"]]
        np.testing.assert_allclose(nearest, cosines[best], atol=1e-4)
        assert entry["start"]["token"] == tokenizer.convert_ids_to_tokens(start)
        assert entry["start"]["cosine"] == 1
        assert entry["cosine_with_start"] < 0.9999  # the words are trained as well

    # The first rows are those of the template, the label rows stand apart.
    assert len(report["instances"]) == 5 and "prompts-pca.png" not in pictures(workdir)
    for case in report["instances"]:
        ids = tokenizer.convert_tokens_to_ids(case["tokens"])
        np.testing.assert_allclose(case["cosines"], (words[ids] @ soft.T).max(1), atol=1e-5)
        order = np.argsort(-np.array(case["cosines"]), kind="stable")[:4]
        assert case["nearest"] == sorted(order.tolist())
        assert f"<mark>{case['tokens'][case['nearest'][0]]}</mark>" in page
        assert f"[{case['tokens'][case['nearest'][0]]}]" in out

    # R_D of the last layer at label_pos, by the model itself, at every saved step.
    scorer, part = trained.scorer, trained.splits["dev"]
    hidden = jax.jit(
        lambda params, batch: (
            batch.index,
            scorer.model.hidden(params, batch)[np.arange(64), batch.label_pos[:, 0]],
        )
    )
    for entry in report["separation"][1:]:
        saved = Checkpoints(workdir).restore_trainable(trained.weights.trainable, entry["step"])
        step = functools.partial(hidden, tree.merge(saved, trained.weights.frozen))
        states = predict_scores(lambda *_, s=step: s, {}, {}, eval_batches(scorer, part), 30)
        np.testing.assert_allclose(
            entry["ratio"], class_separation(states, part.labels).ratio, rtol=1e-5
        )


def test_the_most_confident_errors_are_listed(runs, inspected):
    (workdir, c), (out, report, page) = runs("head alone"), inspected("head alone")
    trained = restore_run(c, str(workdir), ["dev"])
    scorer, part, weights = trained.scorer, trained.splits["dev"], trained.weights
    step = scoring_step(trained.placement, scorer.model)
    batches = eval_batches(scorer, part)
    scores = predict_scores(step, weights.trainable, weights.frozen, batches, 30)[:, :3]
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    probs, best = (odds / odds.sum(-1, keepdims=True)).max(-1), scores.argmax(-1)
    wrong = [int(i) for i in np.argsort(-probs, kind="stable") if best[i] != part.labels[i]][:10]
    rows = read_lines(Path(c.data.source) / "dev.jsonl")
    expected = [
        {
            "origin": f"{c.data.source}/dev.jsonl:{i + 1}",
            "text": rows[i]["text"],
            "label": rows[i]["label"],
            "prediction": list(TOPICS)[best[i]],
            "score": pytest.approx(probs[i], abs=1e-5),
        }
        for i in wrong
    ]
    assert report["errors"] == expected and expected
    for error in report["errors"]:
        assert f"{error['label']} predicted as {error['prediction']} {error['score']:.2f}" in out
        assert html.escape(error["text"]) in page


@pytest.mark.long
def test_without_wishes_a_few_steps_and_examples_are_drawn(runs, tmp_path):
    """Of another split; what an earlier look drew is gone."""
    workdir = shutil.copytree(runs("head alone")[0], tmp_path / "run")
    (workdir / "inspect").mkdir(exist_ok=True)
    (workdir / "inspect/pca-99.png").touch()
    _, report, page = look(workdir, "--examples=9", "--split=test")
    assert any("9 of the 24 inputs of test" in line for line in report["remarks"])
    assert "sampled at random" in page and np.array(report["confusion"]["counts"]).sum() == 24
    assert [name for name in pictures(workdir) if "-" in name] == [
        f"{kind}-{step}.png" for kind in ("pca", "tsne") for step in (0, 2, 4)
    ]


# -- bad input ------------------------------------------------------------------------------------


def test_what_is_asked_for_must_be_there(runs, refused, tmp_path, capsys):
    workdir, _ = runs("dart")
    line = lambda *words: refused("inspect", f"--workdir={workdir}", *words)
    assert "--top=0 must be at least 1" in line("--top=0")
    assert "--examples=3 must be at least 4" in line("--examples=3")
    assert "--steps: '2,x'" in line("--steps=2,x")
    assert "--split: invalid choice: 'all'" in line("--split=all")
    assert "--steps=3: " in (text := line("--steps=0,3")) and "only of steps 0, 2, 4" in text
    assert not (workdir / "inspect" / "pca-3.png").exists()
    none = refused("inspect", f"--workdir={tmp_path / 'none'}")
    assert "config.json does not exist; give the --workdir of a run" in none
    copy = shutil.copytree(workdir, tmp_path / "copy")
    shutil.rmtree(copy / "inspect", ignore_errors=True)
    (copy / "inspect" / "old.png").mkdir(parents=True)
    code, _, err = jaxprompt(capsys, "inspect", f"--workdir={copy}")
    assert code == 2 and f"cannot write {copy / 'inspect'}" in err.splitlines()[-1]
    (copy / "result.json").unlink()
    shutil.rmtree(copy / "checkpoints")
    assert "no checkpoint in " in refused("inspect", f"--workdir={copy}")


# -- runs of other forms --------------------------------------------------------------------------


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
    assert counts[9, 9] == counts.sum() == 3 and "3 of 3 answers are right" in page


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
    out, _ = succeed(capsys, "inspect", f"--exports={tmp_path}")
    assert out == " 1.0000  a  b\n"
    report = json.loads((tmp_path / "similarity.json").read_text())
    assert report["exports"] == ["a", "b"] and report["cosines"][0] == pytest.approx([1, 1])
    assert (tmp_path / "similarity.png").read_bytes()[:4] == b"\x89PNG"
