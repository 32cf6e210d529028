"""DPT from a config to its predictions, with every method that ships."""

import json

import numpy as np
import pytest
import transformers
from tiny_run import jaxprompt, make_backbone, make_config, read_lines, train_and_export, with_part

from configs.parts.heads import discriminator
from jaxprompt.config.load import with_overrides
from jaxprompt.registry import METHODS

torch = pytest.importorskip("torch")

HEAD = {"head.name": "discriminator"}
# Of each method that learns: the function of configs/parts/methods.py, and its fields.
RUNS = {
    "all_weights": ("dpt_words", {}, 2e-3),
    "prefix": ("prefix", HEAD, 1e-1),
    "soft": ("soft", HEAD | {"task.template": "{text} [soft] [classes]."}, 3e-2),
    "p_tuning": ("p_tuning", HEAD | {"train.total_steps": 300,
                                     "task.template": "{text} [soft] [classes]."}, 1e-2),
    "compose": ("compose", HEAD | {"prompt.parts": "soft(length=2)+prefix(length=2)",
                                   "task.template": "{text} [soft*2] [classes]."}, 5e-2),
    "ipt": ("ipt", HEAD | {"prompt.scale": 0.1,
                           "task.template": "{text} [soft*4] [classes]."}, 5e-2),
    "dpt": ("dpt", {"prompt.length": 2, "head.bias": True}, 1e-3),
    "dart": ("dart", HEAD | {"prompt.length": 2, "prompt.fluency": 0.0,
                             "task.template": "{text} [soft*2] [classes].",
                             "head.copies": True}, 1e-3),
}  # fmt: skip
SLOW = ("prefix", "soft", "p_tuning", "compose", "ipt")  # to learn, on a frozen backbone


@pytest.fixture(scope="module")
def electra(tmp_path_factory):
    return make_backbone(tmp_path_factory.mktemp("electra") / "disc", "discriminator")


def prepare(folder, data, kind, **fields):
    """Fills a config; a head takes the place of the one that a method brings."""
    method, changes, lr = RUNS[kind]
    changes = {
        "optim.lr": lr, "task.labels": "beast,food,tool", "train.eval_steps": 20,
        "train.total_steps": 120 if kind in SLOW else 40, "prompt.length": 4,
        "data.multiple": 32, "data.max_len": 32, "backbone.dropout": 0.0,
    } | changes | fields  # fmt: skip
    c = make_config(folder, data, method)
    if changes.pop("head.name", None):
        c = with_part(c, discriminator)
    if "length" not in c.prompt.fields:
        del changes["prompt.length"]
    return with_overrides(c, list(changes.items()))


def test_every_method_is_run():
    assert set(METHODS.names()) - {"none", "constant"} == set(RUNS) - {"all_weights"}


