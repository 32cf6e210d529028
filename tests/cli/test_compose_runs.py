"""Compositions from a config to predictions: a frozen part beside one that trains, label rows."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import jaxprompt, make_backbone, make_config, read_lines, train_and_export

from jaxprompt.build.prompt_artifact import read_export


def composed(backbone, data, parts, **fields):
    """Fills a config with a composition; `head.name` and the template may be among the fields."""
    return make_config(backbone, data, "compose", arguments={"parts": parts}, **fields)


def predicts(workdir, data, tmp_path, capsys):
    """Tells which share of the test rows an export answers right, as `evaluate` does."""
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    right = np.mean([line["prediction"] == line["label"] for line in read_lines(out)])
    measured = json.loads(jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[1])
    assert right == pytest.approx(measured["accuracy"])
    return right


SHORT = {"train.total_steps": 40, "train.eval_steps": 20, "optim.lr": 0.05}


@pytest.mark.long
def test_a_shared_prefix_stays_and_soft_tokens_learn(backbone, data, tmp_path, capsys):
    """The prefix is that of an export, to the last bit; the export of both is plain constants."""
    shared = make_config(backbone, data, "prefix", **{"prompt.length": 3, "optim.lr": 0.1} | SHORT)
    (tmp_path / "shared").mkdir()
    _, first, _ = train_and_export(capsys, tmp_path / "shared", shared)
    parts = f"prefix(length=3,init='{first / 'export'}')+soft(length=2,start=labels)"
    c = composed(backbone, data, parts, trainable="prompt/soft/.*,head/.*", **SHORT)
    result, workdir, err = train_and_export(capsys, tmp_path, c)
    assert f"prompt initialised from {first / 'export'}" in err
    assert result["trained"] == 2 * 32 + 32 * 3 + 3
    held, before = (load_file(run / "export/prompt.safetensors") for run in (workdir, first))
    for name in ("prompt/k", "prompt/v"):
        np.testing.assert_array_equal(held[name], before[name])
    assert held["prompt/slots"].shape == (2, 32)
    _, metadata = read_export(str(workdir / "export"))
    assert metadata.prompt.name == "constant" and metadata.method == "compose"
    assert metadata.init.path == str(first / "export")
    assert predicts(workdir, data, tmp_path, capsys) > 0.6
    code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}")
    assert code == 0, err
    rows = json.loads((workdir / "inspect" / "inspect.json").read_text())["rows"]
    assert [row["start"]["token"] for row in rows] == ["beast", "food"]


@pytest.mark.long
def test_soft_tokens_stand_before_those_of_dart(backbone, data, tmp_path, capsys):
    fields = {
        "head.name": "label_rows", "task.labels": "beast,food,tool", "data.max_len": 32,
        "task.template": "[soft*2] {text} [soft*2] [mask] .", "data.multiple": 8, "optim.lr": 1e-3,
        "trainable": "prompt/.*,head/.*,backbone/.*", "train.total_steps": 18,
        "train.eval_steps": 6,
    }  # fmt: skip
    parts = "soft(length=2,start=vocab)+dart(length=2,text='it was',fluency=0.5)"
    c = composed(backbone, data, parts, **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert result["trained"] == result["total"]
    held = load_file(workdir / "export/prompt.safetensors")
    assert held["prompt/slots"].shape == (4, 32) and held["prompt/rows"].shape == (3, 32)
    assert predicts(workdir, data, tmp_path, capsys) > 0.6


@pytest.mark.long
def test_parts_of_a_t5(data, tmp_path, capsys):
    """In the input, in what the decoder is fed, and in its attention over the encoder."""
    folder = make_backbone(tmp_path / "t5", "t5")
    parts = "soft(length=2,decoder=1)+prefix(length=2,cross=2,decoder=1)"
    fields = {"head.name": "verbalizer", "task.template": "{text} about [mask] ."}
    c = composed(folder, data, parts, **fields)
    _, workdir, _ = train_and_export(capsys, tmp_path, c)
    names = {n for n in load_file(workdir / "export/prompt.safetensors") if "prompt/" in n}
    assert {"prompt/slots", "prompt/decoder_slots", "prompt/k", "prompt/cross_k"} <= names
    predicts(workdir, data, tmp_path, capsys)


@pytest.mark.parametrize(
    "parts, fields, message",
    [
        ("soft(length=2)+prefix(init='/no/where')", {}, "cannot read /no/where/prompt.json"),
        ("soft(start=file,file='/no/where.npy')+prefix", {}, "/no/where.npy"),
        ("soft(start=frequent)+prefix", {}, "corpus.path is empty"),
        ("soft(text='a cat')+prefix", {}, "'a cat' is only used with prompt.start=text"),
        ("soft(length=2)+ipt(length=2)", {"task.template": "[soft*2] {text}"}, "places 2 soft tok"),
    ],
)
def test_what_does_not_fit_is_named(parts, fields, message, backbone, data, tmp_path, refused):
    config = tmp_path / "c.json"
    config.write_text(composed(backbone, data, parts, **fields).to_json())
    words = [f"--config={config}", f"--workdir={tmp_path / 'w'}"]
    assert message in refused("train", *words, started=True)


@pytest.mark.long
def test_several_exports_start_a_prompt(trained, backbone, data, tmp_path, capsys):
    """Their mean; the run records them all, and no longer needs them once it is trained."""
    copy = shutil.copytree(trained / "export", tmp_path / "copy")
    init = f"{trained / 'export'},{copy}"
    c = make_config(backbone, data, prompt__length=6, prompt__init=init, trainable="head/.*")
    _, workdir, err = train_and_export(capsys, tmp_path, c)
    assert f"prompt initialised from {copy}, its 4 tokens repeated to 6" in err
    before, held = (load_file(x / "export/prompt.safetensors") for x in (trained, workdir))
    for name in ("prompt/k", "prompt/v"):
        np.testing.assert_array_equal(held[name], before[name][:, [0, 1, 2, 3, 0, 1]])
    origin = read_export(str(workdir / "export"))[1].init
    assert [origin.path, *(other.path for other in origin.more)] == init.split(",")
