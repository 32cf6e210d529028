"""Every method and baseline, on every family: it learns, and the run and its export agree."""

import functools
import json
from typing import NamedTuple

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file
from tiny_run import (
    TOPICS,
    accuracy,
    losses,
    make_backbone,
    make_config,
    predict,
    read_lines,
    serve,
    succeed,
    train_and_export,
    with_part,
)

from configs.parts.heads import discriminator
from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.config.load import with_overrides
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.planning.abstract_run import open_run
from jaxprompt.planning.cost import measure_sizes, step_shapes
from jaxprompt.registry import METHODS
from jaxprompt.runs.train import train_prompt

torch = pytest.importorskip("torch")

WORDS = {"head.name": "verbalizer", "task.words": "beast,food,tool"}
CLOZE = WORDS | {"task.template": "{text} about [mask] ."}
LAST = WORDS | {"task.template": "{text} about [mask]"}
IPT = {"prompt.scale": 0.1}
DART = {"task.labels": "beast,food,tool", "prompt.length": 3, "data.multiple": 32,
        "data.max_len": 32, "train.total_steps": 18, "train.eval_steps": 6}  # fmt: skip
MASKED_DART = DART | {"task.template": "{text} [soft*2] [mask] [soft*1]", "prompt.text": "it was .",
                      "prompt.fluency": 0.5}  # fmt: skip
WRITING_DART = DART | {"prompt.length": 2, "prompt.text": "it was", "prompt.fluency": 0.0}
DPT = {"task.labels": "beast,food,tool", "data.multiple": 32, "data.max_len": 32,
       "train.total_steps": 40, "train.eval_steps": 20}  # fmt: skip
LISTED = DPT | {"head.name": "discriminator"}  # in place of the head that a method brings
SLOW = LISTED | {"train.total_steps": 120}
SOFT_LISTED = SLOW | {"task.template": "{text} [soft] [classes]."}
DEEP = {"prompt.decoder": 3, "prompt.cross": 2, "prompt.scale": 0.5}
UPPER = CLOZE | {"prompt.layers": "1-2"}


class Case(NamedTuple):
    """A method on a family: a function of configs/parts/methods.py, and its fields."""

    family: str
    method: str
    fields: dict[str, object]
    lr: float
    least: float  # accuracy on 24 rows of three classes; chance passes 0.75 once in 10^5 draws
    split: str = "test"  # of that accuracy