@pytest.mark.default_cases("all_weights")
@pytest.mark.parametrize("kind", RUNS)
def test_learns_exports_and_predicts(kind, electra, data, tmp_path, capsys):
    fields = {"head.order": "random", "head.order_seed": 0} if kind == "all_weights" else {}
    c = prepare(electra, data, kind, **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    measured = json.loads(jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")[1])
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
    code, _, err = jaxprompt(capsys, "predict", *words)
    assert code == 0, err
    lines = read_lines(out)
    right = np.mean([line["prediction"] == line["label"] for line in lines])
    assert right == pytest.approx(measured["accuracy"]) == pytest.approx(result["test"]["accuracy"])
    assert right >= (0.8 if kind == "prefix" or kind not in SLOW else 0.5)
    for line in lines:
        assert line["score"] == max(line["scores"].values()) < 1
    if kind in ("dpt", "p_tuning"):
        code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}")
        assert code == 0 and (workdir / "inspect" / "inspect.html").exists(), err
    if fields:
        card = json.loads((workdir / "export" / "prompt.json").read_text())
        assert card["head"]["listed"] == ["tool", "food", "beast"]
    trained = {"all_weights", "dpt", "dart"}
    assert (result["trained"] == result["total"]) == (kind in trained)


@pytest.mark.long
@pytest.mark.parametrize(
    "fields, message",
    [
        ({"head.group": 2}, "listed: beast, food | tool; forward passes per example: 2"),
        (
            {"head.hierarchy": "living,thing,thing"},
            "listed: living, thing | food, tool; forward passes per example: 2",
        ),
    ],
)
def test_several_lists_train_and_predict(fields, message, electra, data, tmp_path, capsys):
    c = prepare(electra, data, "all_weights", **fields)
    result, workdir, err = train_and_export(capsys, tmp_path, c)
    assert message in err
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
    assert jaxprompt(capsys, "predict", *words)[0] == 0
    right = np.mean([line["prediction"] == line["label"] for line in read_lines(out)])
    assert right == pytest.approx(result["test"]["accuracy"]) and right > 0.6
    code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}")
    assert code == 0, err
    found = json.loads((workdir / "inspect" / "inspect.json").read_text())
    counts = np.array(found["confusion"]["counts"])
    assert counts.sum() == 30
    assert counts.trace() / 30 == pytest.approx(result["dev"]["accuracy"])
    assert "in several inputs" in found["notes"]["states"]
    if "head.hierarchy" in fields:  # whose inputs in train are those on the way to the right class
        code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}", "--split=train")
        assert code == 0, err
        found = json.loads((workdir / "inspect" / "inspect.json").read_text())
        assert found["notes"]["confusion"].startswith("There is no confusion matrix: ")
    program = [f"--workdir={workdir}", f"--stablehlo={tmp_path / 'program'}"]
    code, _, err = jaxprompt(capsys, "export", *program)
    assert code == 2 and "makes 2; list all classes in one input" in err


def test_the_head_alone_answers_without_training(electra, data, tmp_path, capsys):
    c = prepare(electra, data, "all_weights", trainable="")
    (tmp_path / "zero.json").write_text(c.to_json())
    config, out = f"--config={tmp_path / 'zero.json'}", tmp_path / "out.jsonl"
    code, found, err = jaxprompt(capsys, "evaluate", config, "--split=test", f"--output={out}")
    assert code == 0, err
    lines = read_lines(out)
    right = np.mean([line["prediction"] == line["label"] for line in lines])
    assert json.loads(found)["accuracy"] == pytest.approx(right)
    tokenizer = transformers.AutoTokenizer.from_pretrained(electra)
    model = transformers.ElectraForPreTraining.from_pretrained(electra).eval()
    for line in lines[:4]:
        ids = tokenizer(f"{line['text']} class: beast, food, tool.", return_tensors="pt")
        with torch.no_grad():
            scores = 1 - model(**ids).logits[0].sigmoid()
        at = [
            ids.input_ids[0].tolist().index(tokenizer.convert_tokens_to_ids(word), 1 + len(
                tokenizer(line["text"], add_special_tokens=False).input_ids))
            for word in ("beast", "food", "tool")
        ]  # fmt: skip
        np.testing.assert_allclose(list(line["scores"].values()), scores[at], atol=1e-5)


@pytest.mark.long
def test_a_plan_is_made(electra, data, tmp_path, capsys):
    config = tmp_path / "plan.json"
    config.write_text(prepare(electra, data, "all_weights").to_json())
    code, out, err = jaxprompt(
        capsys, "plan", f"--config={config}", "--devices=1x v5e", "--limit=1"
    )
    assert code == 0, err
    assert "21,553" in out + err


@pytest.mark.parametrize(
    "kind, message",
    [
        ("dart", "prompt.name=dart trains 3 vectors for the classes"),
        ("dpt", "head.name=discriminator does not use them"),
    ],
)
def test_rows_that_nothing_reads_are_refused(kind, message, electra, data, refused, tmp_path):
    config = tmp_path / "c.json"
    config.write_text(prepare(electra, data, kind, **{"head.copies": False}).to_json())
    assert message in refused("validate", f"--config={config}", started=True)
