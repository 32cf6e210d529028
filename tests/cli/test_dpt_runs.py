"""DPT from a config to its predictions, with every method that ships."""

import json

import numpy as np
import pytest
import transformers
from tiny_run import jaxprompt, make_backbone, make_config, read_lines, train_and_export, with_part

from jaxprompt.config.load import with_overrides
from jaxprompt.registry import METHODS
from jaxprompt.runs.train import run

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
    """Fills a config."""
    method, given, lr = RUNS[kind]
    own = {
        "optim.lr": lr, "task.labels": "beast,food,tool", "train.eval_steps": 20,
        "train.total_steps": 120 if kind in SLOW else 40,
        "data.multiple": 32, "data.max_len": 32, "backbone.dropout": 0.0,
    }  # fmt: skip
    own |= {} if "prompt.length" in given else {"prompt.length": 4}
    own |= given | fields
    head = {name: own.pop(name) for name in list(own) if name.startswith("head.")}
    name = head.pop("head.name", None)
    if name:  # after the method, which may bring a head of its own
        c = make_config(folder, data, method, **{"prompt.length": own["prompt.length"]})
        from configs.parts.heads import discriminator

        c = with_part(c, discriminator)
    else:
        c = make_config(folder, data, method)
    own = {n: x for n, x in own.items() if n != "prompt.length" or "length" in c.prompt.fields}
    return with_overrides(c, list((own | head).items()))


def test_every_method_is_run():
    assert set(METHODS.names()) - {"none", "constant"} == set(RUNS) - {"all_weights"}


@pytest.mark.default_cases("all_weights")
@pytest.mark.parametrize("kind", RUNS)
def test_learns_exports_and_predicts(kind, electra, data, tmp_path, capsys):
    fields = {"head__order": "random", "head__order_seed": 0} if kind == "all_weights" else {}
    fields = {name.replace("__", "."): value for name, value in fields.items()}
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
    card = json.loads((workdir / "export" / "prompt.json").read_text())
    if kind in ("dpt", "p_tuning"):
        code, _, err = jaxprompt(capsys, "inspect", f"--workdir={workdir}")
        assert code == 0 and (workdir / "inspect" / "inspect.html").exists(), err
    if fields:
        assert card["head"]["listed"] == ["tool", "food", "beast"]
    trained = {"all_weights", "dpt", "dart"}
    assert (result["trained"] == result["total"]) == (kind in trained)


@pytest.mark.long
def test_a_mesh_changes_nothing(electra, data, tmp_path):
    """The copies of the words are whole on each device, the vocabulary's tables are sharded."""
    found = []
    for number, mesh in enumerate([{}, {"mesh.data": 4, "mesh.model": 2}]):
        fields = {"train.total_steps": 4, "train.eval_steps": 2, "train.log_steps": 1} | mesh
        run(prepare(electra, data, "dpt", **fields), str(tmp_path / str(number)))
        lines = read_lines(tmp_path / str(number) / "metrics.jsonl")
        found.append([line["loss"] for line in lines if "loss" in line])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    assert len(found[0]) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    "fields, told",
    [
        ({"head.group": 2}, "listed: beast, food | tool; 2 forward passes per example"),
        ({"head.hierarchy": "living,thing,thing"}, "listed: living, thing | food, tool; 2 forward"),
    ],
)
def test_several_lists_train_and_predict(fields, told, electra, data, tmp_path, capsys):
    c = prepare(electra, data, "all_weights", **fields)
    result, workdir, err = train_and_export(capsys, tmp_path, c)
    assert told in err
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


@pytest.mark.long
@pytest.mark.parametrize("group", [0, 2])
def test_a_metric_that_leaves_a_class_out(group, electra, data, tmp_path, capsys):
    """Whether all classes stand in one list or in two."""
    fields = {"head.group": group, "task.metric": "micro_f1", "task.negative": "tool"}
    c = prepare(electra, data, "all_weights", **fields)
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
    assert jaxprompt(capsys, "predict", *words)[0] == 0
    pairs = [(line["label"], line["prediction"]) for line in read_lines(out)]
    hits = sum(label == said != "tool" for label, said in pairs)
    told = sum(label != "tool" for label, _ in pairs) + sum(said != "tool" for _, said in pairs)
    assert result["test"]["micro_f1"] == pytest.approx(2 * hits / told) and hits


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


@pytest.mark.parametrize(
    "kind, fields, told",
    [
        ("dart", {"prompt.fluency": 1.0}, "prompt.fluency=1 needs a masked language model"),
        ("dart", {"head.copies": False}, "prompt.name=dart trains 3 vectors for the classes, but "),
        (
            "dpt",
            {"head.copies": False},
            "head.name=discriminator does not use them; use head.name=",
        ),
    ],
)
def test_rows_that_nothing_reads_are_refused(kind, fields, told, electra, data, refused, tmp_path):
    config = tmp_path / "c.json"
    config.write_text(prepare(electra, data, kind, **fields).to_json())
    for command in ("validate", "train"):
        words = (command, f"--config={config}")
        words += (f"--workdir={tmp_path / 'run'}",) * (command == "train")
        assert told in refused(*words, started=True)


@pytest.mark.long
def test_a_frozen_backbone_leaves_kilobytes(electra, data, tmp_path, capsys):
    c = prepare(electra, data, "dpt", trainable="prompt/.*,head/.*", **{"optim.lr": 0.03})
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert result["trained"] == (2 + 3) * 24 + 3
    size = (workdir / "export" / "prompt.safetensors").stat().st_size
    assert size < 4 * result["trained"] + 600


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
    "fields, told",
    [
        ({"task.template": "{text} it is"}, "write 1 [classes]"),
        ({"data.max_len": 8}, "head.group or head.hierarchy"),
        ({"head.listed": "beast,food"}, "needs each class"),
        ({"task.labels": "beast"}, "a task needs 2 or more"),
        ({"task.words": "a,b"}, "2 entries for 3"),
    ],
)
def test_what_does_not_fit_is_named(fields, told, electra, data, tmp_path, refused):
    config = tmp_path / "wrong.json"
    config.write_text(prepare(electra, data, "all_weights", **fields).to_json())
    line = refused("train", f"--config={config}", f"--workdir={tmp_path / 'w'}", started=True)
    assert told in line


def test_a_backbone_without_the_head_is_named(backbone, data, tmp_path, refused):
    config = tmp_path / "wrong.json"
    config.write_text(prepare(backbone, data, "all_weights").to_json())
    line = refused("train", f"--config={config}", f"--workdir={tmp_path / 'w'}", started=True)
    assert "has no replaced-token head for head.name=discriminator" in line