CASES = {
    "prefix": Case("bert", "prefix", {}, 3e-2, 0.75),
    "prefix_mlp": Case("bert", "prefix", {"prompt.hidden": 8}, 1e-2, 0.75),
    "prefix_interval": Case("bert", "prefix", {"prompt.layers": "2-2"}, 3e-2, 0.75),
    "soft_middle": Case(
        "bert", "soft", {"task.template": "[soft*2] {text} [soft*2] ."}, 3e-2, 0.75
    ),
    "soft_task": Case("bert", "soft", {"prompt.start": "task"}, 3e-2, 0.75),
    "soft_words": Case(
        "bert", "soft", WORDS | {"task.template": "{text} [soft] [mask] ."}, 0.1, 0.75
    ),
    "head_only": Case("bert", "head_only", {}, 3e-2, 0.75),
    "full": Case("bert", "full", {}, 3e-3, 0.75),
    "bias_only": Case("bert", "bias_only", {}, 1e-2, 0.75),
    "layernorm_only": Case("bert", "layernorm_only", {}, 1e-2, 0.75),
    "ipt": Case("bert", "ipt", IPT, 0.05, 0.6),
    "ipt_prefix": Case("bert", "ipt", IPT | {"prompt.on": "prefix"}, 0.05, 0.6),
    "ipt_encoder": Case(
        "bert", "ipt", IPT | {"prompt.on": "prefix", "prompt.added": False, "prompt.layers": "1-2",
                              "prompt.encoder": "cnn", "prompt.fixed": True, "prompt.hidden": 8},
        0.05, 0.6,
    ),
    "dart_bert": Case("bert", "dart", MASKED_DART, 1e-3, 0.6),
    "dart_roberta": Case(
        "roberta", "dart", MASKED_DART | {"task.template": "{text} [soft*2] [mask][soft*1]",
                                          "prompt.text": "it was."}, 1e-3, 0.6,
    ),
    "dart_electra": Case("electra", "dart", MASKED_DART, 1e-3, 0.6),  # the generator
    "dart_t5": Case(
        "t5", "dart", WRITING_DART | {"task.template": "{text} [soft*2] [mask] ."}, 5e-3, 0.6
    ),
    "dart_gpt2": Case(
        "gpt2", "dart", WRITING_DART | {"task.template": "{text} [soft*2] [mask]"}, 5e-3, 0.6
    ),
    "listed": Case(
        "discriminator", "dpt_words", DPT | {"head.order": "random", "head.order_seed": 0},
        2e-3, 0.8,
    ),
    "listed_prefix": Case("discriminator", "prefix", SLOW, 0.1, 0.8),
    "listed_soft": Case("discriminator", "soft", SOFT_LISTED, 3e-2, 0.5),
    "listed_p_tuning": Case(
        "discriminator", "p_tuning", SOFT_LISTED | {"train.total_steps": 300}, 1e-2, 0.5
    ),
    "listed_compose": Case(
        "discriminator", "compose", SLOW | {"prompt.parts": "soft(length=2)+prefix(length=2)",
                                            "task.template": "{text} [soft*2] [classes]."},
        5e-2, 0.5,
    ),
    "listed_ipt": Case(
        "discriminator", "ipt", SLOW | IPT | {"task.template": "{text} [soft*4] [classes]."},
        5e-2, 0.5,
    ),
    "listed_dpt": Case(
        "discriminator", "dpt", DPT | {"prompt.length": 2, "head.bias": True}, 1e-3, 0.8
    ),
    "listed_dart": Case(
        "discriminator", "dart", LISTED | {"prompt.length": 2, "prompt.fluency": 0.0,
                                           "task.template": "{text} [soft*2] [classes].",
                                           "head.copies": True}, 1e-3, 0.8,
    ),
    "compose_dart": Case(
        "bert", "compose",
        {"prompt.parts": "soft(length=2,start=vocab)+dart(length=2,text='it was',fluency=0.5)",
         "head.name": "label_rows", "task.labels": "beast,food,tool", "data.max_len": 32,
         "task.template": "[soft*2] {text} [soft*2] [mask] .", "data.multiple": 8,
         "trainable": "prompt/.*,head/.*,backbone/.*", "train.total_steps": 18,
         "train.eval_steps": 6},
        1e-3, 0.6,
    ),
    "t5_compose": Case(
        "t5", "compose",
        CLOZE | {"prompt.parts": "soft(length=2,decoder=1)+prefix(length=2,cross=2,decoder=1)"},
        3e-2, 0.0,
    ),
    "albert": Case("albert", "prefix", UPPER, 0.1, 0.4),
    "deberta": Case("deberta", "prefix", UPPER, 0.1, 0.4),
    "deberta_v2": Case("deberta_v2", "prefix", UPPER, 0.1, 0.4),
    "modernbert": Case("modernbert", "prefix", UPPER, 0.1, 0.4, "dev"),
    "t5_cloze": Case("t5", "full", CLOZE, 1e-2, 0.7),
    "t5_target": Case("t5", "full", CLOZE | {"head.span": "target"}, 1e-2, 0.7),
    "t5_text": Case("t5", "full", WORDS | {"task.form": "text"}, 1e-2, 0.7),
    "t5_prefix": Case("t5", "prefix", DEEP, 3e-2, 0.7),
    "t5_soft": Case("t5", "soft", {"prompt.decoder": 2}, 3e-2, 0.7),
    "glm": Case("glm", "full", CLOZE, 1e-2, 0.7),
    "llama": Case("llama", "prefix", LAST, 3e-2, 0.7),
    "llama_chat": Case("llama", "full", LAST | {"task.chat": True}, 1e-2, 0.7),
    "gpt2_soft": Case(
        "gpt2", "soft", {"head.pooler": "mean", "data.padding_side": "left"}, 3e-2, 0.7
    ),
}  # fmt: skip
WHOLE = ("full", "dart", "dpt", "dpt_words")  # methods that train all weights


