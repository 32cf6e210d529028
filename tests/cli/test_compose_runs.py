"""Compositions from a config to predictions: a frozen part beside one that trains, label rows."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import accuracy, jaxprompt, make_config, serve, train_and_export

from jaxprompt.build.prompt_artifact import read_export


def composed(backbone, data, parts, **fields):
    """Fills a config with a composition; `head.name` and the template may be among the fields."""
    return make_config(backbone, data, "compose", arguments={"parts": parts}, **fields)


SHORT = {"train.total_steps": 40, "train.eval_steps": 20, "optim.lr": 0.05}


@pytest.mark.long
def test_a_shared_prefix_stays_and_soft_tokens_learn(backbone, data, tmp_path, capsys):
    """The prefix is that of an export, to the last bit; the export of both is plain constants."""
    shared = make_config(backbone, data, "prefix", **{"prompt.length": 3, "optim.lr": 0.1} | SHORT)
    (tmp_path / "shared").mkdir()
    _, first, _ = train_and_export(capsys, tmp_path / "shared", shared)
    parts = f"prefix(length=3,init='{first / 'export'}')+soft(length=2,start=labels)"
    c = composed(backbone, data, parts, trainable="prompt/soft/.*,head/.*", **SHORT)
    result, workdir, rows, err = serve(capsys, tmp_path, c, data / "test.jsonl")
    assert f"prompt initialised from {first / 'export'}" in err
    assert result["trained"] == 2 * 32 + 32 * 3 + 3
    held, before = (load_file(run / "export/prompt.safetensors") for run in (workdir, first))
    for name in ("prompt/k", "prompt/v"):
        np.testing.assert_array_equal(held[name], before[name])
    assert held["prompt/slots"].shape == (2, 32)
    _, metadata = read_export(str(workdir / "export"))
    assert metadata.prompt.name == "constant" and metadata.method == "compose"
    assert metadata.init.path == str(first / "export")
    assert accuracy(rows) == pytest.approx(result["test"]["accuracy"]) and accuracy(rows) > 0.6
    code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}")
    assert code == 0, err
    rows = json.loads((workdir / "inspect" / "inspect.json").read_text())["rows"]
    assert [row["start"]["token"] for row in rows] == ["beast", "food"]


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
