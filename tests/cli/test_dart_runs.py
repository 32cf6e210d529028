"""DART from a config to its predictions, on every kind of backbone."""

import functools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import jaxprompt, make_backbone, make_config, read_lines, train_and_export

from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer
from jaxprompt.runs.train import train_prompt

TEMPLATES = {
    "bert": ("{text} [soft*2] [mask] [soft*1]", "it was ."),
    "roberta": ("{text} [soft*2] [mask][soft*1]", "it was."),
    "electra": ("{text} [soft*2] [mask] [soft*1]", "it was ."),  # the generator
    "t5": ("{text} [soft*2] [mask] .", "it was"),
    "gpt2": ("{text} [soft*2] [mask]", "it was"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a backbone of a family, once."""
    root = tmp_path_factory.mktemp("backbones")
    return functools.cache(lambda family: make_backbone(root / family, family))


def prepare(folder, data, family, **fields):
    """Fills a config with DART on a backbone."""
    template, text = TEMPLATES[family]
    is_masked = family not in ("t5", "gpt2")
    dart = {
        "task.template": template, "prompt.length": 3 if is_masked else 2, "prompt.text": text,
        "prompt.fluency": 0.5 if is_masked else 0.0, "optim.lr": 1e-3 if is_masked else 5e-3,
        "task.labels": "beast,food,tool", "train.total_steps": 18, "train.eval_steps": 6,
        "data.multiple": 32, "data.max_len": 32,
    }  # fmt: skip
    return make_config(folder, data, "dart", **dart | fields)


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
def test_a_mesh_changes_nothing(folders, data, tmp_path):
    """The learned rows are whole on each device, the vocabulary's tables are sharded."""
    losses = []
    for number, mesh in enumerate([{}, {"mesh.data": 4, "mesh.model": 2}]):
        fields = {"train.total_steps": 4, "train.eval_steps": 2, "train.log_steps": 1} | mesh
        train_prompt(prepare(folders("bert"), data, "bert", **fields), str(tmp_path / str(number)))
        lines = read_lines(tmp_path / str(number) / "metrics.jsonl")
        losses.append([line["loss"] for line in lines if "loss" in line])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert len(losses[0]) == 4


@pytest.mark.long
@pytest.mark.parametrize("fixed, kept", [("prompt/rows", "slots"), ("prompt/table", "rows")])
def test_what_is_fixed_of_a_prompt_is_there_after_training(
    fixed, kept, folders, data, tmp_path, capsys
):
    """No checkpoint holds it: it is made again from the words that it started from."""
    c = prepare(folders("bert"), data, "bert", trainable=f"{fixed},head/.*", optim__lr=0.05)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    measured = json.loads(jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[1])
    assert measured["accuracy"] == pytest.approx(result["test"]["accuracy"])
    tensors, _ = read_export(str(workdir / "export"))
    text = "it was ." if kept == "slots" else "beast food tool"
    ids = encode_texts(load_tokenizer(folders("bert")), [text])[0]
    weights = load_file(folders("bert") / "model.safetensors")
    expected = weights["bert.embeddings.word_embeddings.weight"][ids]
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


@pytest.mark.parametrize(
    "family, fields, message",
    [
        ("bert", {"prompt.labels": False, "prompt.fluency": 0.0}, "prompt.labels=True"),
        ("t5", {"task.form": "text"}, "reads one position"),
    ],
)
def test_what_does_not_fit_is_named(family, fields, message, folders, data, refused, tmp_path):
    config = tmp_path / "wrong.json"
    config.write_text(prepare(folders(family), data, family, **fields).to_json())
    words = [f"--config={config}", f"--workdir={tmp_path / 'w'}"]
    assert message in refused("train", *words, started=True)
