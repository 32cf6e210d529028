"""DART from a config to its predictions, on every kind of backbone."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import jaxprompt, make_backbone, make_config, read_lines, train_and_export

from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer
from jaxprompt.runs.train import train_prompt
from jaxprompt.tree import flatten

TEMPLATES = {
    "bert": ("{text} [soft*2] [mask] [soft*1]", "it was ."),
    "roberta": ("{text} [soft*2] [mask][soft*1]", "it was."),
    "electra": ("{text} [soft*2] [mask] [soft*1]", "it was ."),  # the generator
    "t5": ("{text} [soft*2] [mask] .", "it was"),
    "gpt2": ("{text} [soft*2] [mask]", "it was"),
}
MASKED = ("bert", "roberta", "electra", "albert", "modernbert")
OTHERS = {"llama": "gpt2", "albert": "roberta", "modernbert": "bert"}  # whose template each takes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a backbone of a family, once."""
    root, made = tmp_path_factory.mktemp("backbones"), {}

    def get(family):
        if family not in made:
            made[family] = make_backbone(root / family, family)
        return made[family]

    return get


def prepare(folder, data, family, **fields):
    """Fills a config with DART on a backbone."""
    template, text = TEMPLATES[OTHERS.get(family, family)]
    own = {
        "task.template": template, "prompt.length": 3 if family in MASKED else 2,
        "prompt.text": text, "prompt.fluency": 0.5 if family in MASKED else 0.0,
        "optim.lr": 1e-3 if family in MASKED else 5e-3, "task.labels": "beast,food,tool",
        "train.total_steps": 18,
        "train.eval_steps": 6, "data.multiple": 32, "data.max_len": 32,
    }  # fmt: skip
    return make_config(folder, data, "dart", **own | fields)


@pytest.mark.default_cases("bert")
@pytest.mark.parametrize("family", TEMPLATES)
def test_learns_exports_and_predicts(family, folders, data, tmp_path, capsys):
    result, workdir, _ = train_and_export(capsys, tmp_path, prepare(folders(family), data, family))
    assert result["trained"] == result["total"]  # the whole backbone, and the rows
    measured = json.loads(jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[1])
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    lines = read_lines(out)
    right = np.mean([line["prediction"] == line["label"] for line in lines])
    assert right == pytest.approx(measured["accuracy"]) == pytest.approx(result["test"]["accuracy"])
    assert right > 0.6


@pytest.mark.long
@pytest.mark.parametrize("family", OTHERS)
def test_learns_on_other_families(family, folders, data, tmp_path):
    result = train_prompt(prepare(folders(family), data, family), str(tmp_path / "run")).to_json()
    assert result["trained"] == result["total"] and result["test"]["accuracy"] > 0.6


