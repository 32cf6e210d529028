"""Runs on a backbone that is kept as codes, from training to serving, and what it refuses."""

import json

import numpy as np
import pytest
from tiny_run import (
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    split_scores,
    succeed,
    train_and_export,
)

import jaxprompt as jp
from jaxprompt.errors import InputError
from jaxprompt.runs.train import train_prompt

SIZES = dict(hidden_size=64, intermediate_size=64)
LEARNS = {"train__total_steps": 60, "train__eval_steps": 20, "optim__lr": 0.1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A BERT folder whose matrices consist of whole blocks."""
    return make_backbone(tmp_path_factory.mktemp("whole") / "bert", **SIZES)


@pytest.fixture(scope="module")
def served(whole, data, tmp_path_factory):
    """-> config, folder and result of a run on 4 bits"""
    folder = tmp_path_factory.mktemp("served")
    config = make_config(whole, data, "prefix", backbone__quantize="int4", **LEARNS)
    return config, folder / "run", train_prompt(config, str(folder / "run")).to_json()


@pytest.mark.long
def test_it_learns_exports_and_predicts(whole, data, tmp_path, capsys, refused):
    config = make_config(whole, data, "prefix", backbone__quantize="int8", **LEARNS)
    result, workdir, output = train_and_export(capsys, tmp_path, config)
    assert result["test"]["accuracy"] >= 0.8 and ", weights int8-" in output
    plain = make_config(whole, data, "prefix", train__total_steps=1)
    plain = train_prompt(plain, str(tmp_path / "plain")).to_json()
    assert result["total"] == plain["total"] and result["trained"] == plain["trained"]
    card = json.loads((workdir / "export/prompt.json").read_text())
    assert card["backbone"]["quantize"] == "int8"
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
    succeed(capsys, "predict", *words)
    lines = read_lines(out)
    right = np.mean([line["prediction"] == line["label"] for line in lines])
    assert right == pytest.approx(result["test"]["accuracy"])
    again = ["train", f"--config={tmp_path / 'config.json'}", f"--workdir={workdir}"]
    assert "backbone.quantize" in refused(*again, "--config.backbone.quantize=int4", started=True)


@pytest.mark.long
def test_a_prompt_is_served_on_the_codes_that_it_learned_on(served, whole, data, tmp_path, capsys):
    run_config, workdir, _ = served
    config = tmp_path / "c.json"
    config.write_text(run_config.to_json())
    assert jaxprompt(capsys, "export", f"--config={config}", f"--workdir={workdir}")[0] == 0
    prompt = jp.load_prompt(workdir / "export")
    rows = read_lines(data / "test.jsonl")
    quantized = jp.attach(jp.load_backbone(whole, quantize="int4"), prompt)
    actual = [row["scores"] for row in jp.predict(quantized, rows)]
    expected = split_scores(run_config, workdir, "test")
    scores = np.array([list(row.values()) for row in actual])
    probs = np.exp(expected - expected.max(1, keepdims=True))
    np.testing.assert_allclose(scores, probs / probs.sum(1, keepdims=True), atol=1e-5)
    for other in ("none", "int8"):
        message = f"quantize='int4', but the backbone is loaded with quantize='{other}'; use"
        with pytest.raises(InputError, match=message):
            jp.attach(jp.load_backbone(whole, quantize=other), prompt)


def test_codes_do_not_train(whole, data, refused_config):
    message = "backbone.quantize=int8 quantises backbone/embed/word/table, which"
    config = make_config(whole, data, "full", backbone__quantize="int8")
    assert message in refused_config(config, "train")


def test_adapt_takes_floats(whole, tmp_path, refused):
    (tmp_path / "a.txt").write_text("the old cat was near it. " * 200)
    line = refused(
        "adapt", "--config=configs/adapt/mlm.py", f"--workdir={tmp_path / 'run'}",
        f"--config.backbone.path={whole}", f"--config.corpus.path={tmp_path / 'a.txt'}",
        "--config.backbone.quantize=int8", "--config.data.max_len=32",
    )  # fmt: skip
    assert "adapt trains all weights" in line and "backbone.quantize=none" in line