@pytest.fixture(scope="module")
def folders(backbone, tmp_path_factory):
    """Makes a backbone of a family, once."""
    root = tmp_path_factory.mktemp("backbones")
    return functools.cache(
        lambda family: backbone if family == "bert" else make_backbone(root / family, family)
    )


def prepare(folders, data, name, **fields):
    """Fills a config for a case; a listing head takes the place of the one that a method brings."""
    family, method, changes, lr, *_ = CASES[name]
    overrides = {"optim.lr": lr, "train.total_steps": 60, "train.eval_steps": 20} | changes | fields
    config = make_config(folders(family), data, method)
    if overrides.get("head.name") == "discriminator":
        del overrides["head.name"]
        config = with_part(config, discriminator)
    elif "head.name" in overrides:
        return make_config(folders(family), data, method, **overrides)
    return with_overrides(config, list(overrides.items()))


def test_every_method_is_run():
    assert set(METHODS.names()) - {"none", "constant"} <= {case.method for case in CASES.values()}


@pytest.mark.default_cases("prefix", "ipt", "dart_bert")
@pytest.mark.parametrize("name", CASES)
def test_it_learns_exports_and_predicts(name, folders, data, tmp_path, capsys):
    run = serve(capsys, tmp_path, prepare(folders, data, name), data / "test.jsonl")
    assert accuracy(run.rows) == pytest.approx(run.result["test"]["accuracy"])
    assert run.result[CASES[name].split]["accuracy"] >= CASES[name].least
    assert run.result["skipped"] == 0
    method = CASES[name].method
    is_whole = method in WHOLE or name == "compose_dart"
    assert (run.result["trained"] == run.result["total"]) == is_whole
    for row in run.rows:
        assert row["score"] == max(row["scores"].values()) == row["scores"][row["prediction"]]
    if name == "listed":
        card = json.loads((run.workdir / "export" / "prompt.json").read_text())
        assert card["head"]["listed"] == ["tool", "food", "beast"]
    if name in ("listed_dpt", "listed_p_tuning"):
        succeed(capsys, "inspect", f"--workdir={run.workdir}")
        assert (run.workdir / "inspect" / "inspect.html").exists()
    if method == "ipt":  # an empty text has no prompt
        (empty, cat), _ = predict(capsys, run.workdir, "--text=", "--text=the cat")
        assert np.isfinite(empty["score"]) and empty["scores"] != cat["scores"]


# -- without training -----------------------------------------------------------------------------


def evaluate_zero_shot(capsys, tmp_path, run_config):
    """Evaluates a config that trains nothing. Returns the metrics and the rows."""
    (tmp_path / "zero.json").write_text(run_config.to_json())
    config, out = f"--config={tmp_path / 'zero.json'}", tmp_path / "out.jsonl"
    metrics, _ = succeed(capsys, "evaluate", config, "--split=test", f"--output={out}")
    return json.loads(metrics), read_lines(out)


def test_zero_shot_is_the_answer_of_the_pretrained_model(backbone, data, tmp_path, capsys):
    config = make_config(backbone, data, "zero_shot", **CLOZE)
    metrics, rows = evaluate_zero_shot(capsys, tmp_path, config)
    assert metrics["split"] == "test" and metrics["examples"] == 24
    tokenizer = transformers.AutoTokenizer.from_pretrained(backbone)
    model = transformers.BertForMaskedLM.from_pretrained(backbone).eval()
    words = tokenizer.convert_tokens_to_ids(list(TOPICS))
    for row in rows:
        ids = tokenizer(f"{row['text']} about [MASK] .", return_tensors="pt")
        with torch.no_grad():
            logits = model(**ids).logits[ids["input_ids"] == tokenizer.mask_token_id][0, words]
        assert row["prediction"] == list(TOPICS)[logits.argmax()]
    assert metrics["accuracy"] == pytest.approx(accuracy(rows)) and metrics["accuracy"] > 1 / 3