@pytest.mark.long
def test_a_config_that_names_no_model_type(data, tmp_path, capsys):
    """As SciBERT's, whose vocabulary is all of its tokenizer."""
    folder = make_backbone(tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    c = prepare(folder, data, "bert")
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    out = tmp_path / "out.jsonl"
    words = [f"--prompt={workdir / 'export'}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    right = np.mean([line["prediction"] == line["label"] for line in read_lines(out)])
    assert right == pytest.approx(result["test"]["accuracy"])
    code, _, err = jaxprompt(
        capsys, "convert", f"--backbone={folder}", f"--output={tmp_path / 'whole'}"
    )
    assert code == 0 and read_config(tmp_path / "whole")["model_type"] == "bert", err


@pytest.mark.long
@pytest.mark.parametrize("family, trainable", [("bert", ""), ("t5", "prompt/.*")])
def test_a_mesh_changes_nothing(family, trainable, folders, data, tmp_path):
    """The learned rows are whole on each device, the vocabulary's tables are sharded."""
    found = []
    for number, mesh in enumerate([{}, {"mesh.data": 4, "mesh.model": 2}]):
        fields = {"train.total_steps": 4, "train.eval_steps": 2, "train.log_steps": 1} | mesh
        fields |= {"trainable": trainable} if trainable else {}
        train_prompt(prepare(folders(family), data, family, **fields), str(tmp_path / str(number)))
        lines = read_lines(tmp_path / str(number) / "metrics.jsonl")
        found.append([line["loss"] for line in lines if "loss" in line])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    assert len(found[0]) == 4


@pytest.mark.long
def test_full_scores_evaluate_as_they_predict(folders, data, tmp_path, capsys):
    """After a step words of the vocabulary are likelier than any row; none of them is an answer."""
    short = {"head.scores": "full", "train.total_steps": 1, "train.eval_steps": 1}
    c = prepare(folders("bert"), data, "bert", **short)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    measured = json.loads(jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[1])
    code, out, err = jaxprompt(
        capsys, "predict", f"--workdir={workdir}", f"--input={data / 'test.jsonl'}"
    )
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    right = np.mean([line["prediction"] == line["label"] for line in lines])
    assert right == pytest.approx(measured["accuracy"]) == pytest.approx(result["test"]["accuracy"])
    assert right > 0


@pytest.mark.long
def test_a_frozen_backbone_leaves_kilobytes(folders, data, tmp_path, capsys):
    c = prepare(folders("bert"), data, "bert", trainable="prompt/.*,head/.*", optim__lr=0.05)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    width = 32
    assert result["trained"] == (3 + 3) * width + 3
    size = (workdir / "export" / "prompt.safetensors").stat().st_size
    assert size < 4 * result["trained"] + 600


@pytest.mark.long
def test_a_tuned_backbone_ships_beside_the_rows(folders, data, tmp_path, capsys):
    """As weights, as differences, and as a folder; at a learning rate of 0 it stays."""
    c = prepare(folders("bert"), data, "bert", optim__lr_backbone=2e-3)
    _, workdir, _ = train_and_export(capsys, tmp_path, c)
    ways = {
        workdir / "export": [], tmp_path / "d": ["--delta"],
        tmp_path / "t": [f"--tuned={tmp_path / 'model'}"],
    }  # fmt: skip
    scores, sizes = [], []
    for place, words in ways.items():
        again = [f"--workdir={workdir}", f"--output={place}", *words]
        code, _, err = jaxprompt(capsys, "export", *again)
        assert code == 0, err
        sizes.append((place / "prompt.safetensors").stat().st_size)
        out = tmp_path / "out.jsonl"
        words = [f"--prompt={place}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
        code, _, err = jaxprompt(capsys, "predict", *words)
        assert code == 0, err
        scores.append([list(line["scores"].values()) for line in read_lines(out)])
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-4)
    np.testing.assert_allclose(scores[0], scores[2], atol=1e-6)
    assert sizes[2] < 2000 < sizes[1] < 0.7 * sizes[0]
    (tmp_path / "still").mkdir()
    c = prepare(folders("bert"), data, "bert", optim__lr_backbone=0.0)
    _, still, _ = train_and_export(capsys, tmp_path / "still", c)
    held, moved = (read_export(str(run / "export"))[0] for run in (still, workdir))
    name = "backbone/layers/mlp/up/kernel"
    loaded = load_backbone(folders("bert"), "bert", read_config(folders("bert"))).params
    np.testing.assert_array_equal(held[name], flatten(loaded)[name.partition("/")[2]])
    assert np.abs(moved[name] - held[name]).max() > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("fixed, kept", [("prompt/rows", "slots"), ("prompt/table", "rows")])
def test_what_is_fixed_of_a_prompt_is_there_after_training(
    fixed, kept, folders, data, tmp_path, capsys
):
    """No checkpoint holds it: it is made again from the words that it started from."""
    trains = f"{fixed},head/.*"
    c = prepare(folders("bert"), data, "bert", trainable=trains, optim__lr=0.05)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    measured = json.loads(jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[1])
    assert measured["accuracy"] == pytest.approx(result["test"]["accuracy"])
    tensors, _ = read_export(str(workdir / "export"))
    table = load_file(folders("bert") / "model.safetensors")
    words = load_tokenizer(folders("bert"))
    texts = ["it was ."] if kept == "slots" else ["beast food tool"]
    ids = encode_texts(words, texts)[0]
    expected = table["bert.embeddings.word_embeddings.weight"][ids]
    np.testing.assert_array_equal(tensors[f"prompt/{kept}"], expected)


@pytest.mark.long
def test_in_two_stages(folders, data, tmp_path, capsys):
    """The rows alone first, then everything from them: a run that starts from an export."""
    rows = dict(trainable="prompt/.*,head/.*", optim__lr=0.05, train__total_steps=6)
    first = prepare(folders("bert"), data, "bert", **rows)
    _, workdir, _ = train_and_export(capsys, tmp_path, first)
    export = workdir / "export"
    second = prepare(
        folders("bert"), data, "bert", prompt__init=str(export), optim__lr=0.0,
        train__total_steps=1, train__eval_steps=1,
    )  # fmt: skip
    (tmp_path / "second").mkdir()
    _, workdir, _ = train_and_export(capsys, tmp_path / "second", second)
    (before, _), (after, _) = read_export(str(export)), read_export(str(workdir / "export"))
    for name in ("prompt/slots", "prompt/rows"):
        np.testing.assert_array_equal(after[name], before[name])
    assert any(name.startswith("backbone/") for name in after)
    other = prepare(
        folders("bert"), data, "bert", prompt__init=str(export),
        task__labels="beast,food,tool,other", task__words="beast,food,tool,old",
    )  # fmt: skip
    config = tmp_path / "other.json"
    config.write_text(other.to_json())
    code, _, err = jaxprompt(capsys, "train", f"--config={config}", f"--workdir={tmp_path / 'o'}")
    assert code == 2 and "is [3, 32], but this run needs [4, 32]; use an export of a run" in err, (
        err
    )
    # Rows are by their places, so that these would be of other classes.
    other = prepare(
        folders("bert"), data, "bert", prompt__init=str(export), task__labels="tool,food,beast",
        task__words="tool,food,beast",
    )  # fmt: skip
    config.write_text(other.to_json())
    code, _, err = jaxprompt(capsys, "train", f"--config={config}", f"--workdir={tmp_path / 'p'}")
    assert code == 2 and "for the classes beast, food, tool, and this run has 'tool' in pla" in err


def test_what_does_not_fit_is_named(folders, data, refused, tmp_path):
    def line(family, **fields):
        config = tmp_path / "wrong.json"
        config.write_text(prepare(folders(family), data, family, **fields).to_json())
        return refused("train", f"--config={config}", f"--workdir={tmp_path / 'w'}", started=True)

    assert "needs a masked language model" in line("gpt2", prompt__fluency=1.0)
    assert "set prompt.length=3" in line("t5", prompt__text="it was very")
    assert "prompt.labels=True" in line("bert", prompt__labels=False, prompt__fluency=0.0)
    assert "reads one position" in line("t5", task__form="text")
    without = line("bert", task__template="{text} [soft*3]")
    assert "has no [mask], which the head reads; add one" in without
