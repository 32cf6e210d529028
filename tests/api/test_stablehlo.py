"""A scorer in StableHLO: it runs without jaxprompt and scores as jp.predict does."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import export
from safetensors.numpy import load_file
from tiny_run import jaxprompt, make_backbone, write_rows

import jaxprompt as jp
from jaxprompt.api import run_scorer
from jaxprompt.api.stablehlo import write_stablehlo
from jaxprompt.cli import export as export_command

pytest.importorskip("flatbuffers")
WITHOUT_CHECKOUT = Path(__file__).resolve().parents[1] / "without_checkout"
LABELS = ("beast", "food", "tool")
FILES = [
    "scorer.stablehlo", "scorer.safetensors", "example.npz", "run.py", "tokenizer.json",
    "README.md", "scorer.json",
]  # fmt: skip
# GPT-2 is fed the tokens of the last word, which has several.
WORDS = ("cat", "rice", "hammersaw")
WORD_TASKS = {
    "bert": ("[soft*2] [cls] {text} [soft*1] [mask]", WORDS[:2] + ("saw",)),
    "gpt2": ("[soft] {text} about [mask]", WORDS),
    "t5": ("{text} about [mask] .", WORDS),
}


@pytest.fixture(scope="module")
def backbones(backbone, tmp_path_factory):
    """Gives a backbone by family."""
    folder = tmp_path_factory.mktemp("backbones")
    load = lambda family: jp.load_backbone(str(make_backbone(folder / family, family)))
    return functools.cache(lambda family: backbone if family == "bert" else load(family))


def with_words(backbone, family, folder, **head):
    """Puts soft tokens of an array and a verbalizer on a backbone."""
    array = np.random.default_rng(0).normal(0, 0.5, (3, 32)).astype(np.float32)
    np.save(folder / "soft.npy", array)
    template, words = WORD_TASKS[family]
    task = jp.task("text", labels=LABELS, words=words, template=template)
    prompt = jp.load_prompt(folder / "soft.npy")
    return jp.attach(backbone, prompt, task=task, head=jp.verbalizer(**head), max_len=40)


@pytest.fixture(scope="module")
def models(backbones, trained, rows, small, tmp_path_factory):
    """Gives a prompt on its backbone by the name of the case."""
    folder = tmp_path_factory.mktemp("prompts")

    def t5_prefix():
        method = jp.prefix(3, decoder=2, cross=2)
        fields = small | dict(steps=1, max_len=40, multiple=8)
        learned = jp.train(
            backbones("t5"), *rows, method=method, head=jp.verbalizer(),
            task=jp.task("text", labels=LABELS, words=WORDS, template=WORD_TASKS["t5"][0]),
            **fields,
        )  # fmt: skip
        return jp.attach(backbones("t5"), learned.prompt)

    make = {
        "bert-prefix-linear": lambda: jp.attach(backbones("bert"), trained.prompt),
        "bert-soft-verbalizer": lambda: with_words(backbones("bert"), "bert", folder),
        "bert-soft-full": lambda: with_words(backbones("bert"), "bert", folder, scores="full"),
        "gpt2-soft-verbalizer": lambda: with_words(backbones("gpt2"), "gpt2", folder),
        "t5-prefix-verbalizer": t5_prefix,
    }
    return functools.cache(lambda case: make[case]())


CASES = (
    "bert-prefix-linear", "bert-soft-verbalizer", "bert-soft-full", "gpt2-soft-verbalizer",
    "t5-prefix-verbalizer",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(models, tmp_path_factory):
    """Gives the folder of the scorer of a case."""

    @functools.cache
    def write(case):
        folder = tmp_path_factory.mktemp("written") / case
        assert [path.name for path in write_stablehlo(models(case), folder)] == FILES
        return folder

    return write


def alone(folder, *words):
    """Runs Python where jaxprompt cannot be imported."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(WITHOUT_CHECKOUT)}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def inputs_of(batch, names, length=None):
    """Takes the inputs of a program out of a batch, cut to `length` tokens."""
    results = {}
    for name in names:
        stream, _, field = name.rpartition("decoder_")
        if name.startswith("decoder_"):
            results[name] = getattr(batch.decoder, field)
        elif name in batch.encoder._fields:
            array = getattr(batch.encoder, name)
            results[name] = array[:, :length] if array.ndim == 2 else array
        else:
            results[name] = getattr(batch, name)
    return results