def test_a_discriminator_answers_without_training(folders, data, tmp_path, capsys):
    """By the originality of each class, and with the metric of relations."""
    fields = {"trainable": "", "task.metric": "micro_f1", "task.negative": "tool"}
    config = prepare(folders, data, "listed", **fields | {"head.order": "task"})
    metrics, rows = evaluate_zero_shot(capsys, tmp_path, config)
    assert metrics["accuracy"] == pytest.approx(accuracy(rows))
    right = sum(row["prediction"] == row["label"] != "tool" for row in rows)
    precision = right / sum(row["prediction"] != "tool" for row in rows)
    recall = right / sum(row["label"] != "tool" for row in rows)
    f1 = 2 * precision * recall / (precision + recall)
    expected = {"micro_f1": f1, "precision": precision, "recall": recall}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    folder = folders("discriminator")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.ElectraForPreTraining.from_pretrained(folder).eval()
    for row in rows[:4]:
        ids = tokenizer(f"{row['text']} class: beast, food, tool.", return_tensors="pt")
        with torch.no_grad():
            scores = 1 - model(**ids).logits[0].sigmoid()
        start = 1 + len(tokenizer(row["text"], add_special_tokens=False).input_ids)
        classes = tokenizer.convert_tokens_to_ids(list(TOPICS))
        places = [ids.input_ids[0].tolist().index(number, start) for number in classes]
        np.testing.assert_allclose(list(row["scores"].values()), scores[places], atol=1e-5)


# -- DPT ------------------------------------------------------------------------------------------


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
def test_several_lists_train_and_predict(fields, message, folders, data, tmp_path, capsys, refused):
    config = prepare(folders, data, "listed", **fields | {"head.order": "task"})
    run = serve(capsys, tmp_path, config, data / "test.jsonl")
    assert message in run.log
    assert (
        accuracy(run.rows) == pytest.approx(run.result["test"]["accuracy"])
        and accuracy(run.rows) > 0.6
    )
    splits = ("dev", "train") if "head.hierarchy" in fields else ("dev",)
    for split in splits:
        succeed(capsys, "inspect", f"--workdir={run.workdir}", f"--split={split}")
        report = json.loads((run.workdir / "inspect" / "inspect.json").read_text())
        if split == "dev":
            counts = np.array(report["confusion"]["counts"])
            assert counts.trace() / 30 == pytest.approx(run.result["dev"]["accuracy"])
            assert counts.sum() == 30 and "in several inputs" in report["notes"]["states"]
        else:  # whose inputs in train are those on the way to the right class
            assert report["notes"]["confusion"].startswith("There is no confusion matrix: ")
    program = [f"--workdir={run.workdir}", f"--stablehlo={tmp_path / 'program'}"]
    assert "makes 2; list all classes in one input" in refused("export", *program, started=True)


def test_a_run_of_dpt_is_planned(folders, data):
    run = open_run(prepare(folders, data, "listed"))
    placement = make_placement(1, 1)
    sizes = measure_sizes(step_shapes(run, placement), placement)
    assert sizes.trained == sizes.total == 21_553


# -- DART -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_mesh_changes_nothing(folders, data, tmp_path):
    """The learned rows are whole on each device, the vocabulary's tables are sharded."""
    curves = []
    for number, mesh in enumerate([{}, {"mesh.data": 4, "mesh.model": 2}]):
        fields = {"train.total_steps": 4, "train.eval_steps": 2, "train.log_steps": 1} | mesh
        train_prompt(prepare(folders, data, "dart_bert", **fields), str(tmp_path / str(number)))
        curves.append(losses(tmp_path / str(number)))
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
    assert len(curves[0]) == 4


