"""A prompt on its backbone: predictions, pure scores, files in and out."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_peft import peft
from tiny_run import ROOT, jaxprompt, make_backbone, read_lines, write_rows

import jaxprompt as jp
from jaxprompt.api.rows import make_rows
from jaxprompt.convert.peft import write_peft
from jaxprompt.training.evaluation import scoring_step

# PEFT calls what transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def model(backbone, trained):
    return jp.attach(backbone, trained.prompt)


def test_predictions_are_those_of_the_command(model, trained, texts, tmp_path, capsys):
    jp.save_prompt(trained.prompt, tmp_path / "export")
    path = write_rows(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    out = tmp_path / "out.jsonl"
    words = [f"--prompt={tmp_path / 'export'}", f"--input={path}", f"--output={out}"]
    assert jaxprompt(capsys, "predict", *words)[0] == 0
    command_rows = [{k: v for k, v in line.items() if k != "text"} for line in read_lines(out)]
    assert jp.predict(model, texts) == command_rows
    assert jp.predict(model, texts[0]) == command_rows[:1]
    assert jp.predict(model, path) == command_rows
    assert jp.predict(model, []) == []


def test_a_saved_prompt_is_the_same_prompt(trained, backbone, texts, tmp_path):
    jp.save_prompt(trained.prompt, tmp_path / "first")
    jp.save_prompt(jp.load_prompt(tmp_path / "first"), tmp_path / "second")
    for name in ("prompt.safetensors", "prompt.json"):
        first, second = ((tmp_path / x / name).read_bytes() for x in ("first", "second"))
        assert first == second


def test_a_repr_is_one_line_without_arrays(trained, backbone, model):
    assert re.match(r"Prompt\(prefix for custom: prompt/k \[.*\]\)$", repr(trained.prompt))
    assert re.match(r"LoadedBackbone\(bert .*, [\d,]+ bytes of \w{12} on 1x1 dev", repr(backbone))
    assert re.match(r"PromptedModel\(Prompt\(.*\]\) on bert ", repr(model))
    both = jp.attach(backbone, {"a": trained.prompt, "b": trained.prompt}, by="task")
    assert repr(both) == "BankedModel(a, b; by 'task')"
    assert "history" not in repr(trained)


@pytest.fixture(scope="module")
def by_number(rows, tmp_path_factory):
    """The dev rows as `datasets` writes them: numbers, with names of another order. -> a file"""
    datasets = pytest.importorskip("datasets")
    names = ["tool", "beast", "food"]
    indexed = [{"text": row["text"], "label": names.index(row["label"])} for row in rows[1]]
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    path = tmp_path_factory.mktemp("numbers") / "dev.parquet"
    datasets.Dataset.from_list(indexed, features=datasets.Features(kinds)).to_parquet(path)
    return path


def test_numbers_of_classes_are_read_by_the_names_of_their_file(
    model, trained, backbone, rows, by_number, tmp_path, capsys
):
    datasets = pytest.importorskip("datasets")
    expected = jp.evaluate(model, rows[1])
    assert jp.evaluate(model, by_number) == expected
    dataset = datasets.Dataset.from_parquet(str(by_number))
    assert jp.evaluate(model, dataset) == expected
    # As training reads them.
    assert list(make_rows(by_number, "dev", model.scorer.task)) == rows[1]
    folder = tmp_path / "export"
    jp.save_prompt(trained.prompt, folder)
    words = ("evaluate", f"--prompt={folder}", f"--input={by_number}")
    code, out, err = jaxprompt(capsys, *words)
    assert code == 0, err
    assert json.loads(out)["accuracy"] == pytest.approx(expected["accuracy"])
    other = dataclasses.replace(trained.prompt, card=relabelled(trained.prompt.card))
    for prompts in ({"a": trained.prompt, "b": other}, {"b": other, "a": trained.prompt}):
        bank = jp.attach(backbone, prompts)
        scores = jp.evaluate(bank, dataset.add_column("prompt", ["a"] * len(dataset)))["a"]
        assert scores["accuracy"] == expected["accuracy"]


def relabelled(card):
    """The card of a task whose label stands in another column."""
    return card | {"task": card["task"] | {"label": "team"}}


def test_dev_is_measured_as_in_training(model, trained, rows):
    expected = pytest.approx(trained.result["dev"] | {"examples": len(rows[1])})
    assert jp.evaluate(model, rows[1]) == expected
    with pytest.raises(
        jp.InputError, match="none of 1 rows has a known label .*give rows with one of beast"
    ):
        jp.evaluate(model, [{"text": "a hammer"}])
    others = [{"text": "a hammer", "label": "tol"}, {"text": "a hammer"}]
    with pytest.warns(UserWarning, match=f"2 of {len(rows[1]) + 2} rows are left out"):
        assert jp.evaluate(model, rows[1] + others) == expected


# -- pure scores ----------------------------------------------------------------------------------


@pytest.mark.long
def test_scores_are_a_pure_function(model, rows):
    batch = model.encode(rows[1][:6])
    plain = jp.scores(model.params, model, batch)
    compiled = jax.jit(jp.scores, static_argnums=1)(model.params, model, batch)
    np.testing.assert_allclose(plain, compiled, atol=1e-5)
    command_scores = [list(row["scores"].values()) for row in jp.predict(model, rows[1][:6])]
    np.testing.assert_allclose(jax.nn.softmax(plain), command_scores, atol=1e-5)


def test_scores_have_gradients_by_the_prompt(model, rows):
    batch = model.encode(rows[1][:6])

    def loss(prompt):
        actual = jp.scores({**model.params, "prompt": prompt}, model, batch)
        return -jax.nn.log_softmax(actual)[jnp.arange(6), batch.labels].mean()

    prompt = model.params["prompt"]
    slope = jax.grad(loss)(prompt)
    assert jax.tree.structure(slope) == jax.tree.structure(prompt)
    # A step against the gradient lowers the loss by what the gradient says.
    size = sum(float((g**2).sum()) for g in jax.tree.leaves(slope))
    step = 10.0
    moved = jax.tree.map(lambda x, g: x - step * g, prompt, slope)
    assert loss(prompt) - loss(moved) == pytest.approx(step * size, rel=0.05)


@pytest.mark.long
def test_scores_map_over_prompts(model, rows):
    batch = model.encode(rows[1][:6])
    two = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), model.params["prompt"])
    mapped = jax.vmap(lambda prompt: jp.scores({**model.params, "prompt": prompt}, model, batch))
    both = mapped(two)
    for number, factor in enumerate((1.0, 0.5)):
        scaled = jax.tree.map(lambda x, f=factor: f * x, model.params["prompt"])
        alone = jp.scores({**model.params, "prompt": scaled}, model, batch)
        np.testing.assert_allclose(both[number], alone, atol=1e-5)


# -- prompts of others ----------------------------------------------------------------------------

torch = pytest.importorskip("torch")
LABELS = ("beast", "food", "tool")


def torch_scores(model, folder, texts):
    """Scores texts by a torch model. -> [B, C]"""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(list(texts), padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits.softmax(-1).numpy()


def our_scores(model, texts):
    return np.array([list(row["scores"].values()) for row in jp.predict(model, texts)])


@pytest.mark.long_cases("bert")
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_prefix_of_pefts_scores_as_there(family, folder, texts, tmp_path):
    from transformers import AutoModelForSequenceClassification

    where = folder if family == "bert" else make_backbone(tmp_path / family, family)
    base = AutoModelForSequenceClassification.from_pretrained(where, num_labels=3)
    setting = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=5)
    theirs = peft.get_peft_model(base, setting).eval()
    theirs.save_pretrained(tmp_path / "peft")
    backbone = jp.load_backbone(str(where))
    task = jp.task("text", labels=LABELS)
    model = jp.attach(backbone, jp.load_prompt(tmp_path / "peft"), task=task, max_len=40)
    expected = torch_scores(theirs, where, texts)
    np.testing.assert_allclose(our_scores(model, texts), expected, atol=1e-5)
    # Now it has a card, and needs to be told nothing.
    jp.save_prompt(model.prompt, tmp_path / "export")
    again = jp.attach(backbone, jp.load_prompt(tmp_path / "export"))
    assert jp.predict(again, texts) == jp.predict(model, texts)


def test_an_adapter_of_another_head_grouping_is_named(tmp_path):
    """Two heads of keys serve the four of the Llama, and the adapter has one for each."""
    backbone = jp.load_backbone(make_backbone(tmp_path / "llama", "llama"))
    fields = dict(task="topics", head=jp.verbalizer(), max_len=48)
    for heads in (2, 4):
        k = np.ones((2, 3, heads, 8), np.float32)
        about = dict(base="x", layers=2, heads=heads, task_type="CAUSAL_LM")
        write_peft(tmp_path / f"of {heads}", prefix=(k, k), **about)
    jp.attach(backbone, jp.load_prompt(tmp_path / "of 2"), **fields)
    with refused(r"of 4: prompt/k is \[2, 3, 4, 8\], but the backbone needs \[2, 3, 2, 8\]"):
        jp.attach(backbone, jp.load_prompt(tmp_path / "of 4"), **fields)


def test_a_prefix_for_a_family_that_reads_none_in_torch_is_refused(tmp_path):
    backbone = jp.load_backbone(make_backbone(tmp_path / "albert", "albert"))
    k = np.ones((2, 3, 2, 16), np.float32)
    about = dict(base="x", layers=2, heads=2, task_type="FEATURE_EXTRACTION")
    write_peft(tmp_path / "peft", prefix=(k, k), **about)
    with refused("has a prefix, which an albert of transformers does not support"):
        jp.attach(backbone, jp.load_prompt(tmp_path / "peft"), task="topics", max_len=48)


def test_a_prompt_goes_to_peft_and_scores_there(model, trained, folder, texts, tmp_path):
    """By the lines of the README.md that stands beside the adapter."""
    for _ in range(2):  # over its own files it may write again
        jp.save_prompt(trained.prompt, tmp_path / "peft", "peft")
    with refused("contains config.json, which is not part of this export of an adapter"):
        jp.save_prompt(trained.prompt, folder, "peft")
    lines = (tmp_path / "peft" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {}
    exec(lines, names)
    theirs = names["model"].eval()
    assert theirs.config.id2label == dict(enumerate(LABELS))
    expected = torch_scores(theirs, folder, texts)
    np.testing.assert_allclose(our_scores(model, texts), expected, atol=1e-5)


def test_soft_tokens_of_an_array_stand_in_front(backbone, folder, texts, tmp_path):
    rows = np.random.default_rng(0).normal(0, 0.5, (3, 32)).astype(np.float32)
    np.save(tmp_path / "soft.npy", rows)
    prompt = jp.load_prompt(tmp_path / "soft.npy")
    task = jp.task(
        "text", labels=LABELS, words=("cat", "rice", "saw"), template="[soft] [cls] {text} [mask]"
    )
    model = jp.attach(backbone, prompt, task=task, head=jp.verbalizer(), max_len=40)
    actual = our_scores(model, texts)
    assert actual.shape == (30, 3)
    np.save(tmp_path / "other.npy", 0 * rows)
    other = jp.attach(
        backbone, jp.load_prompt(tmp_path / "other.npy"), task=task, head=jp.verbalizer(),
        max_len=40,
    )  # fmt: skip
    assert np.abs(actual - our_scores(other, texts)).max() > 1e-3
    jp.save_prompt(model.prompt, tmp_path / "again.npy", "npy")
    assert np.array_equal(np.load(tmp_path / "again.npy"), rows)


def refused(*messages):
    return pytest.raises(jp.InputError, match=".*".join(messages))


@pytest.mark.long
def test_none_is_the_backbone_by_itself(backbone, folder, rows, tmp_path, capsys):
    names = ("beast", "food", "tool")
    task = jp.task("text", labels=names, words=names, template="{text} about [mask] .")
    model = jp.attach(backbone, None, task=task, head=jp.verbalizer(), max_len=24, multiple=24)
    write_rows(tmp_path / "dev.jsonl", rows[1])
    fields = {
        "backbone.path": folder, "data.source": tmp_path, "task.name": "custom",
        "task.fields": "text", "task.labels": ",".join(names), "task.words": ",".join(names),
        "task.template": "{text} about [mask] .", "data.max_len": 24,
    }  # fmt: skip
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    where = f"--config={ROOT / 'configs/base.py'}:zero_shot"
    code, out, err = jaxprompt(capsys, "evaluate", where, "--split=dev", *words)
    assert code == 0, err
    scores = jp.evaluate(model, rows[1])
    assert scores["accuracy"] == pytest.approx(json.loads(out)["accuracy"])
    assert model.params.keys() == {"backbone"}
    with pytest.raises(jp.InputError, match="a backbone by itself.*give task="):
        jp.attach(backbone, None)
    with pytest.raises(
        jp.InputError, match="by itself has no parameters of a head, but head linear"
    ):
        jp.attach(backbone, None, task=task, head=jp.linear(), max_len=24)
    alike = jp.attach(backbone, None, task=task, max_len=24, multiple=24)
    assert jp.predict(alike, rows[1]) == jp.predict(model, rows[1])


def test_what_a_prompt_cannot_do_is_named(model, trained, backbone, folder, tmp_path):
    with refused("format", "jaxprompt"):
        jp.save_prompt(trained.prompt, tmp_path / "x", "onnx")
    with refused("no soft tokens"):
        jp.save_prompt(trained.prompt, tmp_path / "x.npy", "npy")
    with refused("contains its task", "remove task, bach"):
        jp.attach(backbone, trained.prompt, task="sst2", bach=2)
    with refused("batch=0 must be at least 1"):
        jp.attach(backbone, trained.prompt, batch=0)
    np.save(tmp_path / "soft.npy", np.ones((3, 32), np.float32))
    bare = jp.load_prompt(tmp_path / "soft.npy")
    with refused("has no metadata of its task", "give task="):
        jp.attach(backbone, bare)
    with refused("has no metadata of its task", "jp.attach"):
        jp.save_prompt(bare, tmp_path / "x")
    with refused("classes are not known", "labels"):
        jp.attach(backbone, bare, task=jp.task("text"))
    task = jp.task("text", labels=["a", "b"])
    with refused(
        "soft.npy has no parameters of a head, but head linear must be trained; use head="
    ):
        jp.attach(backbone, bare, task=task, max_len=24)
    with refused("max_new_tokens|generate|writes|T5"):
        jp.generate(model, ["a text"])
    with refused("2 fields|cannot tell|text"):
        jp.predict(model, [{"other": "a text"}])
    other = jp.load_backbone(str(make_backbone(tmp_path / "other", seed=1)))
    with refused("trained on the weights"):
        jp.attach(other, trained.prompt)
    assert jp.predict(jp.attach(other, trained.prompt, force=True), ["a saw"])
    with refused("prompt.json"):
        jp.load_prompt(tmp_path)


def test_a_prompt_of_a_divided_backbone_names_the_cure(folder, trained, backbone):
    card = json.loads(json.dumps(trained.prompt.card))
    card["backbone"]["rescale"] = 100.0
    prompt = jp.Prompt(trained.prompt.tensors, card)
    with refused("rescale=100.0", r"load_backbone\(..., rescale=100.0\)"):
        jp.attach(backbone, prompt)


def test_plain_soft_tokens_are_divided_as_their_backbone(tmp_path):
    """The same rows answer alike, and are saved as they were read."""
    path, rows = make_backbone(tmp_path / "t5", "t5"), np.full((3, 32), 0.5, np.float32)
    rows[1] = -3.0
    np.save(tmp_path / "soft.npy", rows)
    task = jp.task(
        "text", labels=("beast", "tool"), words=("cat", "saw"), template="{text} about [mask] ."
    )
    results = []
    for rescale in (1.0, 100.0):
        backbone = jp.load_backbone(str(path), rescale=rescale)
        bare = jp.load_prompt(str(tmp_path / "soft.npy"))
        model = jp.attach(backbone, bare, task=task, head=jp.verbalizer())
        (answer,) = jp.predict(model, ["a new hammer"])
        results.append(list(answer["scores"].values()))
        jp.save_prompt(model.prompt, tmp_path / f"{rescale}.npy", "npy")
        np.testing.assert_allclose(np.load(tmp_path / f"{rescale}.npy"), rows, rtol=1e-6)
    np.testing.assert_allclose(*results, rtol=1e-4)


# -- the package ----------------------------------------------------------------------------------


def test_every_public_name_is_there():
    for name in jp.__all__:
        assert getattr(jp, name).__doc__, name
    assert {"prefix", "soft", "full", "linear", "verbalizer", "train"} <= set(dir(jp))
    for name in ("prefix", "linear"):
        assert isinstance(getattr(jp, name), jp.Choice)
    with pytest.raises(AttributeError, match="prefx.*nearest: prefix"):
        jp.prefx  # noqa: B018


def test_the_import_loads_nothing_heavy():
    code = "import sys, jaxprompt as jp; assert jp.__version__; assert 'jax' not in sys.modules"
    code += "; jp.prefix(3); assert 'jax' not in sys.modules, 'a method'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("head", ["linear", "verbalizer"])
def test_a_second_prediction_compiles_nothing(backbone, trained, texts, head):
    scoring_step.cache_clear()
    words = ("beast", "food", "tool")
    task = jp.task("text", labels=words, words=words, template="{text} about [mask] .")
    fields = dict(task=task, head=jp.verbalizer(), max_len=24)
    start = (trained.prompt, {}) if head == "linear" else (None, fields)
    attach = lambda: jp.attach(backbone, start[0], **start[1])
    model, counts = attach(), []
    listen = lambda name, _, **__: counts.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        first, some = jp.predict(model, texts[:3]), len(counts)
        assert jp.predict(model, texts[:3]) == first
        again = attach()
        assert jp.predict(again, texts[:3]) == first
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert some > 0 and len(counts) == some


def test_arguments_of_another_kind_are_named(model, backbone, trained, rows, tmp_path):
    """A path in the place of what is loaded, a head in that of a method, and the like."""
    for call, message in (
        (lambda: jp.attach(backbone, "runs/a"), "prompt='runs/a' is a str; give the result of jp."),
        (lambda: jp.attach("x", trained.prompt), "backbone='x' is a str; give jp.load_backbone"),
        (lambda: jp.train(backbone, *rows, method=5), "method=5 is not a method"),
        (lambda: jp.train(backbone, *rows, method=jp.linear()), "method=jp.linear() is not a "),
        (lambda: jp.train(backbone, *rows, head=jp.prefix(2)), "head=jp.prefix() is not a head"),
        (lambda: jp.predict(trained.prompt, ["a"]), "give the result of jp.attach"),
        (lambda: jp.attach(backbone, trained.prompt, batch="4"), "batch='4' must be a number"),
        (lambda: jp.train(backbone, *rows, task=5), "task=5 is a int; give the name of a task"),
        (lambda: jp.train(backbone, *rows, workdir=5), "workdir '5' is not valid"),
        (lambda: jp.train(backbone, *rows, workdir=""), "workdir is empty; give a folder, or None"),
        (lambda: jp.save_prompt(model, tmp_path / "x"), "is a PromptedModel; give a prompt"),
        (lambda: jp.save_prompt(trained.prompt, 5), "path '5' is not valid"),
        (lambda: jp.attach(backbone, trained.prompt, by="team"), "by='team' is only valid"),
        (lambda: jp.attach(backbone, {1: trained.prompt}), "the prompt name 1 is not a string"),
        (lambda: jp.generate(trained.prompt, ["a"]), "is a Prompt; give the result of attach"),
        (lambda: jp.load_prompt(trained), "give the path of a prompt; "),
    ):
        with pytest.raises(jp.InputError, match=re.escape(message)):
            call()
    assert not (tmp_path / "x").exists()


class Polars:
    """What polars.DataFrame gives its rows by."""

    def __init__(self, rows):
        self.rows, self.columns = rows, [*rows[0]]

    def to_dict(self):
        raise TypeError

    def to_dicts(self):
        return self.rows


def test_what_is_no_row_is_named_with_what_is(model, tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    twice = pandas.DataFrame([["the cat", "the rice"]], columns=["text", "text"])
    with refused("the columns .'text', 'text'. of the DataFrame must"):
        jp.predict(model, twice)
    with refused("cannot be read as rows; give a list of texts, a list of dicts, a datasets.Data"):
        jp.predict(model, {"text": "a"})
    with refused("text 2: {'text': 'b'} is not a string"):
        jp.predict(model, ["a", {"text": "b"}])
    (tmp_path / "test.csv").write_text("text\nthe cat\n")
    monkeypatch.chdir(tmp_path)
    with refused("would be read as a text, but it is a file; give Path"):
        jp.predict(model, "test.csv")
    assert len(jp.predict(model, Path("test.csv"))) == len(jp.predict(model, "a test.csv")) == 1
    texts = ["the cat", "the rice"]
    for column in (pandas.Series(texts), np.array(texts), tuple(texts)):
        assert jp.predict(model, column) == jp.predict(model, texts)
    with refused("there are no rows to encode"):
        model.encode([])


def test_rows_of_polars(model, rows):
    assert jp.predict(model, Polars(rows[1])) == jp.predict(model, rows[1])