def read(folder):
    """Reads a program, its weights and its card."""
    program = export.deserialize(bytearray((folder / "scorer.stablehlo").read_bytes()))
    card = json.loads((folder / "scorer.json").read_text("utf-8"))
    return program, load_file(folder / "scorer.safetensors"), card


def chances(model, texts):
    return np.array([list(row["scores"].values()) for row in jp.predict(model, texts)])


# -- what it computes -----------------------------------------------------------------------------


def test_jaxprompt_cannot_be_imported_there(tmp_path):
    done = alone(tmp_path, "-c", "import jaxprompt")
    assert done.returncode == 1 and "No module named 'jaxprompt'" in done.stderr


@pytest.mark.long
def test_its_script_runs_without_jaxprompt(written, tmp_path):
    done = alone(tmp_path, written("t5-prefix-verbalizer") / "run.py")
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert last.startswith("largest difference: ") and float(last.split()[-1]) < 1e-4
    assert sum(line.endswith(LABELS) for line in done.stdout.splitlines()) == 2


@pytest.mark.default_cases("bert-prefix-linear")
@pytest.mark.parametrize("case", CASES)
def test_it_scores_batches_of_any_size_and_length(case, written, models, texts):
    program, weights, card = read(written(case))
    names, model = [spec["name"] for spec in card["inputs"]], models(case)
    with np.load(written(case) / "example.npz") as file:
        shape = file["ids"].shape
    assert shape[0] == 2
    for count in (1, 7):
        batch = model.encode(texts[:count])
        longest = int(batch.encoder.mask.any(0).nonzero()[0].max()) + 1
        assert longest != shape[1]
        for length in (longest, batch.encoder.ids.shape[1]):
            actual = program.call(weights, inputs_of(batch, names, length))
            assert actual.shape == (count, 3) and actual.dtype == np.float32
            expected = chances(model, texts[:count])
            np.testing.assert_allclose(jax.nn.softmax(actual), expected, atol=1e-5)
    assert np.ptp(chances(model, texts), axis=0).max() > 1e-3  # the texts matter


@pytest.mark.long_cases("bert-soft-*", "t5-prefix-verbalizer")
@pytest.mark.parametrize("case", CASES)
def test_texts_are_encoded_with_what_is_in_the_folder(case, written, models, texts):
    """Short, empty and truncated ones, and one with the name of a special token."""
    model, folder = models(case), written(case)
    inputs = [*texts[:3], "", "a cat " * 40, "the [SEP] </s> cat"]
    logits = run_scorer.load_scorer(folder)(run_scorer.make_inputs(folder, inputs))
    expected = [
        [*row["scores"].values()] for row in jp.predict(model, [{"text": x} for x in inputs])
    ]
    np.testing.assert_allclose(jax.nn.softmax(logits), expected, rtol=0, atol=1e-5)


def test_it_names_no_path_of_this_machine(written):
    data = (written(CASES[0]) / "scorer.stablehlo").read_bytes()
    assert str(Path(jp.__file__).parent).encode() not in data and b".py" not in data


# -- what is beside it ----------------------------------------------------------------------------

INPUTS = {
    "bert-prefix-linear": {"ids", "mask", "positions", "types", "label_pos"},
    "bert-soft-verbalizer": {"ids", "mask", "positions", "types", "label_pos", "slot"},
    "bert-soft-full": {"ids", "mask", "positions", "types", "label_pos", "slot"},
    "gpt2-soft-verbalizer": {"ids", "mask", "positions", "types", "label_pos", "slot"},
    "t5-prefix-verbalizer": {
        "ids", "mask", "label_pos", "decoder_ids", "decoder_mask", "decoder_positions",
        "decoder_types",
    },
}  # fmt: skip


@pytest.mark.long_cases("bert-soft-*", "t5-prefix-verbalizer")
@pytest.mark.parametrize("case", CASES)
def test_its_card_lists_what_the_scores_depend_on(case, written, models):
    program, weights, card = read(written(case))
    assert card["platforms"] == list(program.platforms) == ["cpu", "cuda", "tpu"]
    assert {spec["name"] for spec in card["inputs"]} == INPUTS[case]
    assert [name for name in weights if name.startswith("prompt/")]
    plain = lambda aval: [size if isinstance(size, int) else str(size) for size in aval.shape]
    shapes = [(weights[name].dtype.name, list(weights[name].shape)) for name in sorted(weights)]
    shapes += [(spec["dtype"], spec["shape"]) for spec in card["inputs"]]
    assert shapes == [(aval.dtype.name, plain(aval)) for aval in program.in_avals]
    assert all(spec["meaning"] for spec in card["inputs"])
    assert card["output"]["meaning"] == "scores of the classes before the softmax"
    assert card["output"]["shape"] == ["b", 3] == plain(program.out_avals[0])
    assert card["classes"] == list(LABELS) and card["template"] == models(case).scorer.template
    assert card["max_len"] == models(case).scorer.layout.max_len