@pytest.mark.long
@pytest.mark.parametrize("fixed, saved", [("prompt/rows", "slots"), ("prompt/table", "rows")])
def test_what_is_fixed_of_a_prompt_is_there_after_training(
    fixed, saved, folders, data, tmp_path, capsys
):
    """No checkpoint holds it: it is made again from the words that it started from."""
    fields = {"trainable": f"{fixed},head/.*", "optim.lr": 0.05}
    config = prepare(folders, data, "dart_bert", **fields)
    run = serve(capsys, tmp_path, config, data / "test.jsonl")
    tensors, _ = read_export(str(run.workdir / "export"))
    text = "it was ." if saved == "slots" else "beast food tool"
    ids = encode_texts(load_tokenizer(folders("bert")), [text])[0]
    weights = load_file(folders("bert") / "model.safetensors")
    expected = weights["bert.embeddings.word_embeddings.weight"][ids]
    np.testing.assert_array_equal(tensors[f"prompt/{saved}"], expected)


@pytest.mark.long
def test_dart_in_two_stages(folders, data, tmp_path, capsys):
    """The rows alone first, then everything from them: a run that starts from an export."""
    rows = {"trainable": "prompt/.*,head/.*", "optim.lr": 0.05, "train.total_steps": 6}
    _, workdir, _ = train_and_export(capsys, tmp_path, prepare(folders, data, "dart_bert", **rows))
    export = workdir / "export"
    fields = {"prompt.init": str(export), "optim.lr": 0.0, "train.total_steps": 1,
              "train.eval_steps": 1}  # fmt: skip
    (tmp_path / "second").mkdir()
    second = prepare(folders, data, "dart_bert", **fields)
    _, workdir, _ = train_and_export(capsys, tmp_path / "second", second)
    (before, _), (after, _) = read_export(str(export)), read_export(str(workdir / "export"))
    for name in ("prompt/slots", "prompt/rows"):
        np.testing.assert_array_equal(after[name], before[name])
    assert any(name.startswith("backbone/") for name in after)


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("dart_bert", {"prompt.labels": False, "prompt.fluency": 0.0}, "prompt.labels=True"),
        ("dart_t5", {"task.form": "text"}, "reads one position"),
        (
            "listed_dart",
            {"head.copies": False},
            "prompt.name=dart trains 3 vectors for the classes",
        ),
        ("listed_dpt", {"head.copies": False}, "head.name=discriminator does not use them"),
    ],
)
def test_what_does_not_fit_is_named(name, fields, message, folders, data, refused_config):
    assert message in refused_config(prepare(folders, data, name, **fields))


# -- compositions --------------------------------------------------------------------------------


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
    config = composed(backbone, data, parts, trainable="prompt/soft/.*,head/.*", **SHORT)
    result, workdir, rows, err = serve(capsys, tmp_path, config, data / "test.jsonl")
    assert f"prompt initialised from {first / 'export'}" in err
    assert result["trained"] == 2 * 32 + 32 * 3 + 3
    exported, before = (load_file(run / "export/prompt.safetensors") for run in (workdir, first))
    for name in ("prompt/k", "prompt/v"):
        np.testing.assert_array_equal(exported[name], before[name])
    assert exported["prompt/slots"].shape == (2, 32)
    _, metadata = read_export(str(workdir / "export"))
    assert metadata.prompt.name == "constant" and metadata.method == "compose"
    assert metadata.init.path == str(first / "export")
    assert accuracy(rows) == pytest.approx(result["test"]["accuracy"]) and accuracy(rows) > 0.6
    succeed(capsys, "inspect", f"--workdir={workdir}")
    rows = json.loads((workdir / "inspect" / "inspect.json").read_text())["rows"]
    assert [row["start"]["token"] for row in rows] == ["beast", "food"]


@pytest.mark.parametrize(
    "parts, fields, message",
    [
        ("soft(length=2)+prefix(init='/no/where')", {}, "/no/where/prompt.json cannot be read"),
        ("soft(start=file,file='/no/where.npy')+prefix", {}, "/no/where.npy"),
        ("soft(start=frequent)+prefix", {}, "corpus.path is empty"),
        ("soft(text='a cat')+prefix", {}, "'a cat' is only used with prompt.start=text"),
        ("soft(length=2)+ipt(length=2)", {"task.template": "[soft*2] {text}"}, "places 2 soft tok"),
    ],
)
def test_what_does_not_fit_a_composition_is_named(
    parts, fields, message, backbone, data, refused_config
):
    assert message in refused_config(composed(backbone, data, parts, **fields), "train")