def test_heads_that_it_does_not_read_are_left_out(written):
    linear, words = (read(written(case))[1] for case in CASES[:2])
    has = lambda weights, part: any(name.startswith(part) for name in weights)
    assert has(linear, "backbone/pooler") and not has(linear, "backbone/mlm")
    assert has(words, "backbone/mlm") and not has(words, "backbone/pooler")


@pytest.mark.long
def test_weights_are_those_of_the_backbone_as_it_was_loaded(folder, tmp_path):
    narrow = jp.load_backbone(str(folder), dtype="bfloat16")
    write_stablehlo(with_words(narrow, "bert", tmp_path), tmp_path / "narrow")
    _, weights, card = read(tmp_path / "narrow")
    table = weights["backbone/embed/word/table"]
    assert table.dtype.name == "bfloat16" == card["dtype"]
    np.testing.assert_array_equal(table, narrow.loaded.params["embed"]["word"]["table"])
    assert weights["prompt/slots"].dtype == np.float32
    done = alone(tmp_path, tmp_path / "narrow" / "run.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_script_tells_other_scores(written, tmp_path, capsys):
    for name in FILES:
        (tmp_path / name).write_bytes((written(CASES[0]) / name).read_bytes())
    assert run_scorer.main(tmp_path) == 0
    with np.load(tmp_path / "example.npz") as file:
        example = dict(file)
    for change in (2e-4, np.nan):
        np.savez(tmp_path / "example.npz", **example | {"scores": example["scores"] + change})
        assert run_scorer.main(tmp_path) == 1


# -- who writes it --------------------------------------------------------------------------------


def test_a_prompt_is_saved_so_with_the_backbone_of_its_card(trained, written, tmp_path):
    jp.save_prompt(trained.prompt, tmp_path, "stablehlo")
    for name in ("scorer.safetensors", "scorer.json", "run.py"):
        assert (tmp_path / name).read_bytes() == (written(CASES[0]) / name).read_bytes()


@pytest.mark.long
def test_the_command_writes_it(folder, rows, trained, tmp_path, capsys):
    for name, part in zip(("train", "dev"), rows, strict=True):
        write_rows(tmp_path / f"{name}.jsonl", part)
    fields = {
        "backbone.path": folder, "task.name": "custom", "task.fields": "text",
        "data.source": tmp_path, "data.max_len": 24, "data.multiple": 24, "data.batch": 16,
        "train.total_epochs": 0, "train.total_steps": 3, "prompt.length": 4, "mesh.data": 1,
    }  # fmt: skip
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    run = f"--workdir={tmp_path / 'run'}"
    assert jaxprompt(capsys, "train", "--config=base", run, *words)[0] == 0
    code, out, _ = jaxprompt(capsys, "export", run, f"--stablehlo={tmp_path / 'scorer'}")
    assert code == 0
    sizes = json.loads(out)
    for name in FILES:
        assert sizes[str(tmp_path / "scorer" / name)] > 0
    weights = load_file(tmp_path / "scorer" / "scorer.safetensors")
    np.testing.assert_array_equal(weights["prompt/k"], trained.prompt.tensors["prompt/k"])


# -- what is refused ------------------------------------------------------------------------------


def refused(*messages):
    return pytest.raises(jp.InputError, match=".*".join(messages))


def soft_prompt(folder, width=32):
    np.save(folder / "soft.npy", np.ones((3, width), np.float32))
    return jp.load_prompt(folder / "soft.npy")


@pytest.mark.long
def test_a_window_is_masked_at_any_length(backbones, tmp_path):
    """A Mistral's of 8 tokens, which the shorter texts do not fill."""
    task = jp.task("text", labels=LABELS, words=WORDS, template="{text} about [mask]")
    prompt = soft_prompt(tmp_path)
    model = jp.attach(backbones("mistral"), prompt, task=task, head=jp.verbalizer(), max_len=40)
    write_stablehlo(model, tmp_path / "x")
    for texts in (["a cat"], ["the old cat was very near a small hammer and the bread", "rice"]):
        batch = model.encode(texts)
        exported = jax.export.deserialize((tmp_path / "x/scorer.stablehlo").read_bytes())
        weights = load_file(tmp_path / "x/scorer.safetensors")
        card = json.loads((tmp_path / "x/scorer.json").read_text())
        names = [argument["name"] for argument in card["inputs"]]
        actual = exported.call(weights, inputs_of(batch, names))
        expected = jp.scores(model.params, model, batch)
        np.testing.assert_allclose(actual, expected[:, : actual.shape[1]], rtol=0, atol=1e-5)


@pytest.mark.long
def test_a_discriminators_scores_are_before_the_sigmoid_of_each(backbones, texts, tmp_path):
    task = jp.task("text", labels=LABELS, words=WORDS, template="[soft] {text} Class: [classes].")
    prompt, folder = soft_prompt(tmp_path, width=24), tmp_path / "x"
    backbone, head = backbones("discriminator"), jp.discriminator()
    model = jp.attach(backbone, prompt, task=task, head=head, max_len=40)
    write_stablehlo(model, folder)
    assert read(folder)[2]["output"]["meaning"].endswith("before the sigmoid of each")
    rows = [{"text": text} for text in texts[:2]]
    scores = np.asarray(jp.scores(model.params, model, model.encode(rows)))
    actual = [list(row["scores"].values()) for row in jp.predict(model, rows)]
    np.testing.assert_allclose(actual, 1 / (1 + np.exp(-scores)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["deberta", "deberta_v2"])
def test_distances_of_one_length_are_refused(family, backbones, tmp_path):
    task = jp.task("text", labels=LABELS, words=WORDS, template="{text} about [mask]")
    model = jp.attach(backbones(family), soft_prompt(tmp_path), task=task, head=jp.verbalizer())
    with refused(f"stablehlo: a {family} computes distances for a fixed text length"):
        write_stablehlo(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_what_writes_is_refused(backbones, tmp_path):
    task = jp.task("text", target="label", template="{text}")
    model = jp.attach(backbones("t5"), soft_prompt(tmp_path), task=task, head=jp.text())
    with refused("stablehlo: head.name=text", "free-text task", "use head.name=linear"):
        write_stablehlo(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_row_per_choice_is_refused(backbone, tmp_path):
    task = jp.task("text", choices=("a", "b"), template="[soft] {text} [sep] {choice}")
    prompt = soft_prompt(tmp_path)
    head = {"head/main/out/kernel": np.ones((32, 1)), "head/main/out/bias": np.ones(1)}
    prompt = dataclasses.replace(prompt, tensors=prompt.tensors | head)
    model = jp.attach(backbone, prompt, task=task, max_len=40)
    with refused("2 rows of an example, one per choice", "{choices}"):
        write_stablehlo(model, tmp_path / "x")


def test_the_rest_that_cannot_be(models, tmp_path):
    model = models("bert-prefix-linear")
    (tmp_path / "file").write_text("")
    with refused("cannot write", "file"):
        write_stablehlo(model, tmp_path / "file" / "x")
    (tmp_path / "y" / "scorer.json").mkdir(parents=True)
    with refused("contains scorer.json, which is not part of"):
        write_stablehlo(model, tmp_path / "y")


@pytest.mark.long
def test_files_of_others_stay(models, tmp_path):
    model = models("bert-prefix-linear")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "run.py").write_text("# mine")
    with refused("contains run.py, which is not part of this --stablehlo export"):
        write_stablehlo(model, folder)
    assert (folder / "run.py").read_text() == "# mine" and len(list(folder.iterdir())) == 1
    other_folder = tmp_path / "own"
    jp.save_prompt(model.prompt, other_folder)  # an export may stand beside
    for _ in range(2):
        write_stablehlo(model, other_folder)
    assert {path.name for path in other_folder.iterdir()} == {
        *FILES,
        "prompt.json",
        "prompt.safetensors",
    }
    words = (f"--workdir={tmp_path}", "--config=configs/base.py:prefix", f"--stablehlo={folder}")
    with refused("contains run.py"):  # before the run is read
        export_command.main(words)
